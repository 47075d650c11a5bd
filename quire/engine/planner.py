"""Makes plans come true: room is made for them, and who has to give way does."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import sleep

from quire.engine.plan import Entry, Plan
from quire.engine.prefix_cache import PrefixCache
from quire.engine.room import Rank, Room
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import LOST, PARKED, RUNNING, WAITING, Sequence
from quire.errors import QuireError, TierError
from quire.memory.memory import Memory

_MOMENT_S = 0.002


class Planner:
    """Asks the scheduler who should run until memory has room for them."""

    def __init__(
        self, scheduler: Scheduler, memory: Memory, room: Room, prefix: PrefixCache,
        fail: Callable[[Sequence, QuireError], None], start_over: Callable[[Sequence], None],
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._memory = memory
        self._room = room
        self._prefix = prefix
        self._fail = fail
        self._start_over = start_over

    def plan(self, active: Seq[Sequence]) -> Plan:
        """Who of these runs; there is room for them, and their pages are here."""
        plan = self._wanted(active)
        while plan.counts and not self._memory.fits(plan.counts):
            if self._make_room(plan):
                break
            plan = self._scheduler.less(plan)
            if plan.failed and self._prefix.budget.whole.passing:
                sleep(_MOMENT_S)  # a file is read or written: what that holds comes back
                return Plan([], [])
            if not any(self._finds_a_way(sequence) for sequence, _ in plan.failed):
                self._carry_out(plan)
            if not plan.entries:
                plan = self._wanted([s for s in active if s.active])
        return self._brought_back(plan) if plan.back else plan

    def _wanted(self, active: Seq[Sequence]) -> Plan:
        """The plan of everybody who can go on, whether there is room for them or not."""
        for sequence in active:
            if sequence.status is not RUNNING:
                if sequence.status is WAITING:
                    self._prefix.release(sequence)
                elif sequence.status is LOST:
                    self._start_over(sequence)
        return self._scheduler.plan(active, self._memory.fits)

    def _make_room(self, plan: Plan) -> bool:
        """For several, those who rest give way; for one alone, everybody does."""
        alone = plan.entries[0].sequence if len(plan.entries) == 1 else None
        up_to = Rank.RUNNING if alone else Rank.RESTING
        return self._room.make(lambda: self._memory.fits(plan.counts), alone, up_to)

    def _finds_a_way(self, sequence: Sequence) -> bool:
        """Whether it goes on in another manner that takes less room; it may fail of a tier."""
        if sequence.status is not PARKED:
            return self._goes_apart(sequence)
        if not self._room.make_way_back(sequence):
            return False
        self._bring_back(sequence)  # what it takes from there on is known, and not only a bound
        return True

    def _goes_apart(self, sequence: Sequence) -> bool:
        """Whether it is computed again by itself, where that may do with less room.

        To write into a page that others hold too takes a copy: a page more than it takes alone,
        and as long as it holds the page as well, those others cannot leave with it. What cannot be
        computed again goes to a tier by itself, and comes back when they have left.
        """
        if sequence.apart or not self._memory.is_shared(sequence.id):
            return False
        if not self._memory.could_hold(sequence.length):
            return False
        if sequence.edited:
            return self._room.park_apart(sequence)
        self._room.lose(sequence, apart=True)
        return True

    def _carry_out(self, plan: Plan) -> None:
        """What has to happen before a plan fits."""
        for sequence in plan.preempted:
            self._room.preempt(sequence)
        for sequence in plan.lost:
            self._room.lose(sequence)
        for sequence, error in plan.failed:
            self._fail(sequence, error)

    def _brought_back(self, plan: Plan) -> Plan:
        """The plan without those whose pages could not be read back."""
        entries: list[Entry] = []
        for entry in plan.entries:
            sequence = entry.sequence
            sequence.run()
            if sequence.status is not PARKED or self._bring_back(sequence):
                entries.append(entry)
        return Plan(entries, [(entry.sequence.id, entry.count) for entry in entries])

    def _bring_back(self, sequence: Sequence) -> bool:
        if self._room.bring_back(sequence):
            return True
        if sequence.edited:
            self._fail(sequence, TierError("the pages of a sequence could not be read back"))
        return False
