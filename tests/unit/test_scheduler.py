"""Who runs: the policy alone, over a memory that only counts tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.devices.budget import Budget
from quire.engine.generation import Generation, StopRules
from quire.engine.planner import Planner
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import LOST, PARKED, Sequence
from quire.errors import QuireError
from quire.types import Sampling

END = 99


class CountingMemory:
    """Room for so many tokens."""

    def __init__(self, room: int, tier: int = 0) -> None:
        self.room = room
        self.held: dict[int, int] = {}
        self.away: dict[int, int] = {}
        self.tier = tier

    def fits(self, counts: Seq[tuple[int, int]]) -> bool:
        back = sum(self.away.get(seq, 0) for seq, _ in counts)
        return back + sum(self.held.values()) + sum(n for _, n in counts) <= self.room

    def is_shared(self, seq: int) -> bool:
        return False


class CountingRoom:
    """Makes room at once; with `tier`, by parking as long as so many tokens fit there."""

    def __init__(self, memory: CountingMemory, active: list[Sequence]) -> None:
        self.memory = memory
        self.active = active

    def make(self, fits: Callable[[], bool], for_: Sequence | None, up_to: int) -> bool:
        while not fits():
            others = [o for o in reversed(self.active) if o is not for_ and o.computed]
            if for_ is None or not others:
                return False
            if not any(self.preempt(other) for other in others):
                self.lose(others[0])
        return True

    def preempt(self, sequence: Sequence) -> bool:
        if sequence.status is PARKED:
            return False
        held = self.memory.held.get(sequence.id, 0)
        if sum(self.memory.away.values()) + held <= self.memory.tier:
            self.memory.away[sequence.id] = self.memory.held.pop(sequence.id)
            sequence.park()
        else:
            self.lose(sequence)
        sequence.preempt()
        return True

    def bring_back(self, sequence: Sequence) -> bool:
        self.memory.held[sequence.id] = self.memory.away.pop(sequence.id)
        sequence.unpark()
        return True

    def lose(self, sequence: Sequence) -> None:
        self.memory.held.pop(sequence.id, None)
        self.memory.away.pop(sequence.id, None)
        sequence.lose()


class NoPrefixes:
    """Nothing is known of any prompt, and no file is read or written."""

    def __init__(self) -> None:
        self.budget = Budget(1)

    def start_over(self, sequence: Sequence) -> None:
        assert sequence.status is LOST
        sequence.adopt(0, None)


class House:
    """A scheduler, and what carries out its plans."""

    def __init__(self, room: int, max_tokens: int, tier: int = 0) -> None:
        self.memory = CountingMemory(room, tier)
        self.scheduler = Scheduler(max_tokens)
        self.failed: list[int] = []
        giving: Any = CountingRoom(self.memory, self.scheduler.active)
        memory: Any = self.memory
        prefixes: Any = NoPrefixes()
        self.planner = Planner(
            self.scheduler, memory, giving, prefixes, self._fail, prefixes.start_over
        )

    def _fail(self, sequence: Sequence, error: QuireError) -> None:
        self.failed.append(sequence.id)
        self.memory.held.pop(sequence.id, None)
        self.scheduler.remove(sequence)

    def step(self, token: int = 5) -> dict[int, str | None]:
        """One token for everybody who reaches its end; returns who got one, and why it ended."""
        plan = self.planner.plan(self.scheduler.active)
        assert sum(e.count for e in plan.entries) <= self.scheduler.max_tokens
        gained: dict[int, str | None] = {}
        for entry in plan.entries:
            sequence, held = entry.sequence, self.memory.held.get(entry.sequence.id, 0)
            assert held == sequence.computed
            self.memory.held[sequence.id] = held + entry.count
            sequence.advance(entry.count)
            if entry.ends:
                assert sequence.generation is not None
                gained[sequence.id] = reason = sequence.generation.take(token)
                sequence.gain([token])
                if reason:
                    self.scheduler.remove(sequence)
        assert sum(self.memory.held.values()) <= self.memory.room
        for id, reason in gained.items():
            if reason:
                del self.memory.held[id]
        return gained


class NoSampler:
    def observe(self, token: int) -> None:
        pass


def sequence(id: int, prompt: int, answer: int, ignore_eos: bool = False) -> Sequence:
    made = Sequence(id, [1] * prompt)
    sampling = Sampling(max_tokens=answer, ignore_eos=ignore_eos)
    made.start(Generation(sampling, NoSampler(), None, StopRules(frozenset({END}), answer)))
    return made


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(80, 200),
    st.integers(1, 40),
    st.sampled_from([0, 50, 10_000]),
)
def test_whoever_fits_alone_finishes(
    sizes: list[tuple[int, int]], room: int, max_tokens: int, tier: int
) -> None:
    house = House(room, max_tokens, tier)
    for id, (prompt, answer) in enumerate(sizes):
        house.scheduler.add(sequence(id, prompt, answer))
    gained = dict.fromkeys(range(len(sizes)), 0)
    for _ in range(20_000):
        if not house.scheduler.active:
            break
        for id in house.step():
            gained[id] += 1
    assert not house.scheduler.active and not house.failed
    assert gained == {id: answer for id, (_, answer) in enumerate(sizes)}


def test_one_that_does_not_fit_alone_fails_and_others_go_on() -> None:
    house = House(50, 64)
    house.scheduler.add(sequence(0, 51, 5))
    house.scheduler.add(sequence(1, 10, 5))
    gained = 0
    for _ in range(50):
        if house.scheduler.active:
            gained += 1 in house.step()
    assert house.failed == [0] and gained == 5


def test_generating_sequences_do_not_wait_for_a_prompt() -> None:
    house = House(1000, 8)
    house.scheduler.add(sequence(0, 4, 50))
    house.step()
    house.scheduler.add(sequence(1, 100, 5))
    for _ in range(10):
        plan = house.planner.plan(house.scheduler.active)
        assert [(e.sequence.id, e.count) for e in plan.entries] == [(0, 1), (1, 7)]
        house.step()


def test_a_plan_changes_nothing() -> None:
    """Asked again it says the same, whether it fits or not; what gives way is only named."""
    house = House(30, 64)
    for id in range(3):
        house.scheduler.add(sequence(id, 9, 20))
    house.step()
    active = house.scheduler.active
    before = [dict(vars(s)) for s in active]
    plans = [house.scheduler.plan(active, house.memory.fits) for _ in range(2)]
    assert plans[0] == plans[1] and len(plans[0].entries) == 3
    less = [house.scheduler.less(plan) for plan in plans]
    assert less[0] == less[1]
    assert less[0].preempted == [active[2]] and len(less[0].entries) == 2
    alone = house.scheduler.less(house.scheduler.less(less[0]))
    assert [who for who, _ in alone.failed] == [active[0]] and not alone.entries
    assert [dict(vars(s)) for s in active] == before


def test_an_end_token_ends_unless_ignored() -> None:
    for ignore, reason in ((False, "stop"), (True, None)):
        house = House(100, 8)
        house.scheduler.add(sequence(0, 2, 50, ignore))
        assert house.step(token=END) == {0: reason}


def test_nobody_computes_more_than_it_has() -> None:
    """A sequence that was cut back keeps a branch that lies behind its end."""
    house = House(100, 64)
    one = sequence(0, 20, 5)
    one.adopt(0, 15)
    one.truncate(10)
    house.scheduler.add(one)
    (entry,) = house.scheduler.plan(house.scheduler.active, house.memory.fits).entries
    assert (entry.count, entry.ends) == (10, True)
    one.extend([1] * 30)
    (entry,) = house.scheduler.plan(house.scheduler.active, house.memory.fits).entries
    assert (entry.count, entry.ends) == (15, False)
