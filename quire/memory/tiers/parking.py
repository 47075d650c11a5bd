"""Sequences whose pages lie in a tier for a while.

table      [ p3 ][ p9 ][ p4 ]          p3 is shared with a fork: it stays, and stays counted
parked     [ p3 ][ ─ ][ ─ ]            what only this sequence holds goes to the tier
tier              [ A ][ B ]
back       [ p3 ][ p1 ][ p2 ]          in other pages, the same bytes

What is shared can go as well, once everybody who holds it may: each has a copy of its own then, in
the tier and when it comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.memory.groups.layout import Int32
from quire.memory.pages.pool import PagePool
from quire.memory.tiers.tiers import Stored, Tier


@dataclass(slots=True)
class ParkedPages:
    """One pool's pages of a parked sequence."""

    pool: PagePool
    pages: Int32
    """As its table names them; the ids of pages that moved mean nothing."""
    seen: Int32
    moved: NDArray[np.bool_]
    stored: list[tuple[NDArray[np.intp], Stored]]
    """What is in a tier, and which pages of the table that is."""

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
        whole = self.pages.copy()
        whole[self.moved] = fresh
        try:
            for at, stored in self.stored:
                stored.bring(self.pool, whole[at])
        except BaseException:
            self.pool.release(fresh)
            raise
        return whole

    def leave(self, at: NDArray[np.intp], stored: Stored) -> None:
        """Some pages of the table were stored: they are not needed here."""
        self.stored.append((at, stored))
        self.moved[at] = True
        self.pool.release(self.pages[at])


@dataclass(slots=True)
class Parked:
    """A sequence that cannot be read or appended to until it is back."""

    tables: tuple[Any, ...]
    """One for each group."""
    parts: list[ParkedPages]
    """One for each pool."""

    @property
    def kept(self) -> list[tuple[PagePool, Int32, Int32]]:
        """For each pool, what stayed."""
        return [(part.pool, *part.kept) for part in self.parts]

    def bring_back(self) -> list[Int32]:
        """The pages of each pool, all in place again; or an error and nothing changed."""
        back: list[Int32] = []
        try:
            for part in self.parts:
                back.append(part.bring_back())
        except BaseException:
            for part, pages in zip(self.parts, back, strict=False):
                part.pool.release(pages[part.moved])
            raise
        return back

    def forget(self) -> None:
        """Gives up its room in the tier."""
        for part in self.parts:
            for _, stored in part.stored:
                stored.drop()

    def drop(self) -> None:
        """Gives up everything, here and in the tier."""
        self.forget()
        for part in self.parts:
            part.pool.release(part.kept[0])


Staying = Mapping[str, NDArray[np.bool_]]
"""Pages, by pool, that will be held here in any case."""


def leaving(pool: PagePool, pages: Int32, but: Staying | None) -> NDArray[np.bool_]:
    """Which of a table's pages go to a tier: those nobody else holds, or all but some."""
    alone: NDArray[np.bool_] = pool.refs[pages] == 1
    return alone if but is None else ~but[pool.name][pages]


def move_out(parked: Parked, tier: Tier, but: Staying | None) -> None:
    """Moves pages to a tier, of all pools; or an error and no change."""
    done: list[tuple[ParkedPages, NDArray[np.intp], Stored]] = []
    try:
        for part in parked.parts:
            at = np.flatnonzero(~part.moved)
            at = at[leaving(part.pool, part.pages[at], but)]
            done.append((part, at, tier.take(part.pool, part.pages[at])))
    except BaseException:
        for _, _, stored in done:
            stored.drop()
        raise
    for part, at, stored in done:
        part.leave(at, stored)


def all_here(tables: tuple[Any, ...], held: Sequence[tuple[PagePool, Int32, Int32]]) -> Parked:
    """Tables none of whose pages have moved yet."""
    parts = [
        ParkedPages(pool, pages.copy(), seen, np.zeros(len(pages), bool), [])
        for pool, pages, seen in held
    ]
    return Parked(tables, parts)
