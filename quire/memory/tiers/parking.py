"""Sequences and checkpoints whose pages lie in a tier for a while.

table      [ p3 ][ p9 ][ p4 ]          p3 is shared with a fork: it stays, and stays counted
parked     [ p3 ][ ─ ][ ─ ]            what only this sequence holds goes to the tier
tier              [ A ][ B ]
back       [ p3 ][ p1 ][ p2 ]          in other pages, the same bytes

What several share goes once all who hold it may leave, for all of them at once. It is in the tier
once, and comes back for all of them when the first one does: it is shared as it was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.memory.groups.layout import Int32
from quire.memory.pages.pool import PagePool
from quire.memory.tiers.tiers import Stored, Tier

Places = NDArray[np.intp]
"""Which pages of a table."""


@dataclass(slots=True, eq=False)
class ParkedPages:
    """One pool's pages of a parked sequence or checkpoint."""

    pool: PagePool
    pages: Int32
    """As its table names them; the ids of pages that moved mean nothing."""
    seen: Int32
    moved: NDArray[np.bool_]
    seq: int
    """Whom it may append as; -1 for a checkpoint."""
    cached: bool
    """Whether the prefix index holds it."""
    away: list[Away] = field(default_factory=list)
    """What of it is in a tier."""

    @property
    def kept(self) -> tuple[Int32, Int32]:
        """The pages that stayed, since others hold them too, and how many slots each shows."""
        return self.pages[~self.moved], self.seen[~self.moved]

    @property
    def n_moved(self) -> int:
        """How many pages are in the tier."""
        return int(self.moved.sum())


@dataclass(slots=True, eq=False)
class Away:
    """Pages of a pool in a tier, and all who hold them: each holds all of them."""

    pool: PagePool
    stored: Stored
    holders: list[tuple[ParkedPages, Places]]

    def leave(self) -> None:
        """They were stored: they are not needed here."""
        for part, at in self.holders:
            if part.cached:
                self.pool.cache(part.pages[at], -1)
            self.pool.release(part.pages[at])
            part.moved[at] = True
            part.away.append(self)

    def read(self) -> Int32:
        """Copies of them in new pages; or an error and nothing changed."""
        fresh = self.pool.allocate(self.n_pages)
        try:
            self.stored.bring(self.pool, fresh)
        except BaseException:
            self.pool.release(fresh)
            raise
        return fresh

    def arrive(self, fresh: Int32) -> None:
        """New pages take their places with all who hold them.

        The sequence that sees most of a page may append to it: what it alone sees is above what
        the others see, and that is frozen.
        """
        appender: Int32 = np.full(len(fresh), -1, np.int32)
        frozen, most = np.zeros(len(fresh), np.int32), np.full(len(fresh), -1, np.int32)
        for part, at in self.holders:
            ahead = (part.seen[at] > most) & (part.seq >= 0)
            most[ahead], appender[ahead] = part.seen[at][ahead], part.seq
        for part, at in self.holders:
            other = (appender != part.seq) | (part.seq < 0)
            frozen = np.where(other, np.maximum(frozen, part.seen[at]), frozen)
        refs = np.full(len(fresh), len(self.holders), np.int32)
        self.pool.hand_over(fresh, refs, frozen, appender)
        for part, at in self.holders:
            part.pages[at] = fresh
            part.moved[at] = False
            part.away.remove(self)
            if part.cached:
                self.pool.cache(fresh, 1)
        self.stored.drop()

    def drop(self, part: ParkedPages) -> None:
        """One holder less; the last one gives their room in the tier back."""
        self.holders = [one for one in self.holders if one[0] is not part]
        if not self.holders:
            self.stored.drop()

    @property
    def n_pages(self) -> int:
        """How many there are."""
        return len(self.holders[0][1])


@dataclass(slots=True, eq=False)
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
        read: list[tuple[Away, Int32]] = []
        try:
            for part in self.parts:
                for away in part.away:
                    read.append((away, away.read()))
        except BaseException:
            for away, fresh in read:
                away.pool.release(fresh)
            raise
        for away, fresh in read:
            away.arrive(fresh)
        return [part.pages for part in self.parts]

    def drop(self) -> None:
        """Gives up everything, here and in the tier."""
        for part in self.parts:
            for away in part.away:
                away.drop(part)
            part.pool.release(part.kept[0])


Counts = Mapping[str, Int32]
"""By pool, how many of some hold each page."""


def leaving(pool: PagePool, pages: Int32, counts: Counts | None) -> NDArray[np.bool_]:
    """Which of a table's pages can go to a tier: those that nobody but those counted holds."""
    counted = 1 if counts is None else counts[pool.name][pages]
    alone: NDArray[np.bool_] = pool.refs[pages] == counted
    return alone


def move_out(first: Parked, others: Sequence[Parked], tier: Tier, counts: Counts | None) -> None:
    """Moves pages of the first to a tier, for all who hold them; or an error and no change."""
    done: list[Away] = []
    try:
        for i, part in enumerate(first.parts):
            at = np.flatnonzero(~part.moved)
            at = at[leaving(part.pool, part.pages[at], counts)]
            for holders in _by_holders(part, at, [other.parts[i] for other in others]):
                pages = part.pages[holders[0][1]]
                done.append(Away(part.pool, tier.take(part.pool, pages), holders))
    except BaseException:
        for away in done:
            away.stored.drop()
        raise
    for away in done:
        away.leave()


def _by_holders(
    first: ParkedPages, at: Places, others: Iterable[ParkedPages]
) -> list[list[tuple[ParkedPages, Places]]]:
    """Pages of the first, those together that the same ones hold, and where each has them."""
    if not len(at):
        return []
    number = np.full(first.pool.max_pages, -1, np.intp)
    number[first.pages[at]] = np.arange(len(at))
    holders = [(first, at)]
    for other in others:
        here = np.flatnonzero(~other.moved)
        which = number[other.pages[here]]
        if (which >= 0).any():
            places = np.full(len(at), -1, np.intp)
            places[which[which >= 0]] = here[which >= 0]
            holders.append((other, places))
    alike = np.unique([places >= 0 for _, places in holders], axis=1, return_inverse=True)[1]
    groups = [alike.reshape(-1) == n for n in range(alike.max() + 1)]
    return [
        [(part, places[group]) for part, places in holders if places[group][0] >= 0]
        for group in groups
    ]


def all_here(
    tables: tuple[Any, ...], held: Sequence[tuple[PagePool, Int32, Int32]], seq: int, cached: bool
) -> Parked:
    """Tables none of whose pages have moved yet."""
    parts = [
        ParkedPages(pool, pages.copy(), seen, np.zeros(len(pages), bool), seq, cached)
        for pool, pages, seen in held
    ]
    return Parked(tables, parts)
