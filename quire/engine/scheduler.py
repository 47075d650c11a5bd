"""Who runs in the next step, and with how many tokens: policy, and nothing else.

Sequences that generate come first, one token each, so that nobody who is reading waits for
somebody else's prompt; what is left of the step goes to prompts, in chunks (pace.py), fairly
(turns.py).
A plan that does not fit memory, when nobody who rests can make room for it, becomes less: prompts
wait; when even the generating ones do not fit, the one that came last gives way (is preempted) and
comes back when there is room for it to go on for a while. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from quire.engine.pace import Pace
from quire.engine.plan import Counts, Entry, Plan, planned
from quire.engine.sequence import PARKED, RUNNING, WAITING, Sequence
from quire.engine.turns import Turns
from quire.errors import BudgetError

_SLACK = 64
"""Tokens for which everybody must have room before one that gave way comes back."""


class Scheduler:
    """Keeps the sequences that have something to compute, in order of arrival."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.active: list[Sequence] = []
        self.pace: Pace | None = None
        """Bounds steps by time, where people read along."""
        self.turns = Turns()

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in."""
        if not sequence.active:
            self.active.append(sequence)
            sequence.begin()

    def remove(self, sequence: Sequence) -> None:
        """Lets a sequence go."""
        if sequence.active:
            self.active.remove(sequence)
            sequence.rest()

    def plan(self, active: Seq[Sequence], fits: Callable[[Counts], bool]) -> Plan:
        """The next step of these, if there is room for all of them."""
        going: list[Sequence] = []
        prompts: list[Sequence] = []
        returning: list[Sequence] = []
        unready = False
        for sequence in active:
            unready = unready or sequence.status is not RUNNING
            if sequence.preempted:
                returning.append(sequence)
            elif sequence.pending == 1 and sequence.computed:
                going.append(sequence)
            else:
                prompts.append(sequence)
        entries: list[Entry] = []
        counts: Counts = []
        back: list[Sequence] = []
        if not (unready or prompts) and len(going) <= self.max_tokens:
            for sequence in going:
                entries.append(Entry(sequence, 1, True))
                counts.append((sequence.id, 1))
            going = []
        room = self.max_tokens - len(entries)
        if prompts:
            prompts = self._let_in(prompts, len(going))
            room = min(room, len(going) + self._prompt_room(len(going), len(prompts)))
        for sequence in going + self.turns.in_order(prompts):
            if room <= 0:
                break
            if entry := _entry(sequence, room):
                entries.append(entry)
                counts.append((sequence.id, entry.count))
                room -= entry.count
                if sequence.status is PARKED:
                    back.append(sequence)
        if returning:
            self._bring_back(returning, entries, counts, back, fits)
        return Plan(entries, counts, back=back, unready=unready)

    def _let_in(self, prompts: list[Sequence], going: int) -> list[Sequence]:
        """The prompts that may have a chunk now."""
        pace = self.pace
        if pace is None or not going:
            return prompts
        return [one for one in prompts if pace.lets(one.computed - one.cached)]

    def _prompt_room(self, going: int, waiting: int) -> int:
        """Tokens of so many prompts that a step may have beside so many that generate."""
        most = max(self.max_tokens - going, 0)
        return most if self.pace is None else self.pace.prompt_tokens(going, most, waiting)

    def took(self, plan: Plan, seconds: float) -> None:
        """A step took so long."""
        entries = plan.entries
        going = sum(entry.count == 1 for entry in entries)
        if going < len(self.active):
            self.turns.took(entries, self.active)
        if self.pace is not None:
            tokens = sum(entry.count for entry in entries)
            self.pace.took(going, tokens - going, seconds)

    def _bring_back(
        self, returning: list[Sequence], entries: list[Entry], counts: Counts,
        back: list[Sequence], fits: Callable[[Counts], bool],
    ) -> None:  # fmt: skip
        """Adds those that gave way and have room to go on for a while, or nobody to wait for."""
        returning.sort(key=lambda s: s.pending != 1 or not s.computed)  # stable, as by arrival
        room = self.max_tokens - sum(entry.count for entry in entries)
        for sequence in returning:
            entry = _entry(sequence, room) if room > 0 else None
            if entry is None:
                continue
            wanted = [*counts, (sequence.id, entry.count)]
            if not entries or fits([(seq, n + _SLACK) for seq, n in wanted]):
                entries.append(entry)
                counts.append(wanted[-1])
                back.append(sequence)
                room -= entry.count

    def less(self, plan: Plan) -> Plan:
        """What to try when a plan does not fit, and nobody can make room for it."""
        *others, last = plan.entries
        sequence = last.sequence
        if others:
            generating = sequence.pending == 1 and sequence.computed > 0
            return Plan(
                others, plan.counts[:-1], back=[s for s in plan.back if s is not sequence],
                preempted=[sequence] if generating else [],
            )  # fmt: skip
        if sequence.status is PARKED and not sequence.edited:
            # What it takes to bring it back is known only as a bound.
            return Plan([], [], lost=[sequence])
        if last.count > 1:
            half = planned([Entry(sequence, last.count // 2, ends=False)])
            return Plan(half.entries, half.counts, back=plan.back)
        return Plan([], [], failed=[(sequence, _no_room(sequence))])


def _no_room(sequence: Sequence) -> BudgetError:
    beside = "does not fit memory, beside what marks, pinned prefixes and other sessions hold"
    advice = "raise memory_budget or kv_cache_tokens, or close some"
    if sequence.status is PARKED:  # and edited: else it would be computed again
        return BudgetError(
            f"a sequence has to come back from a tier as it left, which {beside}; {advice}, or "
            f"rewind it to its first {sequence.whole} tokens, before those that were taken out"
        )
    return BudgetError(f"a sequence of {sequence.length} tokens {beside}; {advice}")


def _entry(sequence: Sequence, room: int) -> Entry | None:
    """What a sequence computes next, within the room that the step has left."""
    pending = sequence.pending
    if pending <= 0 or sequence.status is WAITING:
        return None
    at = sequence.branch_at
    count = min(pending, room)
    if at is not None and sequence.computed < at:
        count = min(count, at - sequence.computed)  # it may lie behind a cut
    return Entry(sequence, count, count == pending)
