"""A device whose tokens are read one step late gives what one gives whose tokens are not."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.devices.device import Int32
from tests import session_kinds, tiny
from tests.flying import HostSteps, Late
from tests.flying import flying as flying  # a fixture
from tests.models.test_session_oracle import many_worlds
from tests.models.test_session_oracle import surroundings as surroundings  # a fixture

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
        for temperature in (0.0, 0.9):
            sampling = [
                quire.Sampling(temperature=temperature, seed=i, max_tokens=9 + 5 * i)
                for i in range(len(PROMPTS))
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


def test_a_step_that_breaks_off_loses_no_token(
    dense: Path, flying: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    with quire.load(dense, threads=1) as llm:
        want = llm.generate([3, 4, 5], max_tokens=30, ignore_eos=True).token_ids
        real, calls = Late.read, []

        def read(self: Late) -> Int32:
            calls.append(len(calls))
            if len(calls) in (6, 7, 13, 20):
                raise KeyboardInterrupt
            return real(self)

        monkeypatch.setattr(Late, "read", read)
        stream = llm.stream([3, 4, 5], max_tokens=30, ignore_eos=True)
        broken = 0
        for _ in range(60):
            try:
                llm.loop.seat.turn(llm.loop)
            except KeyboardInterrupt:
                broken += 1
        assert broken and stream.completion.token_ids == want
        llm.memory.audit()
