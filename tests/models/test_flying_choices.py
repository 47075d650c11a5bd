"""Penalties, bias and log-probabilities in steps that fly: what waiting steps give, and no less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quire
from quire.devices.device import Int32
from quire.engine.room import Room
from quire.errors import RequestError
from tests import tiny
from tests.choosing import PENALTIES, PROMPTS, WAYS, Said, alone, result, stream, together
from tests.flying import HostSteps
from tests.flying import flying as flying  # a fixture

pytestmark = pytest.mark.host
COUNT = 24


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=512))
    return path


@pytest.fixture(scope="module")
def wanted(dense: Path) -> Said:
    """What a CPU makes of them, where nothing flies."""
    with quire.load(dense, threads=1) as llm:
        assert llm.engine.runner.steps is None
        found = alone(llm, COUNT)
        for i, name in enumerate(WAYS):
            bare = llm.generate(PROMPTS[i], max_tokens=COUNT, ignore_eos=True)
            assert (list(bare.token_ids) == found[i][0]) == (name in ("plain", "logprobs"))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_all_of_it_flies(dense: Path, flying: list[HostSteps], way: str) -> None:
    with quire.load(dense, threads=1) as llm:
        llm.generate([3, 4, 5], max_tokens=9, ignore_eos=True, seed=1, **WAYS[way])
    assert flying[0].followed == 7


def test_what_the_host_has_a_say_in_waits(dense: Path, flying: list[HostSteps]) -> None:
    with quire.load(dense, threads=1) as llm:
        for more in ({"constraint": quire.Regex("[a-z]{9}")}, {"mirostat": 2, "temperature": 1.0}):
            llm.generate([3, 4, 5], max_tokens=9, **more, **PENALTIES)
    assert flying[0].followed == 0


def test_company_and_who_is_gone_change_nothing(
    dense: Path, wanted: Said, flying: list[HostSteps]
) -> None:
    with quire.load(dense, threads=1) as llm:
        assert alone(llm, COUNT) == wanted
        assert together(llm, COUNT) == wanted
    assert flying[0].followed > COUNT


def test_who_gave_way_goes_on_as_if_nothing_was(
    dense: Path, wanted: Said, flying: list[HostSteps]
) -> None:
    """There is room for some of them at a time."""
    with quire.load(dense, threads=1, kv_cache_tokens=128, swap_space=0) as llm:
        assert together(llm, COUNT) == wanted
        assert sum(llm.engine.room.counts.values()) > 0
        llm.memory.audit()


def test_drafts_and_constraints_beside_them(
    dense: Path, wanted: Said, flying: list[HostSteps]
) -> None:
    """They wait, and so does everybody with them; those who are left fly on."""
    with quire.load(dense, threads=1) as llm:
        streams = [stream(llm, i, COUNT) for i in range(len(WAYS))]
        drafted = stream(llm, 1, COUNT // 2, speculate="ngram")
        held = llm.stream(
            PROMPTS[0], constraint=quire.Regex("[a-z ]{4}"), max_tokens=5, **PENALTIES
        )
        assert [result(one) for one in streams] == wanted
        assert result(drafted)[0] == wanted[1][0][: COUNT // 2]
        assert len(held.completion.text) <= 4
    assert flying[0].followed > 0


@pytest.mark.parametrize("at", [(4, 5), (7, 12)])
def test_steps_that_break_off_count_nothing_twice(
    dense: Path, wanted: Said, flying: list[HostSteps], monkeypatch: Any, at: tuple[int, ...]
) -> None:
    with quire.load(dense, threads=1) as llm:
        real, calls, broken = HostSteps.read, [], 0

        def read(self: HostSteps, ids: Int32) -> Int32:
            calls.append(len(calls))
            if len(calls) in at:
                raise KeyboardInterrupt
            return real(self, ids)

        monkeypatch.setattr(HostSteps, "read", read)
        streams = [stream(llm, i, COUNT) for i in range(len(WAYS))]
        for _ in range(3 * COUNT):
            try:
                llm.loop.seat.turn(llm.loop)
            except KeyboardInterrupt:
                broken += 1
        assert broken == len(at)
        assert [result(one) for one in streams] == wanted


def test_an_early_end_tells_of_its_own_tokens_alone(
    dense: Path, wanted: Said, flying: list[HostSteps]
) -> None:
    with quire.load(dense, threads=1) as llm:
        last = list(WAYS).index("all")
        one = stream(llm, last, COUNT)
        next(one)
        [sequence] = llm.engine.scheduler.active
        assert sequence.generation is not None
        sequence.generation.hidden = frozenset(wanted[last][0][5:6])
        tokens, told = result(one)
        n = wanted[last][0].index(wanted[last][0][5]) + 1
        assert tokens == wanted[last][0][:n] and told == wanted[last][1][:n]


def test_more_tokens_than_there_are_cannot_be_told(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=64))
    with quire.load(path, threads=1) as llm:
        llm.engine.n_vocab = 12
        with pytest.raises(
            RequestError, match="logprobs asks for 13 tokens; the vocabulary has 12"
        ):
            llm.generate([3, 4], logprobs=13)


@pytest.mark.parametrize("swap", [0, "64MiB"])
def test_models_on_one_budget_lend_while_they_fly(
    dense: Path, wanted: Said, flying: list[HostSteps], monkeypatch: Any, swap: object
) -> None:
    """What rests and what is cached of the one gives way to the other; what flies goes on."""
    real, lent = Room.lend, []

    def lend(self: Room, up_to: int) -> bool:
        found = real(self, up_to)
        lent.append(found and self is llm.engine.room and llm.engine.flying is not None)
        return found

    monkeypatch.setattr(Room, "lend", lend)
    with quire.load(dense, threads=1) as roomy:
        long = roomy.generate([5] * 400, max_tokens=8, ignore_eos=True).token_ids
        weights = 2 * roomy.budget.breakdown["weights"]
    for more in range(300_000, 700_000, 100_000):
        with (
            quire.load(dense, threads=1, memory_budget=weights + more, swap_space=swap) as llm,
            quire.load(dense, threads=1, beside=llm) as other,
        ):
            sessions = [llm.session().append([20 + i] * 100) for i in range(4)]
            streams = [stream(llm, i, COUNT) for i in range(len(WAYS))]
            while llm.engine.flying is None:
                llm.loop.seat.turn(llm.loop)
            assert other.generate([5] * 400, max_tokens=8, ignore_eos=True).token_ids == long
            assert [result(one) for one in streams] == wanted
            assert [session.tokens for session in sessions] == [[20 + i] * 100 for i in range(4)]
            llm.memory.audit()
            other.memory.audit()
    assert any(lent)
