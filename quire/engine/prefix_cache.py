"""What the engine keeps so that a prompt's beginning is computed once.

The index knows places in memory; this decides when one is made: at the end of a prompt and when a
sequence ends. Cached places use no more than half of the budget, and give way to running ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.sequence import Accepted, Sequence
from quire.memory.budget import Budget
from quire.memory.prefix import PrefixIndex


class PrefixCache:
    """The prefix index, told what the engine's sequences do."""

    def __init__(self, index: PrefixIndex, budget: Budget) -> None:
        self.index = index
        self._budget = budget

    def enter(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """A new sequence takes what is known of its prompt, or waits for who is computing it.

        The last token is always computed, for its logits.
        """
        busy = [o for o in others if o.salt == sequence.salt and o.pending > 1 and not o.moved]
        shared = [(_in_common(sequence, other), other) for other in busy]
        length, source = max(shared, key=lambda found: found[0], default=(0, sequence))
        if length >= self.index.page_tokens and length > source.computed:
            sequence.waits_for = (source, length)
        else:
            self._adopt(sequence)

    def release_waiting(self, active: list[Sequence]) -> None:
        """Lets those go on whose first tokens are in memory now, or will never be."""
        for sequence in active:
            if sequence.waits_for:
                source, length = sequence.waits_for
                if source.computed >= length or source not in active:
                    sequence.waits_for = None
                    self._adopt(sequence)

    def remember(self, accepted: list[Accepted]) -> None:
        """Follows a step: running sequences grow, and the ends of prompts are kept."""
        for one in accepted:
            sequence = one.sequence
            if one.token is None or sequence.moved:
                continue
            self.index.extend(sequence.id, (one.token,))
            if one.kept > 1 or sequence.computed == one.kept:  # that was the end of a prompt
                self._insert(sequence)

    def track(self, sequence: Sequence) -> None:
        """The tokens of a sequence changed other than by a step."""
        if sequence.moved:  # its tokens saw others that are gone, so nobody else may have them
            self.index.untrack(sequence.id)
        else:
            self.index.track(sequence.id, sequence.tokens, sequence.salt)

    def pause(self, sequence: Sequence) -> None:
        """A sequence cannot be shared from until it is tracked again."""
        self.index.untrack(sequence.id)

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends: what it holds is kept for others."""
        here = sequence.computed > 0 and not sequence.parked
        if here and sequence.error is None and not sequence.moved:
            self._insert(sequence)
        self.index.untrack(sequence.id)

    def evict_one(self) -> bool:
        """Gives up the cached place that is worth least; False when there is none."""
        return self.index.evict_one()

    def _adopt(self, sequence: Sequence) -> None:
        first = sequence.tokens[:-1]
        sequence.computed = self.index.adopt(sequence.id, first, sequence.salt) if first else 0
        sequence.cached = sequence.computed
        self.track(sequence)

    def _insert(self, sequence: Sequence) -> None:
        self.index.insert(sequence.id, sequence.tokens[: sequence.computed], sequence.salt)
        while self._budget.free < self._budget.limit // 2 and self.index.evict_one():
            pass


def _in_common(a: Sequence, b: Sequence) -> int:
    """How many first tokens two sequences share, less the last one of the first."""
    most = min(len(a.tokens) - 1, len(b.tokens))
    if a.tokens[:most] == b.tokens[:most]:
        return most
    return next(i for i in range(most) if a.tokens[i] != b.tokens[i])
