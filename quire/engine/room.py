"""Making room: one way for all. What costs least to get back goes first.

    CACHED    cached prefixes, the one that is worth least first: to a tier, or for good
    DRAFTS    what drafts could do without
    ARRAYS    arrays that nobody uses
    RESTING   sequences with nothing to compute
              each of these of other models on the same budget too
    MARKS     marks and pinned prefixes: they only move to a tier
    RUNNING   others that run, the one that came last first
              then steps that a GPU has recorded, for the last one that is left

A sequence gives way in one of two manners. Its own pages go to a tier and are read back later
(parked), or they are freed and its tokens are computed again (lost): whichever is sooner done, by
the speeds measured so far. One with tokens taken out of its middle can only be parked, since
computing its tokens again would make others of them. What several share goes to a tier once, when
all who hold it may go, and is shared again when it is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from enum import IntEnum

from quire.devices.budget import Budget
from quire.engine.prefix_cache import PrefixCache
from quire.engine.sequence import PARKED, Sequence
from quire.errors import OutOfMemory
from quire.memory.keeping import Leavers
from quire.memory.memory import Memory
from quire.memory.tiers.tiers import Tiers


class Rank(IntEnum):
    """Who gives way, the first one first."""

    CACHED = 0
    DRAFTS = 1
    ARRAYS = 2
    RESTING = 3
    MARKS = 4
    RUNNING = 5


Reclaim = Callable[[], bool]
"""Frees something; False when there is nothing."""


class Room:
    """Takes memory from those who can do without, and gives parked sequences theirs back."""

    def __init__(
        self, memory: Memory, tiers: Tiers, prefix: PrefixCache, drafts: Reclaim, arrays: Reclaim,
        recorded: Reclaim, sequences: Mapping[int, Sequence], active: list[Sequence],
        seconds_per_token: Callable[[], float],
    ) -> None:  # fmt: skip
        self._memory = memory
        self._tiers = tiers
        self._prefix = prefix
        self._sequences = sequences
        self._active = active  # in order of arrival
        self._seconds_per_token = seconds_per_token
        self._spared: Collection[str] = ()
        self.held: Counter[str] = Counter()
        """Checkpoints whose pages somebody reads: those stay here."""
        self._recorded = recorded
        self._things = (prefix.evict_one, drafts, arrays)
        self.counts = dict.fromkeys(
            ("parked", "recomputed", "brought back", "marks and prefixes parked"), 0
        )
        prefix.index.park_with(self.park_cached)

    def make(
        self, fits: Callable[[], bool], for_: Sequence | None, up_to: Rank,
        spare: Collection[str] = (),
    ) -> bool:  # fmt: skip
        """Frees one thing after the other until it fits; False when nobody gives way any more.

        Nobody above `up_to` is asked, nor the sequence that the room is for, nor some marks.
        """
        self._spared = spare
        while not fits():
            if not self._free_one(for_, up_to):
                return False
        return True

    def _free_one(self, for_: Sequence | None, up_to: Rank) -> bool:
        borrow = self._prefix.budget.whole.borrow
        if any(reclaim() for reclaim in self._things[: up_to + 1]):
            return True
        if up_to >= Rank.ARRAYS and borrow(self, Rank.ARRAYS):
            return True
        if up_to >= Rank.RESTING and (self._from_resting(for_) or borrow(self, Rank.RESTING)):
            return True
        if up_to >= Rank.MARKS and self._from_marks(for_):
            return True
        return up_to >= Rank.RUNNING and (self._from_running(for_) or self._recorded())

    def lend(self, up_to: int) -> bool:
        """Frees one thing for another model on the same budget; nothing that runs.

        A step may be under way on the device: what it keeps it has kept when it was launched, and
        pages change hands, are copied and given back behind it.
        """
        if any(reclaim() for reclaim in self._things[: up_to + 1]):
            return True
        return up_to >= Rank.RESTING and self._from_resting(None)

    def trim(self) -> bool:
        """Gives back what no array uses, which nobody misses; whether there was any."""
        return self._things[Rank.ARRAYS]()

    def lendable(self, budget: Budget) -> int:
        """Bytes of a budget that lending all there is would free, arrays not counted."""
        active = [s.id for s in self._active]
        edited = [s.id for s in self._resting(None) if s.edited]
        return self._memory.given_back_but([*active, *self._stuck(edited), *self._marks()], budget)

    def own(self, budget: Budget) -> int:
        """Bytes of a budget that come back when everything here gives way that ever can."""
        return self._memory.given_back_but(self._stuck(self._lasting()), budget)

    def _stuck(self, members: Seq[int | str]) -> Seq[int | str]:
        """All of these, unless a tier can take all of them beside what has to stay there.

        Some may fit where not all do; which of them is known only when they have gone.
        """
        memory, lasting = self._memory, self._lasting()
        left = [one.limit - memory.bytes_in(one, lasting) for one in self._tiers.tiers]
        return members if memory.bytes_here(members) > max(left, default=0) else []

    def _lasting(self) -> list[int | str]:
        """What cannot be computed again, and is never lost."""
        return [*(s.id for s in self._sequences.values() if s.edited), *self._marks()]

    def _marks(self) -> list[str]:
        """Marks and pinned prefixes: nothing of them can be computed again."""
        saved = self._memory.checkpoints.by_name.values()
        return [one.name for one in saved if not one.cached] + [*self._prefix.index.pinned_names]

    def _from_resting(self, needy: Sequence | None) -> bool:
        """Takes the pages of a sequence that has nothing to compute.

        One whose pages no tier has room for is lost: its tokens are computed again when it is used.
        """
        resting = self._resting(needy)
        if any(map(self.park, resting)):
            return True
        size, leavers = self._memory.park_bytes, self._memory.leavers
        together = leavers([s.id for s in resting])
        if any(self.park(s, together) for s in resting):
            return True
        stuck = any(size(s.id, together) for s in resting)
        whole = [s for s in resting if not s.edited]
        together = leavers([s.id for s in whole])
        lost = self._lose_one(s for s in whole if size(s.id, together))
        return lost or (stuck and self._lose_parked(whole))

    def _lose_parked(self, resting: list[Sequence]) -> bool:
        """No tier has room for what could go there: something is lost that is there already."""
        if self._prefix.index.evict_parked():
            return True
        return self._lose_one(s for s in resting if s.status is PARKED and not s.edited)

    def _resting(self, needy: Sequence | None) -> list[Sequence]:
        """Those that hold something, and have nothing to compute."""
        held = self._sequences.values()
        return [s for s in held if not s.active and s.computed and s is not needy]

    def _from_marks(self, needy: Sequence | None, running: Seq[Sequence] = ()) -> bool:
        """Moves what a mark or a pinned prefix alone holds to a tier; then what they share.

        Who shares it and rests, or was parked, goes along; so do some that run.
        """
        spared = {*self._spared, *self.held}
        marks = [name for name in self._marks() if name not in spared]
        if any(map(self.park_checkpoint, marks)):
            return True
        parked = [s for s in self._active if s.status is PARKED and s is not needy]
        leaving = [*self._resting(needy), *parked, *running]
        together = self._memory.leavers([*(s.id for s in leaving), *marks])
        if any(self.park(s, together) for s in leaving):
            return True
        if any(self.park_checkpoint(name, together) for name in marks):
            return True
        stuck = any(self._memory.checkpoint_park_bytes(name, together) for name in marks)
        return stuck and self._lose_parked(leaving)

    def park_cached(self, name: str, tokens: int) -> bool:
        """Moves a cached prefix to a tier, if it is sooner read back than computed again."""
        n_bytes = self._memory.checkpoint_bytes(name)
        again = tokens * self._seconds_per_token()
        return self._tiers.seconds(n_bytes) < again and self.park_checkpoint(name)

    def park_checkpoint(self, name: str, together: Leavers | None = None) -> bool:
        """Moves what only a checkpoint holds, or some together, to a tier.

        False when none takes it, or there is nothing.
        """
        n_bytes = self._memory.checkpoint_park_bytes(name, together)
        tier = self._tiers.for_bytes(n_bytes)
        if tier is None or n_bytes == 0:
            return False
        try:
            self._memory.checkpoint_park(name, tier, together)
        except OutOfMemory:
            return False
        self._note_parked(together)
        self.counts["marks and prefixes parked"] += 1
        return True

    def _from_running(self, needy: Sequence | None) -> bool:
        """Takes the pages of the latest other sequence that holds any."""
        others = [o for o in reversed(self._active) if o is not needy and o.computed]
        if any(self.preempt(other) for other in others):
            return True
        # Those left that run cannot be computed again, and share all that they hold with marks.
        running = [other for other in others if other.status is not PARKED]
        if running and self._from_marks(needy, running):
            for other in [one for one in running if one.status is PARKED]:
                other.preempt()
            return True
        return self._lose_parked(others)

    def _lose_one(self, candidates: Iterable[Sequence]) -> bool:
        lost = next(iter(candidates), None)
        if lost:
            self.lose(lost)
        return lost is not None

    def preempt(self, sequence: Sequence) -> bool:
        """Takes a running sequence's pages; False when it has to keep them, or has none."""
        if sequence.status is PARKED:
            return False
        n_bytes = self._memory.park_bytes(sequence.id)
        again = sequence.computed * self._seconds_per_token()
        parks = sequence.edited or self._tiers.seconds(n_bytes) < again
        if not (parks and self.park(sequence)):
            if sequence.edited:
                return False
            self.lose(sequence)
        sequence.preempt()
        return True

    def park(self, sequence: Sequence, together: Leavers | None = None) -> bool:
        """Moves what only a sequence holds, or some together, to a tier.

        False when none takes it, or there is nothing.
        """
        n_bytes = self._memory.park_bytes(sequence.id, together)
        tier = self._tiers.for_bytes(n_bytes)
        if tier is None or n_bytes == 0:
            return False
        try:
            self._memory.park(sequence.id, tier, together)
        except OutOfMemory:
            return False
        sequence.park()
        self._prefix.track(sequence)
        self._note_parked(together)
        self.counts["parked"] += 1
        return True

    def park_apart(self, sequence: Sequence) -> bool:
        """Moves all a sequence holds to a tier, copies of what others hold too: those can go then.

        False where there is no room for all of them, or a file is read or written: what that holds
        stays here, and the way back would be closed.
        """
        if self._prefix.budget.whole.passing:
            return False
        memory, copies = self._memory, self._memory.copies()
        here = sum(pool.used * pool.page_bytes for pool in memory.pools)
        if self._tiers.for_bytes(memory.park_bytes(sequence.id, copies) + here) is None:
            return False
        if not self.park(sequence, copies):
            return False
        sequence.park(apart=True)
        return True

    def _note_parked(self, together: Leavers | None) -> None:
        """Those whose pages went along with another's are parked too."""
        for id in together.members if together else ():
            if isinstance(id, int) and self._memory.is_parked(id):
                self._sequences[id].park()
                self._prefix.track(self._sequences[id])

    def make_way_back(self, sequence: Sequence) -> bool:
        """Makes room for what a sequence has in a tier, whoever has to give way, and no more."""
        return self.make(lambda: self._memory.fits([(sequence.id, 0)]), sequence, Rank.RUNNING)

    def bring_back(self, sequence: Sequence) -> bool:
        """Puts a parked sequence's pages back; False where they cannot be read.

        It is lost then, unless its tokens cannot be computed again.
        """
        try:
            self._memory.unpark(sequence.id)
        except OutOfMemory:
            if not sequence.edited:
                self.lose(sequence)
            return False
        if self._memory.seq_pos_max(sequence.id) >= sequence.computed:  # dropped meanwhile
            self._memory.seq_rm(sequence.id, sequence.computed, -1)
        sequence.unpark()
        self._prefix.track(sequence)
        self.counts["brought back"] += 1
        return True

    def lose(self, sequence: Sequence, apart: bool = False) -> None:
        """Frees everything a sequence holds, here and in a tier: it is computed again."""
        self._memory.seq_rm(sequence.id, 0, -1)
        sequence.lose(apart)
        self._prefix.track(sequence)
        self.counts["recomputed"] += 1
