"""How a session ends, whether it is closed or forgotten."""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.loop import Loop
from quire.engine.sequence import Mark, Sequence


class Ending:
    """Gives back what a session holds, once, without holding the session itself."""

    def __init__(self, loop: Loop, sequence: Sequence, marks: Mapping[str, Mark]) -> None:
        self._loop = loop
        self._sequence = sequence
        self._marks = marks
        self._done = False

    def __call__(self) -> None:
        engine = self._loop.engine
        if self._done or engine.closed:
            return
        self._done = True
        self._loop.cancel(self._sequence)
        for mark in self._marks.values():
            engine.history.drop(mark)
        engine.end(self._sequence)
