"""What the engine keeps so that a prompt's beginning is computed once.

The index knows places in memory; this decides when one is made: at the end of a prompt, when a
sequence ends, and where a client says so. Memory that cannot be cut back to any position (a
window, a state) gets more of them: at the end of each chunk of a long prompt, and where a prompt
leaves one that is known already. Cached places alone hold no more than half of what weights leave
of the budget, and give way to running sequences.
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
        self.budget = budget

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
            self.adopt(sequence)

    def release_waiting(self, active: list[Sequence]) -> None:
        """Lets those go on whose first tokens are in memory now, or will never be."""
        for sequence in active:
            if sequence.waits_for:
                source, length = sequence.waits_for
                if source.computed >= length or source not in active:
                    sequence.waits_for = None
                    self.adopt(sequence)

    def remember(self, accepted: list[Accepted]) -> None:
        """Follows a step: running sequences grow, and the ends of prompts are kept."""
        for one in accepted:
            sequence = one.sequence
            if sequence.moved:
                continue
            if one.tokens:
                self.index.extend(sequence.id, one.tokens)
            if self._is_place(one):
                self._insert(sequence)

    def _is_place(self, one: Accepted) -> bool:
        """Whether what a sequence holds now is worth keeping."""
        sequence = one.sequence
        if one.tokens:  # it is, at the end of a prompt
            return one.kept > len(one.tokens) or sequence.computed == one.kept
        if sequence.computed == sequence.branch_at:
            return True
        # Nothing in the middle of a prompt has to be kept where memory can be cut back to it.
        cut = sequence.computed // 2
        return sequence.pending > 0 and not self.index.memory.can_rm(sequence.id, cut, -1)

    def keep(self, sequence: Sequence, pin: bool, ttl_s: float | None) -> None:
        """Keeps what a sequence holds now, because a client says so."""
        self._insert(sequence, pin, ttl_s)

    def track(self, sequence: Sequence) -> None:
        """The tokens of a sequence changed other than by a step."""
        if sequence.moved or sequence.parked:
            # Tokens that saw others which are gone, or pages in a tier: nobody can have them.
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

    def adopt(self, sequence: Sequence) -> None:
        """Gives a sequence that holds nothing what is known of its tokens, but for the last."""
        first = sequence.tokens[:-1]
        sequence.computed = self.index.adopt(sequence.id, first, sequence.salt) if first else 0
        sequence.cached = sequence.computed
        known = self.index.known(first, sequence.salt) if sequence.computed < len(first) else 0
        sequence.branch_at = known if known > sequence.computed else None
        self.track(sequence)

    def _insert(self, sequence: Sequence, pin: bool = False, ttl_s: float | None = None) -> None:
        computed = sequence.tokens[: sequence.computed]
        self.index.insert(sequence.id, computed, sequence.salt, pin, ttl_s)
        while self.index.held_bytes > self._most_bytes and self.index.evict_one():
            pass

    @property
    def _most_bytes(self) -> int:
        """Half of what weights and arrays leave of the budget."""
        fixed = sum(self.budget.breakdown.get(use, 0) for use in ("weights", "compute"))
        return (self.budget.limit - fixed) // 2


def _in_common(a: Sequence, b: Sequence) -> int:
    """How many first tokens two sequences share, less the last one of the first."""
    most = min(len(a.tokens) - 1, len(b.tokens))
    if a.tokens[:most] == b.tokens[:most]:
        return most
    return next(i for i in range(most) if a.tokens[i] != b.tokens[i])
