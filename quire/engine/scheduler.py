"""Who runs in the next step, and with how many tokens: policy, and nothing else.

Sequences that generate come first, one token each, so that nobody who is reading waits for
somebody else's prompt; what is left of the step goes to prompts, in order of arrival, in chunks.
When memory is short, cached prefixes go first; then sequences that rest make room, and prompts
wait; when even the generating ones do not fit, the one that came last gives way and comes back
when there is room for it to go on for a while.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.engine.sequence import Accepted, Sequence
from quire.errors import BudgetError, QuireError, TierError
from quire.memory.interface import SeqTokens
from quire.types import StepOutput


@dataclass(frozen=True)
class Entry:
    """One sequence's part of a step: its next `count` tokens; `ends` when they are its last.

    A draft comes behind them. With `exits` the model's first layers make it within the step, and
    the tokens here only hold its places.
    """

    sequence: Sequence
    count: int
    draft: tuple[int, ...] = ()
    exits: bool = False

    @property
    def ends(self) -> bool:
        """Whether this part reaches the sequence's last token, whose logits are wanted."""
        return self.count == self.sequence.pending


@dataclass(frozen=True)
class Branch:
    """Tokens that are tried in a fork of a sequence; `guess` when they are no draft of it."""

    owner: Sequence
    seq: int
    tokens: tuple[int, ...]
    guess: bool


@dataclass(frozen=True)
class Plan:
    """Who runs in this step; rows are in order of entries, then branches."""

    entries: tuple[Entry, ...]
    branches: tuple[Branch, ...] = ()
    exit_after: int = 0
    """Layers after which drafts are made within the step, for entries that want that."""

    def tokens(self) -> list[SeqTokens]:
        """What memory must find room for."""
        parts = [
            SeqTokens(
                s.id, np.array([*s.tokens[s.computed : s.computed + e.count], *e.draft], np.int32)
            )
            for e in self.entries
            for s in (e.sequence,)
        ]
        return parts + [SeqTokens(b.seq, np.array(b.tokens, np.int32)) for b in self.branches]

    def counts(self) -> list[tuple[int, int]]:
        """Sequences and their numbers of new tokens, as memory is asked about them."""
        whole = [(e.sequence.id, e.count + len(e.draft)) for e in self.entries]
        return whole + [(b.seq, len(b.tokens)) for b in self.branches]

    @property
    def n_tokens(self) -> int:
        """Tokens to compute."""
        return sum(count for _, count in self.counts())

    def wanted_rows(self) -> NDArray[np.int32]:
        """Rows whose logits are wanted: each entry's last real token, drafts and branches."""
        rows: list[int] = []
        at = 0
        for entry in self.entries:
            at += entry.count
            if entry.ends:
                rows += range(at - 1, at + len(entry.draft))
            at += len(entry.draft)
        for branch in self.branches:
            at += len(branch.tokens)
            rows += [at - 1] if branch.guess else range(at - len(branch.tokens), at)
        return np.array(rows, np.int32)


class Fitting(Protocol):
    """What the scheduler asks of memory."""

    def fits(self, counts: Seq[tuple[int, int]]) -> bool:
        """Whether so many more tokens fit in each of these sequences, all together."""


class Room(Protocol):
    """What it asks of whoever makes room."""

    def evict_one(self) -> bool:
        """Drops something cached; False when nothing is."""

    def park_idle(self) -> bool:
        """Takes the pages of a sequence that has nothing to compute; False when there is none."""

    def preempt(self, sequence: Sequence) -> bool:
        """Takes a sequence's pages; False when it has to keep them."""

    def bring_back(self, sequence: Sequence) -> bool:
        """Puts a parked sequence's pages back; False when it has to start over."""

    def give_up(self, sequence: Sequence) -> None:
        """Frees everything a sequence holds: it is computed again."""

    def start_over(self, sequence: Sequence) -> None:
        """Finds what a sequence that was given up need not compute again."""


_SLACK = 64
"""Tokens for which everybody must have room before one that gave way comes back."""


class Scheduler:
    """Keeps the sequences that have something to compute, in order of arrival."""

    def __init__(self, max_tokens: int, room: Room) -> None:
        self.max_tokens = max_tokens
        self._room = room
        self._failed: list[Sequence] = []
        self.active: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in."""
        self.active.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Lets a sequence go."""
        self.active.remove(sequence)

    def plan(self, memory: Fitting) -> Plan:
        """The next step; whoever does not fit waits, gives way or, alone and too large, fails."""
        entries = self._wanted(memory)
        while entries and not memory.fits(_counts(entries)):
            last = entries[-1]
            if self._room.evict_one() or self._room.park_idle():
                continue
            if len(entries) > 1:
                entries.pop()
                if last.sequence.generating:
                    self._preempt(last.sequence)
            elif not self.take_from_others(last.sequence):
                entries = self._smaller(last, memory)
        return Plan(tuple(e for e in entries if self._is_here(e.sequence)))

    def _wanted(self, memory: Fitting) -> list[Entry]:
        entries: list[Entry] = []
        room = self.max_tokens
        # The sort is stable, so within each kind the order is that of arrival.
        for sequence in sorted(self.active, key=lambda s: (s.preempted, not s.generating)):
            if sequence.given_up:
                self._room.start_over(sequence)
            count = min(sequence.pending, sequence.until_branch, room)
            if count <= 0 or sequence.waiting:
                continue
            entry = Entry(sequence, count)
            back = [*entries, entry] if sequence.preempted and entries else []
            if memory.fits(_counts(back, _SLACK)):
                entries.append(entry)
                room -= count
        return entries

    def _is_here(self, sequence: Sequence) -> bool:
        """Whether a sequence can run in this step; its pages are brought back if need be."""
        sequence.preempted = False
        if not sequence.parked or self._room.bring_back(sequence):
            return True
        if sequence.moved:
            self._fail(sequence, TierError("the pages of a sequence could not be read back"))
        return False

    def _smaller(self, entry: Entry, memory: Fitting) -> list[Entry]:
        """What to try when one sequence does not fit and nobody else can make room for it."""
        if entry.sequence.parked:  # what it takes to bring it back is known only as a bound
            self._room.give_up(entry.sequence)
        elif entry.count > 1:
            return [Entry(entry.sequence, entry.count // 2)]
        else:
            n = len(entry.sequence.tokens)
            error = BudgetError(
                f"a sequence of {n} tokens does not fit memory, beside what marks, pinned prefixes "
                "and other sessions hold; raise memory_budget or kv_cache_tokens, or close some"
            )
            self._fail(entry.sequence, error)
        return self._wanted(memory)

    def take_from_others(self, needy: Sequence) -> bool:
        """Lets the latest other sequence that holds pages give way; False when there is none."""
        others = [o for o in reversed(self.active) if o is not needy and o.computed > 0]
        if any(self._preempt(other) for other in others if not other.parked):
            return True
        for other in others:  # parked ones may still hold pages together
            if other.parked and not other.moved:
                self._room.give_up(other)
                return True
        return False

    def _preempt(self, sequence: Sequence) -> bool:
        done = self._room.preempt(sequence)
        sequence.preempted |= done
        return done

    def _fail(self, sequence: Sequence, error: QuireError) -> None:
        self._room.give_up(sequence)
        sequence.error = error
        self.remove(sequence)
        self._failed.append(sequence)

    def advance(self, accepted: list[Accepted]) -> list[StepOutput]:
        """Takes a step's result into the sequences; says what each of them gained."""
        outputs = []
        for one in accepted:
            sequence = one.sequence
            sequence.computed += one.kept
            sequence.logits = one.logits
            if one.tokens:
                outputs.append(self._gain(one))
            elif sequence.pending == 0:
                self.remove(sequence)
            if sequence.error:
                self._failed.append(sequence)
        failed, self._failed = self._failed, []
        return outputs + [StepOutput(s.id, (), error=s.error) for s in failed]

    def _gain(self, one: Accepted) -> StepOutput:
        """More tokens of a generating sequence, of which the last may be its last."""
        sequence = one.sequence
        sequence.tokens.extend(one.tokens)
        if one.finish_reason or sequence.error:
            self.remove(sequence)
            sequence.end_generation()
        return StepOutput(sequence.id, tuple(one.tokens), tuple(one.logprobs), one.finish_reason)


def _counts(entries: Seq[Entry], slack: int = 0) -> list[tuple[int, int]]:
    """Sequences and their numbers of new tokens, as memory is asked about them."""
    return [(entry.sequence.id, entry.count + slack) for entry in entries]
