"""How something that was done to a sequence is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.sequence import Mark, Sequence

if TYPE_CHECKING:
    from quire.engine.history import History


class WayBack:
    """Where a sequence was before something that may fail."""

    def __init__(
        self, history: History, sequence: Sequence, length: int, mark: Mark | None
    ) -> None:
        self._history = history
        self._sequence = sequence
        self._length = length
        self._dropped = sequence.tokens.array(length)
        self._mark = mark

    def go(self) -> None:
        """Makes a sequence what it was; once, whether that can be or not."""
        if self._mark is not None:
            try:
                self._history.restore(self._sequence, self._mark)
            finally:
                self.drop()
            return
        if self._sequence.length > self._length:
            self._history.truncate(self._sequence, self._length)
        if len(self._dropped):
            self._sequence.extend(self._dropped)
            self._history.prefix.track(self._sequence)

    def drop(self) -> None:
        """It will not be needed."""
        mark, self._mark = self._mark, None
        if mark is not None and mark.checkpoint in self._history.memory.checkpoints.by_name:
            self._history.memory.checkpoint_delete(mark.checkpoint)
