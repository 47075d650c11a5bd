"""Chunks of prompts by time, and in a fair order: the policy alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.generation import Generation, StopRules
from quire.engine.pace import Pace
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence
from quire.types import Sampling


def run(
    pace: Pace, going: int, decode_s: float, token_s: float, steps: int
) -> list[tuple[int, float]]:
    """Tokens of prompts and seconds of each step, on a machine that takes so long."""
    taken = []
    for _ in range(steps):
        tokens = pace.prompt_tokens(going, 512)
        seconds = (decode_s if going else 0.0) + tokens * token_s
        pace.took(going, tokens, seconds)
        taken.append((tokens, seconds))
    return taken


@pytest.mark.parametrize("token_s", [2.5e-3, 1e-3, 1e-4])
def test_readers_wait_briefly_and_keep_their_share(token_s: float) -> None:
    pace, decode_s = Pace(), 0.006
    for _ in range(5):
        pace.took(1, 0, decode_s)  # the reader alone
    taken = run(pace, 1, decode_s, token_s, 300)[100:]
    assert max(seconds for _, seconds in taken) <= max(0.065, decode_s + 32 * token_s)
    speed = len(taken) / sum(seconds for _, seconds in taken)
    assert speed >= 0.4 / decode_s
    assert sum(tokens for tokens, _ in taken) > 0


def test_alone_a_prompt_is_computed_in_large_chunks() -> None:
    taken = run(Pace(), 0, 0.0, 1e-3, 50)[20:]
    assert all(200 <= tokens <= 260 for tokens, _ in taken)
    assert all(tokens == 512 for tokens, _ in run(Pace(), 0, 0.0, 1e-5, 50)[20:])


@given(
    st.lists(st.tuples(st.integers(0, 64), st.floats(1e-4, 0.5), st.floats(1e-6, 0.1)), max_size=60)
)
def test_prompts_always_come_forward(machine: list[tuple[int, float, float]]) -> None:
    """However odd the times are, a chunk comes within a bounded number of steps."""
    pace, since = Pace(), 0
    for going, decode_s, token_s in machine * 8:
        tokens = pace.prompt_tokens(going, 512)
        assert 0 <= tokens <= 512
        since = 0 if tokens else since + 1
        assert since < 20_000
        pace.took(going, tokens, decode_s + tokens * token_s)
    for _ in range(20_000):
        if pace.prompt_tokens(1, 512):
            break
        pace.took(1, 0, 0.01)
    assert pace.prompt_tokens(1, 512) > 0


def prompt(id: int, tokens: int, owner: str = "", priority: int = 0) -> Sequence:
    sequence = Sequence(id, [1] * tokens)
    rules = StopRules(frozenset(), 1)
    sequence.start(Generation(Sampling(), None, None, rules), owner, priority)
    return sequence


def order(scheduler: Scheduler, steps: int, seconds: float = 0.01) -> list[int]:
    """Whose prompts the steps computed, one after the other."""
    found = []
    for _ in range(steps):
        plan = scheduler.plan(scheduler.active, lambda _: True)
        for entry in plan.entries:
            entry.sequence.advance(entry.count)
        scheduler.took(plan, seconds)
        found += [entry.sequence.id for entry in plan.entries]
        for entry in plan.entries:
            if not entry.sequence.pending:
                scheduler.remove(entry.sequence)
    return found


def filled(*prompts: Sequence, chunk: int = 100) -> Scheduler:
    scheduler = Scheduler(chunk)
    for one in prompts:
        scheduler.add(one)
    return scheduler


def test_first_come_first_served_of_one_owner() -> None:
    scheduler = filled(*(prompt(i, 100, "a") for i in range(4)))
    assert order(scheduler, 4) == [0, 1, 2, 3]


def test_one_owner_does_not_starve_another() -> None:
    scheduler = filled(*(prompt(i, 300, "a") for i in range(4)), prompt(9, 100, "b"))
    assert 9 in order(scheduler, 2)


def test_priority_goes_first() -> None:
    scheduler = filled(prompt(0, 100), prompt(1, 100, priority=5), prompt(2, 100, priority=-1))
    assert order(scheduler, 3) == [2, 0, 1]


def test_every_wait_is_bounded() -> None:
    """Whoever is last in priority comes too, though more urgent ones never end."""
    scheduler = filled(prompt(0, 100, "slow", priority=9))
    for step in range(2000):
        scheduler.add(prompt(step + 1, 100, "fast"))
        if 0 in order(scheduler, 1):
            break
    assert step < 500
