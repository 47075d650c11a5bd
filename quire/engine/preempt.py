"""Making room: what is cached goes first, then sequences that rest, then those that came last.

A sequence gives way in one of two manners. Its own pages go to a tier and are read back later
(parked), or they are freed and its tokens are computed again: whichever is sooner done, by the
speeds measured so far. A sequence with tokens taken out of its middle can only be parked, since
computing its tokens again would make others of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.engine.prefix_cache import PrefixCache
from quire.engine.sequence import Sequence
from quire.errors import OutOfMemory
from quire.memory.interface import Memory
from quire.memory.tiers import Tiers


class MakeRoom:
    """Takes pages from sequences, and gives them back."""

    def __init__(
        self, memory: Memory, tiers: Tiers, prefix: PrefixCache,
        idle: Callable[[], Iterable[Sequence]], seconds_per_token: Callable[[], float],
        drafts_give_way: Callable[[], bool], trim_compute: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._memory = memory
        self._tiers = tiers
        self._prefix = prefix
        self._idle = idle
        self._seconds_per_token = seconds_per_token
        self._drafts_give_way = drafts_give_way
        self._trim_compute = trim_compute
        self.counts = {"parked": 0, "recomputed": 0, "brought back": 0}

    def evict_one(self) -> bool:
        """Drops the cached prefix that is worth least, or what drafts or steps can do without."""
        return self.evict_cached() or self._drafts_give_way() or self._trim_compute()

    def evict_cached(self) -> bool:
        """Drops the cached prefix that is worth least; False when there is none."""
        return self._prefix.evict_one()

    def park_idle(self, but: Sequence | None = None) -> bool:
        """Takes the pages of a sequence that has nothing to compute; False when there is none.

        One whose pages cannot be parked, because others hold them too or no tier has room, is
        given up: its tokens are computed again when it is used.
        """
        resting = [s for s in self._idle() if s is not but]
        if any(self.park(s) for s in resting if not s.parked):
            return True
        resting.sort(key=lambda s: s.parked)  # parked ones may still hold pages together
        lost = next((s for s in resting if not s.moved), None)
        if lost:
            self.give_up(lost)
        return lost is not None

    def preempt(self, sequence: Sequence) -> bool:
        """Takes a sequence's pages; False when it has to keep them."""
        if sequence.parked:
            return False
        n_bytes = self._memory.park_bytes(sequence.id)
        again = sequence.computed * self._seconds_per_token()
        if (sequence.moved or self._tiers.seconds(n_bytes) < again) and self.park(sequence):
            return True
        if sequence.moved:
            return False
        self.give_up(sequence)
        return True

    def park(self, sequence: Sequence) -> bool:
        """Moves a sequence's own pages to a tier; False when none takes them, or it has none."""
        n_bytes = self._memory.park_bytes(sequence.id)
        tier = self._tiers.for_bytes(n_bytes)
        if tier is None or n_bytes == 0:
            return False
        try:
            self._memory.park(sequence.id, tier)
        except OutOfMemory:
            return False
        sequence.parked = True
        self._prefix.pause(sequence)
        self.counts["parked"] += 1
        return True

    def bring_back(self, sequence: Sequence) -> bool:
        """Puts a parked sequence's pages back; False where they are lost.

        It starts over then, unless its tokens cannot be computed again.
        """
        try:
            self._memory.unpark(sequence.id)
        except OutOfMemory:
            if not sequence.moved:
                self.give_up(sequence)
            return False
        sequence.parked = False
        self._prefix.track(sequence)
        self.counts["brought back"] += 1
        return True

    def give_up(self, sequence: Sequence) -> None:
        """Frees everything a sequence holds, here and in a tier: it is computed again."""
        self._memory.seq_rm(sequence.id, 0, -1)
        sequence.computed, sequence.parked, sequence.logits = 0, False, None
        sequence.given_up = True
        self._prefix.track(sequence)
        self.counts["recomputed"] += 1

    def start_over(self, sequence: Sequence) -> None:
        """Finds what a sequence that was given up need not compute again."""
        sequence.given_up, cached = False, sequence.cached
        self._prefix.adopt(sequence)
        sequence.cached = cached  # it tells what was there when the request came
