"""What the engine keeps so that a prompt's beginning is computed once.

The index knows places in memory; this decides when one is made: at the end of a prompt, when a
sequence ends, and where a client says so. Memory that cannot be cut back to any position (a
window, a state) gets more of them: at the end of each chunk of a long prompt, and where a prompt
leaves one that is known already. Cached places alone hold no more than half of what weights leave
of the budget, and give way to running sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.devices.budget import Budget
from quire.engine.plan import Accepted, Entry
from quire.engine.sequence import LOST, PARKED, Sequence
from quire.memory.prefix.index import PrefixIndex


class PrefixCache:
    """The prefix index, told what the engine's sequences do."""

    def __init__(self, index: PrefixIndex, budget: Budget) -> None:
        self.index = index
        self.budget = budget

    def enter(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """A new sequence takes what is known of its prompt, or waits for who is computing it.

        Waiting has to save a page's tokens. The last token is always computed, for its logits.
        """
        busy = [o for o in others if o.salt == sequence.salt and o.pending > 1 and _can_share(o)]
        shared = [(_in_common(sequence, other), other) for other in busy]
        length, source = max(shared, key=lambda found: found[0], default=(0, sequence))
        if length >= source.computed + self.index.page_tokens:
            sequence.wait_for(source, length)
        else:
            self.adopt(sequence)

    def release(self, sequence: Sequence) -> None:
        """Lets one go on whose first tokens are in memory now, or will never be."""
        assert sequence.waits_for is not None
        source, length, begun = sequence.waits_for
        if source.computed >= length or not source.active or source.begun != begun:
            self.adopt(sequence)

    def start_over(self, sequence: Sequence) -> None:
        """Finds what a sequence that lost its pages need not compute again."""
        cached, miss = sequence.cached, sequence.miss
        self.adopt(sequence)
        sequence.count_cached(cached, miss)  # it tells what was there when the request came

    def remember(self, entries: Iterable[Entry]) -> None:
        """Keeps the ends of prompts that are in a step; memory has kept all of it."""
        for entry in entries:
            sequence = entry.sequence
            chosen = entry.ends and sequence.generation is not None
            if not (chosen and entry.count == 1 and sequence.computed > 1):  # no step of an answer
                self._remember(sequence, chosen)

    def remember_drafted(self, accepted: list[Accepted]) -> None:
        """The same after a step with drafts."""
        for one in accepted:
            chosen = len(one.tokens)
            if not chosen or one.kept > chosen or one.sequence.computed == one.kept:
                self._remember(one.sequence, chosen > 0)

    def _remember(self, sequence: Sequence, chosen: bool) -> None:
        """Keeps what a sequence holds at the end of its prompt (`chosen`), or where it pays."""
        here = _can_share(sequence) and sequence.status is not PARKED
        if here and (chosen or self._is_place(sequence)):
            self._insert(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """What a sequence holds led to an error: nobody is to begin with it."""
        self.index.drop(sequence.tokens.array(0, sequence.computed), sequence.salt)

    def _is_place(self, sequence: Sequence) -> bool:
        """Whether what a sequence holds now, of a prompt that is not at its end, is worth it."""
        if sequence.computed == sequence.branch_at:
            return True
        # Nothing in the middle of a prompt has to be kept where memory can be cut back to it.
        cut = sequence.computed // 2
        return sequence.pending > 0 and not self.index.memory.can_rm(sequence.id, cut, -1)

    def keep(self, sequence: Sequence, pin: bool, ttl_s: float | None) -> None:
        """Keeps what a sequence holds now, because a client says so."""
        self._insert(sequence, pin, ttl_s)

    def track(self, sequence: Sequence) -> None:
        """A sequence has other tokens than before, or its pages came or went."""
        if not _can_share(sequence) or sequence.status is PARKED:
            # Tokens that saw others which are gone, or pages in a tier: nobody can have them.
            self.index.untrack(sequence.id)
        else:
            self.index.track(sequence.id, sequence.tokens, sequence.salt)

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends: what it holds is kept for others."""
        here = sequence.computed > 0 and sequence.status not in (PARKED, LOST)
        if here and not sequence.failed and _can_share(sequence):
            self._insert(sequence)
        self.index.untrack(sequence.id)

    def evict_one(self) -> bool:
        """Gives up the cached place that is worth least; False when there is none."""
        return self.index.evict_one()

    def adopt(self, sequence: Sequence) -> None:
        """Gives a sequence that holds nothing what is known of its tokens, but for the last."""
        first = sequence.tokens.array(0, max(sequence.length - 1, 0))
        n = len(first)
        computed = self.index.adopt(sequence.id, first, sequence.salt) if n else 0
        known = self.index.matched if n else 0
        branches = known >= self.index.min_tokens and known > computed
        sequence.adopt(computed, known if branches else None)
        sequence.count_cached(computed, self.index.missed if n else "new")
        self.track(sequence)

    def _insert(self, sequence: Sequence, pin: bool = False, ttl_s: float | None = None) -> None:
        computed = sequence.tokens.array(0, sequence.computed)
        self.index.insert(sequence.id, computed, sequence.salt, pin, ttl_s)
        while self._too_much and self.index.evict_one():
            pass

    @property
    def _too_much(self) -> bool:
        """Whether it is more than half of what weights and arrays leave of a device's budget."""
        memory = self.index.memory
        for device in memory.devices:
            held = device.budget.breakdown
            room = device.budget.limit - held.get("weights", 0) - held.get("compute", 0)
            if memory.cached_bytes_on(device) > room // 2:
                return True
        return False


def _can_share(sequence: Sequence) -> bool:
    """Whether its pages are what computing its tokens here would make."""
    return sequence.shared and not sequence.edited


def _in_common(a: Sequence, b: Sequence) -> int:
    """How many first tokens two sequences share, less the last one of the first."""
    return min(a.tokens.common(b.tokens.array()), a.length - 1)
