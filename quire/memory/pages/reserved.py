"""Pages held by a lease or context until its end."""

from __future__ import annotations

import numpy as np

from quire.memory.groups.layout import Int32
from quire.memory.pages.pool import PagePool

_NONE: Int32 = np.empty(0, np.int32)


class ReservedPages:
    """Fresh pages that will be needed, and originals that were replaced.

    An original keeps its reference until the end. Two sequences of one step may both copy the
    same page, and both must find it where it was if the step is undone.
    """

    __slots__ = ("originals", "pages", "pool")

    def __init__(self, pool: PagePool, n: int) -> None:
        self.pool = pool
        self.pages = pool.allocate(n) if n else _NONE
        self.originals: list[int] = []

    def take(self, n: int) -> Int32:
        """The next n fresh pages, which now belong to whoever asked."""
        taken, self.pages = self.pages[:n], self.pages[n:]
        return taken

    @property
    def all_pages(self) -> list[int]:
        """Every reference held, page by page."""
        return [*self.pages.tolist(), *self.originals]

    def drop_originals(self) -> None:
        """Lets go of what was replaced: there is no way back any more."""
        while self.originals:
            self.pool.release_one(self.originals.pop())

    def recycle_originals(self) -> None:
        """Lets go of what was replaced; pages nobody else holds are as good as fresh ones."""
        if not self.originals:
            return
        alone = [page for page in self.originals if self.pool.refs[page] == 1]
        self.originals = [page for page in self.originals if self.pool.refs[page] > 1]
        self.drop_originals()
        self.pages = np.concatenate([self.pages, np.array(alone, np.int32)])

    def give_back(self) -> None:
        """Frees everything that nobody took."""
        if self.originals:
            self.drop_originals()
        if len(self.pages):
            self.pool.release(self.take(len(self.pages)))
