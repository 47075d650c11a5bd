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
    pace: Pace, going: int, decode_s: float, token_s: float, steps: int, computed: int = 10_000
) -> list[tuple[int, float]]:
    """Tokens of prompts and seconds of each step, on a machine that takes so long.

    There is always a prompt that has had so many tokens already.
    """
    taken = []
    for _ in range(steps):
        tokens = pace.prompt_tokens(going, 512) if not going or pace.lets(computed) else 0
        seconds = (decode_s if going else 0.0) + tokens * token_s
        pace.took(going, tokens, seconds)
        taken.append((tokens, seconds))
    return taken


def share(taken: list[tuple[int, float]], decode_s: float) -> float:
    """Of the speed that a reader would have alone."""
    return len(taken) * decode_s / sum(seconds for _, seconds in taken)


@pytest.mark.parametrize("token_s", [2.5e-3, 1e-3, 1e-4])
def test_readers_wait_briefly_and_keep_their_share(token_s: float) -> None:
    pace, decode_s = Pace(), 0.006
    for _ in range(5):
        pace.took(1, 0, decode_s)  # the reader alone
    taken = run(pace, 1, decode_s, token_s, 300)[100:]
    assert max(seconds for _, seconds in taken) <= max(0.055, decode_s + 32 * token_s)
    assert 0.45 <= share(taken, decode_s) <= 0.6
    assert sum(tokens for tokens, _ in taken) > 0


def test_first_tokens_go_ahead_until_readers_are_owed_too_much() -> None:
    """Many who come at once are answered first; without end that would be no share at all."""
    pace, decode_s = Pace(), 0.006
    for _ in range(5):
        pace.took(1, 0, decode_s)
    burst = run(pace, 1, decode_s, 1e-3, 40, computed=0)
    assert all(tokens for tokens, _ in burst)
    assert not pace.lets(10_000)  # a long prompt waits until that is made up for
    assert share(run(pace, 1, decode_s, 1e-3, 2000, computed=0)[200:], decode_s) >= 0.45


def test_a_first_step_that_was_slow_is_forgotten() -> None:
    """It finds caches cold; prompts behind it have steps as long as if it had not been."""
    pace = Pace()
    pace.took(0, pace.prompt_tokens(0, 512), 32 * 4e-3)
    assert pace.prompt_tokens(0, 512) == 62
    pace.took(0, 62, 62 * 5e-4)
    assert pace.prompt_tokens(0, 512) == 500


def test_what_a_step_takes_is_known_for_other_numbers_of_readers() -> None:
    """Those who were answered read along at once, with no step without a chunk in between."""
    pace = Pace()
    for going in range(1, 30):
        for _ in range(3):
            tokens = pace.prompt_tokens(going, 512)
            seconds = 0.003 + 0.001 * going + tokens * 5e-4
            pace.took(going, tokens if going > 1 else 0, seconds)
            assert seconds < 0.12
    assert 60 <= tokens <= 140


def test_while_a_crowd_waits_its_chunks_are_longer() -> None:
    """All of them are answered sooner; who reads meanwhile sees pauses of 0.1 s, not more."""
    pace, decode_s, token_s = Pace(), 0.02, 5e-4
    run(pace, 16, decode_s, token_s, 50)
    steps = [decode_s + pace.prompt_tokens(16, 512, n) * token_s for n in (1, 8, 9, 40)]
    assert steps[0] == steps[1] <= 0.055
    assert 0.08 <= steps[2] == steps[3] <= 0.105


@given(st.integers(0, 64), st.integers(0, 64), st.floats(1e-3, 0.5), st.floats(1e-5, 0.1))
def test_a_crowd_never_has_shorter_chunks(
    going: int, waiting: int, decode_s: float, token_s: float
) -> None:
    pace = Pace()
    run(pace, going, decode_s, token_s, 20)
    pace.took(going, 0, decode_s)
    crowded = pace.prompt_tokens(going, 512, 9 + waiting)
    assert pace.prompt_tokens(going, 512) <= crowded


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
        tokens = pace.prompt_tokens(going, 512) if not going or pace.lets(9999) else 0
        assert 0 <= tokens <= 512
        since = 0 if tokens else since + 1
        assert since < 20_000
        pace.took(going, tokens, decode_s + tokens * token_s)
    for _ in range(20_000):
        if pace.lets(9999):
            break
        pace.took(1, 0, 0.01)
    assert pace.lets(9999) and pace.prompt_tokens(1, 512) > 0


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
