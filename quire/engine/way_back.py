"""How something that was done to a sequence is undone."""

from __future__ import annotations

from quire.engine.history import History
from quire.engine.sequence import PARKED, Mark, Sequence


class WayBack:
    """Lets whatever comes from here on be undone: tokens are dropped behind `length`, appended.

    Those that were dropped are computed again then: their pages are not kept from others. Of an
    edited sequence they cannot be, and are kept under a mark.
    """

    def __init__(self, history: History, sequence: Sequence, length: int | None = None) -> None:
        self._history = history
        self._sequence = sequence
        self._length = length = sequence.length if length is None else length
        self._dropped = sequence.tokens.array(length)
        self._mark: Mark | None = None
        if sequence.edited and (length < sequence.length or not history.cuts_anywhere):
            if sequence.status is PARKED and sequence.is_whole_to(length):
                self._mark = self._set_aside()
            else:
                self._mark = history.mark(sequence, "")

    def _set_aside(self) -> Mark:
        """All of it stays in its tier, and its beginning is computed again: there may be no room.

        So its tokens behind that are to be dropped now.
        """
        history, sequence = self._history, self._sequence
        record, memory = sequence.record(), history.memory
        mark = history.marked("", record, memory.checkpoint_take(sequence.id))
        sequence.lose()
        history.prefix.track(sequence)
        return mark

    def go(self) -> None:
        """Makes a sequence what it was; once, whether that can be or not."""
        if self._mark is not None:
            try:
                self._go_to(self._mark)
            finally:
                self.drop()
            return
        if self._sequence.length > self._length:
            self._history.truncate(self._sequence, self._length)
        if len(self._dropped):
            self._sequence.extend(self._dropped)
            self._history.prefix.track(self._sequence)

    def _go_to(self, mark: Mark) -> None:
        """Back to a mark that is not needed any more: what is parked stays so."""
        history, sequence = self._history, self._sequence
        if mark.held.parked is None:
            history.restore(sequence, mark)
            return
        history.check_mark(mark)
        history.memory.checkpoint_give(sequence.id, mark.checkpoint)
        sequence.become(mark.record)
        sequence.park()
        history.prefix.track(sequence)

    def drop(self) -> None:
        """It will not be needed."""
        mark, self._mark = self._mark, None
        if mark is not None and mark.checkpoint in self._history.memory.checkpoints.by_name:
            self._history.memory.checkpoint_delete(mark.checkpoint)
