"""Sequences whose pages lie in a tier for a while.

table      [ p3 ][ p9 ][ p4 ]          p3 is shared with a fork: it stays, and stays counted
parked     [ p3 ][ ─ ][ ─ ]            what only this sequence holds goes to the tier
tier              [ A ][ B ]
back       [ p3 ][ p1 ][ p2 ]          in other pages, the same bytes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.memory.interface import Returning
from quire.memory.layout import Int32
from quire.memory.pool import PagePool
from quire.memory.tiers import Stored, Tier

T = TypeVar("T")


@dataclass(slots=True)
class ParkedPages:
    """One pool's pages of a parked sequence."""

    pool: PagePool
    pages: Int32
    """As its table names them; the ids of pages that moved mean nothing."""
    seen: Int32
    moved: NDArray[np.bool_]
    stored: Stored

    @property
    def kept(self) -> tuple[Int32, Int32]:
        """The pages that others hold too, which stayed, and how many slots of each are seen."""
        return self.pages[~self.moved], self.seen[~self.moved]

    @property
    def n_moved(self) -> int:
        """How many pages are in the tier."""
        return int(self.moved.sum())

    def bring_back(self) -> Int32:
        """The table's pages, all in the pool again; or an error and nothing changed."""
        fresh = self.pool.allocate(self.n_moved)
        try:
            self.stored.load([self.pool.view(int(page)) for page in fresh])
        except BaseException:
            self.pool.release(fresh)
            raise
        pages = self.pages.copy()
        pages[self.moved] = fresh
        return pages


@dataclass(slots=True)
class Parked(Generic[T]):
    """A sequence that cannot be read or appended to until it is back."""

    table: T
    parts: list[ParkedPages]

    def kept(self, pool: PagePool) -> tuple[Int32, Int32]:
        """What it still holds of a pool."""
        return next(part.kept for part in self.parts if part.pool is pool)

    def drop(self) -> None:
        """Gives up everything, here and in the tier."""
        for part in self.parts:
            part.stored.drop()
            part.pool.release(part.kept[0])


class TableReturning(Returning):
    """The pages of one table, read back; `back` takes them, `freed` follows a cancel."""

    def __init__(
        self, parked: Parked[T], back: Callable[[list[Int32]], None], freed: Callable[[], None]
    ) -> None:
        self._parked = parked
        self._back = back
        self._freed = freed
        self._pages: list[Int32] = []
        try:
            for part in parked.parts:
                self._pages.append(part.bring_back())
        except BaseException:
            self.cancel()
            raise

    def finish(self) -> None:
        self._back(self._pages)
        for part in self._parked.parts:
            part.stored.drop()

    def cancel(self) -> None:
        for part, pages in zip(self._parked.parts, self._pages, strict=False):
            part.pool.release(pages[part.moved])
        self._freed()


def own_pages(pool: PagePool, pages: Int32) -> NDArray[np.bool_]:
    """Which of a table's pages nobody else holds."""
    alone: NDArray[np.bool_] = pool.refs[pages] == 1
    return alone


def store_pages(held: Sequence[tuple[PagePool, Int32, Int32]], tier: Tier) -> list[ParkedPages]:
    """Copies what only this holder has to the tier, pool by pool; or an error and no change."""
    parts: list[ParkedPages] = []
    try:
        for pool, pages, seen in held:
            pages, moved = pages.copy(), own_pages(pool, pages)
            stored = tier.store([pool.view(int(page)) for page in pages[moved]])
            parts.append(ParkedPages(pool, pages, seen, moved, stored))
    except BaseException:
        for part in parts:
            part.stored.drop()
        raise
    return parts
