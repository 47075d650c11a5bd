"""Too little memory for everybody: sequences make room for each other, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.engine.plan import Plan
from quire.engine.sequence import PARKED
from quire.errors import OutOfMemory, RequestError, TierError
from quire.memory.lease import Lease
from quire.ops import Refused
from tests import tiny

PROMPTS = [[i] * (20 + i) for i in range(12)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=512))
    return made


@pytest.fixture(autouse=True)
def swap_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def expected(path: Path) -> Iterator[list[list[int]]]:
    with quire.load(path) as roomy:
        completions = roomy.generate(PROMPTS, max_tokens=40, ignore_eos=True)
        yield [c.token_ids for c in completions]


def generate(llm: quire.LLM) -> list[list[int]]:
    got = llm.generate(PROMPTS, max_tokens=40, ignore_eos=True)
    llm.memory.audit()
    return [c.token_ids for c in got]


def counts(llm: quire.LLM) -> dict[str, int]:
    found: dict[str, int] = llm.memory.as_dict()["preemption"]
    return found


def test_by_computing_again(path: Path, expected: list[list[int]]) -> None:
    with quire.load(path, kv_cache_tokens=160, swap_space=0) as llm:
        assert generate(llm) == expected
        assert counts(llm)["recomputed"] > 0 and counts(llm)["parked"] == 0


def test_by_swapping(
    path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(path, kv_cache_tokens=160) as llm:
        monkeypatch.setattr(llm.engine.room, "_seconds_per_token", lambda: 1e6)
        assert generate(llm) == expected
        assert counts(llm)["parked"] > 0 and counts(llm)["recomputed"] == 0
        assert counts(llm)["parked"] == counts(llm)["brought back"]
        llm.forget()  # cached prefixes went there too
        assert {tier["used"] for tier in llm.memory.as_dict()["tiers"].values()} == {0}


def test_what_is_sooner_done_is_done(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quire.load(path, kv_cache_tokens=160) as llm:
        for speed, manner in ((1e6, "parked"), (0.0, "recomputed")):
            before = counts(llm)[manner]
            monkeypatch.setattr(llm.engine.room, "_seconds_per_token", lambda speed=speed: speed)
            generate(llm)
            assert counts(llm)[manner] > before


@pytest.mark.host
def test_swap_that_cannot_be_written_or_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"store": 0, "load": 0}

    def failing(name: str, real: object) -> object:
        def sometimes(*args: object) -> object:
            calls[name] += 1
            if calls[name] % 2:
                raise TierError("injected")
            assert callable(real)
            return real(*args)

        return sometimes

    with quire.load(path) as roomy:
        expected = generate(roomy)
    with quire.load(path, kv_cache_tokens=160) as llm:
        monkeypatch.setattr(llm.engine.room, "_seconds_per_token", lambda: 1e6)
        (disk,) = llm.engine.tiers.tiers
        for name in calls:
            monkeypatch.setattr(disk, name, failing(name, getattr(disk, name)))
        assert generate(llm) == expected
        assert min(calls.values()) > 1


def test_sessions_that_rest_make_room_and_come_back(path: Path) -> None:
    with quire.load(path, kv_cache_tokens=256, n_ctx=256) as llm:
        resting = [llm.session().append([i] * 60) for i in range(3)]
        mark = resting[1].append([9]).checkpoint()
        before = [s.logits() for s in resting]
        assert len(llm.generate([5] * 150, max_tokens=20, ignore_eos=True).token_ids) == 20
        assert counts(llm)["parked"] > 0
        for s, logits in zip(resting, before, strict=True):
            twin = s.fork()
            assert np.array_equal(twin.append([7]).logits(), s.append([7]).logits())
            twin.close()
            s.rewind(-1)
            assert np.array_equal(s.logits(), logits)
        assert resting[1].append([3] * 30).rewind(mark).tokens == [1] * 60 + [9]
        llm.memory.audit()
        for s in resting:
            s.close()
        llm.forget()
        assert llm.memory.as_dict()["stats"]["attention"]["pages_used"] == 0
        assert llm.memory.as_dict()["tiers"].popitem()[1]["used"] == 0


def test_tokens_that_moved_are_never_computed_again(path: Path) -> None:
    def run(**settings: object) -> tuple[list[int], dict[str, int]]:
        with quire.load(path, n_ctx=300, **settings) as llm, llm.session() as s:
            s.append(list(range(120))).remove(10, 60)
            llm.forget()
            with pytest.raises(OutOfMemory) if settings.get("swap_space") == 0 else nullcontext():
                llm.generate([5] * 120, max_tokens=20, ignore_eos=True)
            return s.generate(max_tokens=20, ignore_eos=True).token_ids, counts(llm)

    roomy, _ = run()
    parked, tally = run(kv_cache_tokens=160)
    assert parked == roomy and tally["parked"] > 0
    assert run(kv_cache_tokens=160, swap_space=0)[0] == roomy


def test_nothing_is_left_of_a_swap_file(path: Path, swap_folder: Path) -> None:
    with quire.load(path, kv_cache_tokens=160) as llm:
        llm.engine.room._seconds_per_token = lambda: 1e6
        generate(llm)
        assert [p for p in swap_folder.rglob("*") if p.is_file()] == []


def test_a_parked_session_goes_on(path: Path) -> None:
    """Its next token is known before its pages are back, and counts once."""
    with quire.load(path) as roomy:
        wanted = roomy.generate([7] * 60, max_tokens=9, ignore_eos=True).token_ids
    with quire.load(path, kv_cache_tokens=160, n_ctx=160) as llm, llm.session() as s:
        s.append([7] * 60)
        llm.generate([5] * 120, max_tokens=20, ignore_eos=True)
        assert s.sequence.status is PARKED and s.sequence.logits is not None
        assert s.generate(max_tokens=9, ignore_eos=True).token_ids == wanted
        assert s.tokens == [7] * 60 + wanted


def test_an_edited_session_survives_what_fails(path: Path) -> None:
    """Its tokens would be others if they were computed again: it is kept, or it says so."""
    for swap in (0, "1GiB"):
        with (
            quire.load(path, kv_cache_tokens=256, n_ctx=256, swap_space=swap) as llm,
            llm.session() as s, llm.session() as hog,
        ):  # fmt: skip
            s.append(list(range(100))).remove(10, 40)
            before, tokens = s.logits(), s.tokens
            hog.append([5] * 100).checkpoint()
            with pytest.raises(OutOfMemory) if swap == 0 else nullcontext():
                s.append([9] * 150).rewind(-150)  # with swap, the mark of the other makes room
            assert s.tokens == tokens and np.array_equal(s.append([]).logits(), before)
            llm.memory.audit()


@pytest.mark.host
def test_one_that_the_device_refuses_fails_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(path) as llm:
        expected = generate(llm)
        llm.forget()
        real = llm.engine.runner.forward

        def forward(plan: Plan, lease: Lease) -> object:
            if any(entry.sequence.tokens[0] == 3 for entry in plan.entries):
                raise Refused("injected")
            return real(plan, lease)

        monkeypatch.setattr(llm.engine.runner, "forward", forward)
        streams = [llm.stream(p, max_tokens=40, ignore_eos=True) for p in PROMPTS[:6]]
        for i, stream in enumerate(streams):
            with pytest.raises(RequestError, match="injected") if i == 3 else nullcontext():
                list(stream)
                assert stream.completion.token_ids == expected[i]
        llm.memory.audit()
