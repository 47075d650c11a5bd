"""Streams, sessions and models that end early, late, twice or not at all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.config import process_memory
from quire.errors import RequestError, TierError
from tests import tiny
from tests.budgets import pages

GO = {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture
def llm(path: Path) -> Iterator[quire.LLM]:
    with quire.load(path, kv_cache_tokens=400) as loaded:
        yield loaded


def running(llm: quire.LLM) -> tuple[quire.Session, quire.Stream]:
    session = llm.session().append([1, 2, 3])
    stream = session.stream(**GO)
    next(stream)
    return session, stream


def test_a_stream_goes_on_where_it_was_left(llm: quire.LLM) -> None:
    whole = list(llm.stream([1, 2, 3], **GO))
    stream = llm.stream([1, 2, 3], **GO)
    first = next(iter(stream))
    for second in stream:
        rest = [first, second]
        break
    assert [*rest, *stream] == whole
    assert list(stream) == [] and pages(llm) == 0


def test_a_closed_stream_has_no_more(llm: quire.LLM) -> None:
    stream = llm.stream([1, 2, 3], **GO)
    stream.close()
    assert list(stream) == [] and stream.completion.finish_reason == "cancelled"
    assert pages(llm) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.append([5]),
        lambda s: s.rewind(-1),
        lambda s: s.generate(max_tokens=3),
        lambda s: s.stream(max_tokens=3),
        lambda s: s.generate(logit_bias={9999: 1.0}),
        lambda s: s.keep(),
        lambda s: s.remove(0, 1),
        lambda s: s.logits(),
    ],
)
def test_a_session_with_a_stream_is_not_changed_by_others(
    llm: quire.LLM, change: Callable[[quire.Session], object]
) -> None:
    whole = "".join(llm.session().append([1, 2, 3]).stream(**GO))
    session, stream = running(llm)
    with pytest.raises(RequestError):
        change(session)
    rest = "".join(stream)
    assert whole.endswith(rest) and len(session.tokens) == 23
    session.close()
    del stream
    assert pages(llm) == 0


def test_a_session_takes_its_stream_with_it(llm: quire.LLM) -> None:
    session, stream = running(llm)
    session.close()
    assert list(stream) == [] and pages(llm) == 0


def test_what_is_abandoned_is_given_back(llm: quire.LLM) -> None:
    for i in range(10):
        llm.session().append([i] * 20).checkpoint()
        running(llm)
    assert pages(llm) == 0


@pytest.mark.host
def test_garbage_collected_within_a_step_waits_for_its_end(
    llm: quire.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate([4, 5], **GO).token_ids
    _, stream = running(llm)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle, _
    real = llm.engine.runner.forward

    def forward(*args: object) -> object:
        gc.collect()
        return real(*args)

    monkeypatch.setattr(llm.engine.runner, "forward", forward)
    assert llm.generate([4, 5], **GO).token_ids == expected
    assert pages(llm) == 0


def test_a_closed_model_says_so(path: Path) -> None:
    llm = quire.load(path)
    session, stream = running(llm)
    other = llm.session().append([7])
    mark = other.checkpoint()
    llm.close()
    llm.close()
    list(stream)  # what had come, and no more
    uses: list[Callable[[], object]] = [
        lambda: session.generate(**GO), lambda: other.append([1]), lambda: other.rewind(mark),
        lambda: llm.generate([1], **GO), llm.session, lambda: llm.logits([1]),
        lambda: other.fork(),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(RequestError, match="this model is closed"):
            use()
    session.close()
    other.close()
    assert llm.budget.used == 0


def test_marks_belong_to_a_model_and_last_until_dropped(llm: quire.LLM, path: Path) -> None:
    with llm.session() as s, quire.load(path) as other, other.session() as stranger:
        mark = s.append([1] * 40).checkpoint("here")
        with pytest.raises(RequestError, match="another model"):
            stranger.append([2]).rewind(mark)
        assert stranger.tokens == [2]
        s.append([5] * 10).rewind(mark).drop(mark)
        assert s.marks == {}
        for gone in (lambda: s.rewind(mark), lambda: s.drop(mark)):
            with pytest.raises(RequestError, match="mark 'here' is"):
                gone()
        for bad in (5, "", ["x"]):
            with pytest.raises(RequestError, match="needs a name"):
                s.checkpoint(bad)


def test_an_error_is_told_once(path: Path) -> None:
    with quire.load(path, kv_cache_tokens=64, n_ctx=200, swap_space=0) as llm:
        hog = llm.session().append([1] * 40)
        hog.checkpoint()
        with llm.session() as s:
            with pytest.raises(quire.errors.OutOfMemory, match="marks, pinned prefixes"):
                s.append([2] * 50)
            hog.close()
            assert len(s.append([2] * 30).generate(max_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize("prompt", [[1.5, 2], ["a"], None, [1, None], 7])
def test_prompts_are_texts_or_token_ids(llm: quire.LLM, prompt: object) -> None:
    with llm.session() as s:
        uses = (s.append,) if prompt == ["a"] else (s.append, llm.generate)  # a batch of one
        for use in uses:
            with pytest.raises(RequestError):
                use(prompt)
        assert s.tokens == []
        s.append(np.array([1, 2]))
        assert [type(t) for t in s.tokens] == [int, int]


def test_appending_nothing_changes_nothing(llm: quire.LLM) -> None:
    with llm.session() as s:
        s.append([]).append("")
        before = s.append([1, 2]).logits()
        s.append([])
        assert np.array_equal(s.logits(), before) and not llm.engine.scheduler.active


def test_sessions_use_and_give_cached_prefixes_by_salt(llm: quire.LLM) -> None:
    prompt = list(range(90))
    llm.generate(prompt, **GO)
    for salt, run in (("", 1), ("tenant", 90)):
        before = llm.engine.runner.tokens_run
        with llm.session(cache_salt=salt) as s:
            s.append(prompt)
            assert llm.engine.runner.tokens_run - before == run
    assert llm.generate([*prompt, 1], cache_salt="tenant", max_tokens=1).cached_tokens == 90
    with pytest.raises(RequestError, match="cache_salt"):
        llm.session(cache_salt=None)


def test_resting_sessions_give_way_however_they_are_held(path: Path) -> None:
    for swap in ("1GiB", 0):
        with quire.load(path, kv_cache_tokens=160, n_ctx=160, swap_space=swap) as llm:
            s = llm.session().append([1] * 100)
            twin = s.fork()
            expected = s.logits()
            assert len(llm.generate([3] * 90, max_tokens=4, ignore_eos=True).token_ids) == 4
            assert len(llm.logits([4] * 90)) == 90
            assert np.array_equal(s.append([]).logits(), expected)
            assert np.array_equal(twin.logits(), expected)
            s.close(), twin.close()
            assert pages(llm) == 0


@pytest.mark.host
def test_what_cannot_be_computed_again_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with quire.load(path, kv_cache_tokens=160, n_ctx=160) as llm:
        s = llm.session().append(list(range(100))).remove(10, 30)
        llm.forget()
        llm.generate([3] * 120, max_tokens=4, ignore_eos=True)
        (disk,) = llm.engine.tiers.tiers

        def fails(*_: object) -> None:
            raise TierError("injected")

        monkeypatch.setattr(disk, "load", fails)
        with pytest.raises(TierError):
            s.fork()
        s.close()
        assert pages(llm) == 0


def test_arrays_of_many_shapes_take_no_more_and_more(path: Path) -> None:
    rng = np.random.default_rng(0)

    def run(n: int, llm: quire.LLM) -> int:
        for length in rng.integers(1, 300, n):
            llm.generate([int(t) for t in rng.integers(0, 250, length)], max_tokens=2)
        return llm.ops.compute_bytes

    with quire.load(path, memory_budget="64MiB") as llm:
        first = run(80, llm)
        assert run(300, llm) <= 1.3 * first
        assert llm.budget.breakdown["compute"] == llm.ops.compute_bytes


def test_a_load_that_fails_gives_everything_back(path: Path) -> None:
    with quire.load(path, memory_budget="64MiB") as llm:
        before = llm.budget.breakdown
        with pytest.raises(quire.errors.QuireError):
            quire.load(path, beside=llm, kv_cache_demand_paged=False, kv_cache_tokens=10**7)
        assert llm.budget.breakdown == before

        def stop(done: int, total: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            quire.load(path, beside=llm, progress=stop)
        assert llm.budget.breakdown == before


@pytest.mark.host
def test_cached_prefixes_hold_no_more_than_half(path: Path) -> None:
    rng = np.random.default_rng(1)
    with quire.load(path, memory_budget="4MiB", swap_space=0) as llm:
        free = llm.budget.free
        common = rng.integers(0, 250, 40).tolist()  # pages that several entries hold together
        for _ in range(60):
            llm.generate([*common, *rng.integers(0, 250, 60).tolist()], max_tokens=2)
            assert llm.engine.prefix.index.held_bytes <= free // 2
            assert llm.memory.as_dict()["prefix"]["bytes_only_here"] <= free // 2


@pytest.mark.parametrize("named", [{"beside": 5}, {"progress": 5}])
def test_odd_arguments_of_load_are_refused(path: Path, named: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(named))):
        quire.load(path, **named)  # type: ignore[arg-type]


@pytest.mark.host
def test_closing_gives_weights_and_pages_back_at_once(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    shape = tiny.Tiny(width=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, layers=4, context=4096)
    tiny.write(path, shape)
    with quire.load(path) as warm:  # threads, libraries and tables that stay
        warm.generate("hello", max_tokens=2)
    weights = warm.model.weight_bytes
    del warm
    gc.collect()
    gc.disable()  # nothing is to wait for it
    try:
        before = process_memory()
        llm = quire.load(path)
        session = llm.session().append("hello " * 300)
        loaded = process_memory() - before
        held = llm.memory.uses
        llm.close()
        left = process_memory() - before
        assert weights > 16 << 20 and loaded > weights == held["weights"]
        assert left < 5 << 20, f"{left:,} of {loaded:,} bytes are left"
        uses = llm.memory.uses
        assert set(uses) == {"interpreter, libraries, vocabulary"}
        assert session is not None and llm.memory.as_dict()["used_bytes"] == 0
    finally:
        gc.enable()
