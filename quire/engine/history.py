"""The past of a sequence: marks, going back to them, and taking tokens out of the middle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial

from quire.engine.prefix_cache import PrefixCache
from quire.engine.room import Rank, Room
from quire.engine.runner import for_callers
from quire.engine.sequence import LOST, PARKED, Mark, Record, Sequence, check_whole
from quire.errors import BudgetError, OutOfMemory, RequestError
from quire.memory.memory import Memory
from quire.memory.status import Status


class History:
    """Moves sequences back and forth in what they hold.

    `ensure_resident` brings a sequence's pages into memory.
    """

    def __init__(
        self, memory: Memory, prefix: PrefixCache, room: Room,
        ensure_resident: Callable[[Sequence], None],
    ) -> None:  # fmt: skip
        self.memory = memory
        self.prefix = prefix
        self.room = room
        self.ensure_resident = ensure_resident
        self._shared: Counter[str] = Counter()  # how many besides the first hold a mark

    def mark(self, sequence: Sequence, name: str) -> Mark:
        """Keeps a sequence as it is now."""
        self.ensure_resident(sequence)
        checkpoint = self.memory.checkpoint_save(sequence.id)
        return self.marked(name, sequence.record(), checkpoint)

    def marked(self, name: str, record: Record, checkpoint: str) -> Mark:
        """A mark of what memory holds under a name."""
        held = self.memory.checkpoints.get(checkpoint)
        return Mark(name, record, checkpoint, self.memory, held)

    def share(self, marks: Iterable[Mark]) -> None:
        """One more holds these marks: a fork has those of its source."""
        self._shared.update(mark.checkpoint for mark in marks)

    def drop(self, mark: Mark) -> None:
        """Lets go of a mark; it goes with the last who holds it."""
        others = self._shared.pop(mark.checkpoint, 0)
        if others > 1:
            self._shared[mark.checkpoint] = others - 1
        elif not others:
            self.memory.checkpoint_delete(mark.checkpoint)

    def hold(self, sequence: Sequence, marks: Collection[Mark]) -> list[Mark]:
        """Keeps a sequence and some marks as they are, with their pages here."""
        held = [self.mark(sequence, ""), *marks]
        self.share(marks)
        self.room.held.update(mark.checkpoint for mark in held)
        return held

    def let_go(self, held: Collection[Mark]) -> None:
        """They may go again."""
        self.room.held -= Counter(mark.checkpoint for mark in held)
        for mark in held:
            self.drop(mark)

    def check_mark(self, mark: Mark) -> None:
        """Refuses a mark that memory does not hold."""
        if mark.memory is not self.memory:
            raise RequestError(f"mark {mark.name!r} was made with another model")
        if self.memory.checkpoints.by_name.get(mark.checkpoint) is not mark.held:
            raise RequestError(f"mark {mark.name!r} is gone: it was dropped, or its session closed")

    def bring_back(
        self, mark: Mark, sequence: Sequence, spare: Collection[str] = (), instead: bool = False
    ) -> None:
        """Has a mark's pages in memory, if they were parked; others make room for its session.

        So does the session itself, where the mark is to take its place (`instead`).
        """
        self.check_mark(mark)
        if mark.held.parked is None:
            return
        fits = partial(self.memory.checkpoint_fits, mark.checkpoint)
        spare = {mark.checkpoint, *spare}
        if not self.room.make(fits, sequence, Rank.RUNNING, spare) and instead:
            self.room.make(fits, None, Rank.RUNNING, spare)
        self.memory.checkpoint_unpark(mark.checkpoint)  # where it cannot, it says best why

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drops all tokens from position `length` on.

        Where memory cannot go back so far, the nearest place that a mark or somebody else holds
        is gone back to, and the rest is computed again.
        """
        if not self._is_sequences_own(sequence, length):
            self.ensure_resident(sequence)
            stays = not sequence.is_whole_to(length)
            if stays and not self.memory.can_rm(sequence.id, max(length - 1, 0), -1):
                raise self._nothing_covers(length)
            if not self.memory.seq_rm(sequence.id, length, -1):
                self._recompute(sequence, length)
                return
        sequence.truncate(length)
        if sequence.edited and sequence.length and sequence.pending == 0:
            self._drop_last(sequence)
        self.prefix.track(sequence)

    def _recompute(self, sequence: Sequence, length: int) -> None:
        """Starts from the nearest place that somebody holds."""
        self.memory.seq_rm(sequence.id, 0, -1)
        sequence.truncate(length)
        sequence.lose()
        self.prefix.adopt(sequence)
        self._start_from_mark(sequence, length)

    def start_over(self, sequence: Sequence) -> None:
        """Finds what a sequence that lost its pages need not compute again, but for the last token.

        With its marks it shares pages again, as it did before; unless that left it no room.
        """
        if sequence.apart:
            sequence.adopt(0, None)
            self.prefix.track(sequence)
            return
        self.prefix.start_over(sequence)
        self._start_from_mark(sequence, sequence.length - 1)

    def _is_sequences_own(self, sequence: Sequence, length: int) -> bool:
        """Whether memory has none of the tokens from a position on, or drops them later.

        An edited sequence that is parked may have no room to come back to. Where memory can be cut
        at any position that is done when it comes.
        """
        if not sequence.is_whole_to(length):
            check_whole(sequence)
        if sequence.edited and sequence.computed:
            return sequence.status is PARKED and self.cuts_anywhere
        return length >= sequence.computed

    @property
    def cuts_anywhere(self) -> bool:
        """Whether memory can go back to any position."""
        return all(group.kind == "attention" for group in self.memory.groups)

    def _start_from_mark(self, sequence: Sequence, most: int) -> None:
        """Goes to the furthest mark along a sequence's first tokens, if that is further than it is.

        Of equals a mark is better: it has what it holds in any case.
        """
        mark = max(self._marks_along(sequence, most), key=_computed, default=None)
        if mark is None or _computed(mark) < sequence.computed:
            return
        fits = partial(self.memory.checkpoint_fits, mark.checkpoint)
        if not self.room.make(fits, sequence, Rank.RESTING, {mark.checkpoint}):
            return
        with suppress(OutOfMemory):  # a tier that cannot be read: it is computed again
            self.memory.checkpoint_restore(sequence.id, mark.checkpoint)
            if _computed(mark) > most:
                self.memory.seq_rm(sequence.id, most, -1)
            sequence.adopt(min(_computed(mark), most), None)
            self.prefix.track(sequence)

    def _marks_along(self, sequence: Sequence, most: int) -> Iterable[Mark]:
        """A sequence's marks of its own tokens, whose pages may be shared as its own may."""
        tokens, ours = sequence.tokens, (sequence.salt, sequence.shared, sequence.exact)
        for mark in sequence.marks.values():
            record, n = mark.record, _computed(mark)
            theirs = record.salt, record.shared, record.exact
            if not n or record.whole is not None or theirs != ours:
                continue
            if (n <= most or self.cuts_anywhere) and tokens.common(record.tokens.array(0, n)) == n:
                yield mark

    def remove(self, sequence: Sequence, start: int, stop: int) -> None:
        """Takes computed tokens out of the middle; those behind move up, and no hole is left.

        Where there is no room to move them in, nothing has changed. What others hold too has to be
        copied for that: where there is no room for both, those leave.
        """
        self.ensure_resident(sequence)
        try:
            self._remove(sequence, start, stop)
        except BudgetError:
            if not (self.memory.is_shared(sequence.id) and self.room.park_apart(sequence)):
                raise
            self.ensure_resident(sequence)
            if sequence.status is LOST:  # some of them cannot leave now: it had no way back
                raise
            self._remove(sequence, start, stop)

    def _remove(self, sequence: Sequence, start: int, stop: int) -> None:
        before: str | None = self.memory.checkpoint_save(sequence.id)
        try:
            self._take_out(sequence, start, stop)
            left, stays = sequence.length - stop + start, stop < sequence.length or sequence.edited
            if stays and not self.memory.can_rm(sequence.id, left - 1, -1):
                raise self._nothing_covers(left)  # its last token has to be computed anew
            if before and stop < sequence.length and not self.memory.update_fits(optimize=True):
                self._give_up(before, sequence, stop)
                before = None
            self._move_up()
        except BaseException:
            if before is not None:
                self.memory.checkpoint_restore(sequence.id, before)
            else:  # the device failed, halfway
                self.room.lose(sequence)
            raise
        finally:
            if before is not None:
                self.memory.checkpoint_delete(before)
        sequence.cut_out(start, stop)
        if sequence.edited and sequence.pending == 0:
            self._drop_last(sequence)
        self.prefix.track(sequence)

    def _drop_last(self, sequence: Sequence) -> None:
        """Has the last token computed once more.

        In an edited sequence it saw what is gone, and its logits are not known. They will be
        wanted, or not: what it leaves in memory must not depend on that.
        """
        last, length = sequence.tokens[-1], sequence.length - 1
        if sequence.status is not PARKED and not self.memory.seq_rm(sequence.id, length, -1):
            raise self._nothing_covers(length)  # a parked one drops it when its pages are back
        sequence.truncate(length)
        sequence.extend([last])

    def _nothing_covers(self, length: int) -> RequestError:
        return RequestError(
            f"position {length} cannot be restored: nothing covers it any more; "
            "make a checkpoint before the place to return to"
        )

    def _take_out(self, sequence: Sequence, start: int, stop: int) -> None:
        if not self.memory.seq_rm(sequence.id, start, stop):
            raise RequestError(
                f"tokens {start} to {stop} cannot be taken out: the model's memory has them "
                "in a state or has passed them; rewind and append the rest instead"
            )
        if stop < sequence.length:
            self.memory.seq_add(sequence.id, stop, -1, start - stop)

    def _give_up(self, before: str, sequence: Sequence, stop: int) -> None:
        """Gives up the way back, where what is left to do is sure to find room then."""
        fits = partial(self.memory.update_fits, True, before)
        if not self.room.make(fits, sequence, Rank.RUNNING, {before}):
            raise BudgetError(
                f"there is no room to move up the {sequence.length - stop} tokens behind {stop}; "
                "close other sessions, drop marks, or raise memory_budget"
            )
        self.memory.checkpoint_delete(before)

    def _move_up(self) -> None:
        """Turns keys to their new positions and closes holes."""
        with for_callers(), self.memory.init_update(optimize=True) as update:
            if update.error is not None:
                raise update.error
            if update.status is Status.SUCCESS:
                update.apply()

    def restore(self, sequence: Sequence, mark: Mark) -> None:
        """Makes a sequence what a mark holds."""
        self.bring_back(mark, sequence, instead=True)
        self.memory.checkpoint_restore(sequence.id, mark.checkpoint)
        sequence.become(mark.record)
        self.prefix.track(sequence)

    def want_logits(self, sequence: Sequence) -> None:
        """Has a sequence's last token computed once more, where its logits are not known."""
        if sequence.pending or sequence.logits is not None:
            return
        if sequence.edited:
            self.ensure_resident(sequence)
            self._drop_last(sequence)
        else:
            last = sequence.tokens[-1]
            self.truncate(sequence, sequence.length - 1)
            sequence.extend([last])
            self.prefix.track(sequence)


def _computed(mark: Mark) -> int:
    """How many tokens memory holds under a mark."""
    return mark.record.computed
