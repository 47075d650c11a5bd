"""Who runs: the policy alone, over a memory that only counts tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Accepted, Ends, Generation, Sequence
from quire.types import Request, Sampling

END = 99


class CountingMemory:
    """Room for so many tokens."""

    def __init__(self, room: int, tier: int = 0) -> None:
        self.room = room
        self.held: dict[int, int] = {}
        self.giving = Giving(self, tier)

    def fits(self, counts: Seq[tuple[int, int]]) -> bool:
        back = sum(self.giving.away.get(seq, 0) for seq, _ in counts)
        return back + sum(self.held.values()) + sum(n for _, n in counts) <= self.room


class Giving:
    """Makes room at once; with `tier`, by parking as long as so many tokens fit there."""

    def __init__(self, memory: CountingMemory, tier: int = 0) -> None:
        self.memory = memory
        self.tier = tier
        self.away: dict[int, int] = {}

    def evict_one(self) -> bool:
        return False

    def park_idle(self) -> bool:
        return False

    def preempt(self, sequence: Sequence) -> bool:
        if sequence.parked:
            return False
        held = self.memory.held.get(sequence.id, 0)
        if sum(self.away.values()) + held <= self.tier:
            self.away[sequence.id] = self.memory.held.pop(sequence.id)
            sequence.parked = True
        else:
            self.give_up(sequence)
        return True

    def bring_back(self, sequence: Sequence) -> bool:
        self.memory.held[sequence.id] = self.away.pop(sequence.id)
        sequence.parked = False
        return True

    def give_up(self, sequence: Sequence) -> None:
        self.memory.held.pop(sequence.id, None)
        self.away.pop(sequence.id, None)
        sequence.computed, sequence.parked = 0, False


class NoSampler:
    def observe(self, token: int) -> None:
        pass


def sequence(id: int, prompt: int, answer: int) -> Sequence:
    made = Sequence(id, [1] * prompt)
    made.generation = Generation(
        Request((), Sampling(max_tokens=answer)), NoSampler(), None, Ends(frozenset({END}), answer)
    )
    return made


def step(scheduler: Scheduler, memory: CountingMemory, token: int = 5) -> list[Any]:
    plan = scheduler.plan(memory)
    accepted = []
    for entry in plan.entries:
        held = memory.held.get(entry.sequence.id, 0)
        assert held == entry.sequence.computed
        memory.held[entry.sequence.id] = held + entry.count
        one = Accepted(entry.sequence, entry.count)
        if entry.ends:
            assert entry.sequence.generation is not None
            one.tokens = [token]
            one.finish_reason = entry.sequence.generation.take(token)
        accepted.append(one)
    assert sum(e.count for e in plan.entries) <= scheduler.max_tokens
    assert sum(memory.held.values()) <= memory.room
    outputs = scheduler.advance(accepted)
    for output in outputs:
        if output.finish_reason or output.error:
            memory.held.pop(output.sequence, None)
    return outputs


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(80, 200),
    st.integers(1, 40),
    st.sampled_from([0, 50, 10_000]),
)
def test_whoever_fits_alone_finishes(
    sizes: list[tuple[int, int]], room: int, max_tokens: int, tier: int
) -> None:
    memory = CountingMemory(room, tier)
    scheduler = Scheduler(max_tokens, memory.giving)
    for id, (prompt, answer) in enumerate(sizes):
        scheduler.add(sequence(id, prompt, answer))
    gained = dict.fromkeys(range(len(sizes)), 0)
    for _ in range(20_000):
        if not scheduler.active:
            break
        for output in step(scheduler, memory):
            assert output.error is None
            gained[output.sequence] += len(output.token_ids)
    assert not scheduler.active
    assert gained == {id: answer for id, (_, answer) in enumerate(sizes)}


def test_one_that_does_not_fit_alone_fails_and_others_go_on() -> None:
    memory = CountingMemory(50)
    scheduler = Scheduler(64, memory.giving)
    scheduler.add(sequence(0, 51, 5))
    scheduler.add(sequence(1, 10, 5))
    outputs = []
    for _ in range(50):
        if scheduler.active:
            outputs += step(scheduler, memory)
    assert [o.sequence for o in outputs if o.error] == [0]
    assert sum(len(o.token_ids) for o in outputs if o.sequence == 1) == 5


def test_generating_sequences_do_not_wait_for_a_prompt() -> None:
    memory = CountingMemory(1000)
    scheduler = Scheduler(8, memory.giving)
    scheduler.add(sequence(0, 4, 50))
    step(scheduler, memory)
    scheduler.add(sequence(1, 100, 5))
    for _ in range(10):
        plan = scheduler.plan(memory)
        assert [(e.sequence.id, e.count) for e in plan.entries] == [(0, 1), (1, 7)]
        step(scheduler, memory)


def test_an_end_token_ends_unless_ignored() -> None:
    for ignore, reason in ((False, "stop"), (True, None)):
        memory = CountingMemory(100)
        scheduler = Scheduler(8, memory.giving)
        one = sequence(0, 2, 50)
        assert one.generation is not None
        one.generation.sampling = Sampling(max_tokens=50, ignore_eos=ignore)
        scheduler.add(one)
        (output,) = step(scheduler, memory, token=END)
        assert output.finish_reason == reason and output.token_ids == (END,)
