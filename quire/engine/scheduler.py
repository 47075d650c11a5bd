"""Who runs in the next step, and with how many tokens: policy, and nothing else.

Sequences that generate come first, one token each, so that nobody who is reading waits for
somebody else's prompt; what is left of the step goes to prompts, in order of arrival, in chunks.
When memory is short, cached prefixes go first; then prompts wait; when even the generating ones do
not fit, the one that came last gives its pages back and is computed again later.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.engine.sequence import Accepted, Generation, Sequence
from quire.errors import BudgetError, QuireError
from quire.memory.interface import SeqTokens
from quire.types import FinishReason, StepOutput


@dataclass(frozen=True)
class Entry:
    """One sequence's part of a step: its next `count` tokens; `ends` when they are its last."""

    sequence: Sequence
    count: int

    @property
    def ends(self) -> bool:
        """Whether this part reaches the sequence's last token, whose logits are wanted."""
        return self.count == self.sequence.pending


@dataclass(frozen=True)
class Plan:
    """Who runs in this step."""

    entries: tuple[Entry, ...]

    def tokens(self) -> list[SeqTokens]:
        """What memory must find room for."""
        return [
            SeqTokens(s.id, np.array(s.tokens[s.computed : s.computed + e.count], np.int32))
            for e in self.entries
            for s in (e.sequence,)
        ]


class Room(Protocol):
    """What the scheduler asks of memory."""

    def fits(self, counts: Seq[tuple[int, int]]) -> bool:
        """Whether so many more tokens fit in each of these sequences, all together."""

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Removes positions from a sequence."""


class Scheduler:
    """Keeps the sequences that have something to compute, in order of arrival."""

    def __init__(
        self, max_tokens: int, n_ctx: int, end_ids: frozenset[int],
        evict_one: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.max_tokens = max_tokens
        self.n_ctx = n_ctx
        self.end_ids = end_ids
        self._evict_one = evict_one
        self._failed: list[Sequence] = []
        self.active: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in."""
        self.active.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Lets a sequence go."""
        self.active.remove(sequence)

    def plan(self, memory: Room) -> Plan:
        """The next step; whoever does not fit waits, gives way or, alone and too large, fails."""
        entries = self._wanted()
        while entries and not memory.fits([(e.sequence.id, e.count) for e in entries]):
            last = entries[-1]
            if self._evict_one():
                continue
            if len(entries) > 1:
                if last.sequence.generating:
                    self._preempt(memory, last.sequence)
                entries.pop()
            elif not self._take_from_others(memory, last.sequence):
                entries.pop()
                if last.count > 1:
                    entries.append(Entry(last.sequence, last.count // 2))
                else:
                    self._fail(memory, last.sequence)
                    entries = self._wanted()
        return Plan(tuple(entries))

    def _wanted(self) -> list[Entry]:
        entries: list[Entry] = []
        room = self.max_tokens
        # The sort is stable, so within each kind the order is that of arrival.
        for sequence in sorted(self.active, key=lambda s: not s.generating):
            count = min(sequence.pending, room)
            if count > 0 and not sequence.waiting:
                entries.append(Entry(sequence, count))
                room -= count
        return entries

    def _take_from_others(self, memory: Room, needy: Sequence) -> bool:
        """Preempts the latest other sequence that holds pages; False when there is none."""
        for other in reversed(self.active):
            if other is not needy and other.computed > 0:
                self._preempt(memory, other)
                return True
        return False

    def _preempt(self, memory: Room, sequence: Sequence) -> None:
        memory.seq_rm(sequence.id, 0, -1)
        sequence.computed = 0

    def _fail(self, memory: Room, sequence: Sequence) -> None:
        self._preempt(memory, sequence)
        sequence.error = BudgetError(
            f"a sequence of {len(sequence.tokens)} tokens does not fit the memory budget alone; "
            "raise memory_budget or kv_cache_tokens, or close other sessions"
        )
        self.remove(sequence)
        self._failed.append(sequence)

    def advance(self, accepted: list[Accepted]) -> list[StepOutput]:
        """Takes a step's result into the sequences; says what each of them gained."""
        outputs = []
        for one in accepted:
            sequence = one.sequence
            sequence.computed += one.kept
            sequence.logits = one.logits
            if one.token is not None:
                outputs.append(self._gain(one, one.token))
            elif sequence.pending == 0:
                self.remove(sequence)
            if sequence.error:
                self._failed.append(sequence)
        failed, self._failed = self._failed, []
        return outputs + [StepOutput(s.id, (), error=s.error) for s in failed]

    def _gain(self, one: Accepted, token: int) -> StepOutput:
        """One more token of a generating sequence, which may be its last."""
        sequence, generation = one.sequence, one.sequence.generation
        assert generation is not None
        sequence.tokens.append(token)
        generation.token_ids.append(token)
        generation.sampler.observe(np.array([token], np.int32))
        reason: FinishReason | None = None
        try:
            reason = self._finish_reason(sequence, generation, token)
        except QuireError as error:  # this request fails, the others go on
            sequence.error = error
        if reason or sequence.error:
            self.remove(sequence)
            sequence.generation = None
        logprobs = (one.logprob,) if one.logprob else ()
        return StepOutput(sequence.id, (token,), logprobs, reason)

    def _finish_reason(
        self, sequence: Sequence, generation: Generation, token: int
    ) -> FinishReason | None:
        if generation.matcher and token not in self.end_ids:
            generation.matcher.consume(token)
            if generation.matcher.finished:
                return "stop"
        if token in self.end_ids and not generation.sampling.ignore_eos:
            return "stop"
        if len(generation.token_ids) >= generation.sampling.max_tokens:
            return "length"
        return "length" if len(sequence.tokens) >= self.n_ctx else None
