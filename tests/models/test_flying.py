"""A device whose tokens are read one step late gives what one gives whose tokens are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.devices.device import Int32
from quire.errors import ModelError
from quire.ops import Refused
from tests import session_kinds, tiny
from tests.flying import HostSteps
from tests.flying import flying as flying  # a fixture
from tests.models.test_session_oracle import many_worlds
from tests.models.test_session_oracle import surroundings as surroundings  # a fixture

pytestmark = pytest.mark.host
PROMPTS = [[3, 4, 5], [9] * 20, [7, 8], [3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=512))
    return path


def generated(path: Path, **settings: object) -> list[list[int]]:
    """Greedy, sampled and cut by their own last tokens: everything that a session may make."""
    found = []
    with quire.load(path, threads=1, **settings) as llm:
        looking_back = {"temperature": 0.0, "repetition_penalty": 3.0}
        cut = {"temperature": 10.0, "top_k": 9, "top_p": 0.8, "min_p": 0.01}
        for how in ({"temperature": 0.0}, {"temperature": 10.0}, cut, looking_back):
            sampling = [
                quire.Sampling(seed=i, max_tokens=9 + 5 * i, **how) for i in range(len(PROMPTS))
            ]
            streams = [llm.stream(p, s) for p, s in zip(PROMPTS, sampling, strict=True)]
            for stream in streams:
                assert list(stream)
                found.append(list(stream.completion.token_ids))
        with llm.session() as session:
            session.append([5, 6, 7])
            session.generate(max_tokens=7)
            with session.fork() as fork:
                fork.generate(max_tokens=4)
                found.append(fork.tokens)
            session.rewind(-3)
            session.generate(max_tokens=5)
            found.append(session.tokens)
    return found


def test_late_tokens_are_the_same(dense: Path, request: pytest.FixtureRequest) -> None:
    want = generated(dense)
    made: list[HostSteps] = request.getfixturevalue("flying")
    assert generated(dense) == want
    assert sum(steps.followed for steps in made) > 40


@pytest.mark.parametrize("kind", session_kinds.KINDS)
def test_sessions_hold_what_their_tokens_say(
    kind: str, tmp_path: Path, flying: list[HostSteps]
) -> None:
    many_worlds(kind, tmp_path, range(7, 9), 120)
    assert sum(steps.followed for steps in flying) > 0


def test_nobody_is_parked_who_has_ended(
    dense: Path, flying: list[HostSteps], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are free as soon as it is told, and the next step can wait for that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = [[3 + i] * (20 + i) for i in range(12)]
    with quire.load(dense, kv_cache_tokens=160) as llm:
        llm.engine.room._seconds_per_token = lambda: 1e6
        made = llm.generate(prompts, max_tokens=40, ignore_eos=True)
        found = llm.memory.as_dict()["preemption"]
    assert sum(steps.followed for steps in flying) > 0
    assert found["parked"] == found["brought back"] > 0 and found["recomputed"] == 0
    with quire.load(dense) as roomy:
        wanted = roomy.generate(prompts, max_tokens=40, ignore_eos=True)
    assert [one.token_ids for one in made] == [one.token_ids for one in wanted]


def test_no_step_is_run_in_vain(dense: Path, flying: list[HostSteps]) -> None:
    """Where a generation ends is often known before its tokens are."""
    with quire.load(dense, threads=1) as llm:
        llm.generate([3, 4, 5], max_tokens=9, ignore_eos=True)
        assert llm.engine.runner.tokens_run == 3 + 8
        assert sum(steps.followed for steps in flying) == 7


@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {}])
def test_whatever_is_left_to_chance_flies(
    dense: Path, flying: list[HostSteps], how: dict[str, Any]
) -> None:
    with quire.load(dense, threads=1) as llm:
        llm.generate([3, 4, 5], max_tokens=9, ignore_eos=True, temperature=1.0, **how)
    assert flying[0].followed == 7


def test_who_comes_later_joins_those_who_fly(dense: Path, flying: list[HostSteps]) -> None:
    with quire.load(dense, threads=1) as llm:
        want = llm.generate(PROMPTS[:2], max_tokens=30, ignore_eos=True)
        first = llm.stream(PROMPTS[0], max_tokens=30, ignore_eos=True)
        for _ in range(5):
            llm.loop.seat.turn(llm.loop)
        assert llm.engine.flying is not None
        second = llm.stream(PROMPTS[1], max_tokens=4, ignore_eos=True)
        for _ in range(8):
            llm.loop.seat.turn(llm.loop)
        assert second.completion.token_ids == want[1].token_ids[:4]
        assert list(first) and first.completion.token_ids == want[0].token_ids


def test_nothing_flies_while_something_else_is_done(dense: Path, flying: list[HostSteps]) -> None:
    with quire.load(dense, threads=1) as llm:
        loop, found = llm.loop, []

        def look() -> None:
            found.append(llm.engine.flying is None)

        def gone() -> None:
            loop.when_gone(Handle(), look)

        stream = llm.stream([3, 4, 5], max_tokens=40, ignore_eos=True)
        for ask in (lambda: loop.call(look), lambda: loop.later(look), gone):
            for _ in range(3):
                loop.seat.turn(loop)
            assert llm.engine.flying is not None
            ask()
            loop.seat.turn(loop)
        assert found == [True] * 3 and len(list(stream)) > 0


class Handle:
    """Something to let go of."""


def test_a_step_that_breaks_off_loses_no_token(
    dense: Path, flying: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(dense, threads=1) as llm:
        want = llm.generate([3, 4, 5], max_tokens=30, ignore_eos=True).token_ids
        real, calls = HostSteps.read, []

        def read(self: HostSteps, ids: Int32) -> Int32:
            calls.append(len(calls))
            if len(calls) in (6, 7, 13, 20):
                raise KeyboardInterrupt
            return real(self, ids)

        monkeypatch.setattr(HostSteps, "read", read)
        stream = llm.stream([3, 4, 5], max_tokens=30, ignore_eos=True)
        broken = 0
        for _ in range(60):
            try:
                llm.loop.seat.turn(llm.loop)
            except KeyboardInterrupt:
                broken += 1
        assert broken and stream.completion.token_ids == want
        llm.memory.audit()


def test_a_next_step_that_breaks_off_loses_no_token(
    dense: Path, flying: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a device raises, tokens of the step before it are read."""
    with quire.load(dense, threads=1) as llm:
        want = llm.generate(PROMPTS[:2], max_tokens=20, ignore_eos=True)
        real, calls = HostSteps.run, []

        def run(self: HostSteps, *args: Any) -> Any:
            calls.append(args[6] is not None)  # it follows another
            if sum(calls) in (3, 8) and calls[-1]:
                raise MemoryError
            return real(self, *args)

        streams = [llm.stream(p, max_tokens=20, ignore_eos=True) for p in PROMPTS[:2]]
        monkeypatch.setattr(HostSteps, "run", run)
        broken = 0
        for _ in range(60):
            try:
                llm.loop.seat.turn(llm.loop)
            except MemoryError:
                broken += 1
        assert broken == 2
        assert [s.completion.token_ids for s in streams] == [one.token_ids for one in want]
        llm.memory.audit()


def test_what_waits_for_a_step_is_done_though_it_fails(
    dense: Path, flying: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: HostSteps, ids: Int32) -> Int32:
        raise Refused("the tokens cannot be read")

    with quire.load(dense, threads=1) as llm:
        want = llm.generate([3, 4, 5], max_tokens=20, ignore_eos=True).token_ids
        for ask in (llm.loop.later, llm.loop.call):
            stream, done = llm.stream([3, 4, 5], max_tokens=20, ignore_eos=True), []
            for _ in range(5):
                llm.loop.seat.turn(llm.loop)
            assert llm.engine.flying is not None
            with monkeypatch.context() as patch:
                patch.setattr(HostSteps, "read", read)
                ask(lambda done=done: done.append(1))
                llm.loop.seat.call(lambda: None)
            assert done and list(stream) and stream.completion.token_ids == want


def test_a_row_without_numbers_ends_its_request_alone(
    dense: Path, flying: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(dense, threads=1) as llm:
        want = llm.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).token_ids
        session = llm.session().append(PROMPTS[1])
        streams = [
            llm.stream(PROMPTS[0], max_tokens=20, ignore_eos=True),
            session.stream(max_tokens=20, ignore_eos=True),
        ]
        real, calls = type(llm.model).logits, []

        def logits(self: Any, x: Any) -> Any:
            found = real(self, x)
            calls.append(found.shape[0])
            if len(calls) == 6:
                llm.ops.numpy(found)[1] = np.nan
            return found

        monkeypatch.setattr(type(llm.model), "logits", logits)
        for _ in range(40):
            llm.loop.seat.turn(llm.loop)
        assert set(calls[4:7]) == {2} and set(calls[8:]) == {1}, "they flew, and one went on"
        assert streams[0].completion.token_ids == want
        with pytest.raises(ModelError, match="not numbers"):
            list(streams[1])
        kept = session.tokens
        assert min(kept) >= 0 and len(kept) > len(PROMPTS[1])
        with llm.session() as fresh:
            assert (session.logits() == fresh.append(kept).logits()).all()
        llm.memory.audit()


def test_a_prompt_without_numbers_is_nobodys_beginning(
    dense: Path, flying: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(dense, threads=1) as llm:
        with monkeypatch.context() as broken:
            broken.setattr(HostSteps, "draw", lambda *_: (np.full(1, -2, np.int32), {}))
            with pytest.raises(ModelError, match="not numbers"):
                llm.generate(PROMPTS[1], max_tokens=3)
        again = llm.generate(PROMPTS[1], max_tokens=3)
        assert again.cached_tokens == 0
        assert llm.generate(PROMPTS[1], max_tokens=3).cached_tokens == len(PROMPTS[1]) - 1


def test_an_edited_session_goes_on_after_a_stop(tmp_path: Path, flying: list[HostSteps]) -> None:
    """Its last token could not be taken back, if that were in memory already."""
    path = session_kinds.write("window", tmp_path)
    with quire.load(path, threads=1, n_ctx=400) as llm:
        for n in range(72, 87):
            with llm.session() as session:
                session.append([(7 * i * i + n) % 200 + 5 for i in range(n)]).remove(5, 9)
                stream = session.stream(max_tokens=40, ignore_eos=True)
                next(stream)
                generation = session.sequence.generation
                assert generation is not None
                generation.hidden = frozenset(range(llm.engine.n_vocab))  # the next token ends it
                list(stream)
                assert stream.completion.finish_reason == "stop"
                session.logits()
                assert session.generate(max_tokens=2, ignore_eos=True).token_ids
