"""Tokens on their way into a session."""

from __future__ import annotations

from quire.engine.history import WayBack
from quire.engine.loop import Work


class Appending:
    """What is appended is kept whole or not at all, and that is decided once, on the loop.

    Until then nobody else works on the session; afterwards others may, and nothing of theirs is
    undone, however late somebody is interrupted.
    """

    def __init__(self, work: Work, way_back: WayBack) -> None:
        self.work = work
        self._way_back = way_back
        self._settled = False

    def settle(self, keep: bool) -> None:
        """Keeps the tokens if they are wanted and were computed; once is enough."""
        if self._settled:
            return
        self._settled = True
        work = self.work
        computed = work.done and not work.ended and work.error is None
        work.loop.end(work)  # what was not computed is undone
        if computed and not keep:
            work.undo()
        self._way_back.drop()
