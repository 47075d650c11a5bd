"""Pending work on tables: rotating K whose position moved, and closing holes.

First holes are closed, then keys are turned; each is planned on copies of the tables, which take
their places when the device is done. So what fails is pending still, and nothing is half done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from quire.devices.device import PageWork
from quire.memory.groups.group import GroupUpdate
from quire.memory.groups.table import HOLE, Table
from quire.memory.pages.pool import PagePool
from quire.memory.pages.reserved import ReservedPages


def update_pages(
    pool: PagePool, tables: Sequence[Table], optimize: bool, gone: Collection[int] = ()
) -> int:
    """Pages that pending work on tables takes; `gone` are pages about to lose one more holder."""
    pages = 0
    movers: Counter[int] = Counter()
    for table in tables:
        kept = table.n_pages
        if optimize and has_holes(table) and not _alone(pool, table, gone):
            kept = first_hole(table) // table.page_tokens
            live = table.position_array()[kept * table.page_tokens :] != HOLE
            pages += -(-int(live.sum()) // table.page_tokens)
        movers.update(int(table.pages[i]) for i in _turning(table).tolist() if i < kept)
    # Each holder that moves copies a shared page, except the last one if all of them move.
    held = {page: int(pool.refs[page]) - (page in gone) for page in movers}
    return pages + sum(n - (n == held[page]) for page, n in movers.items())


class TableUpdate(GroupUpdate):
    """Pending work on some tables of a group, with pages set aside for what has to be copied."""

    def __init__(self, pool: PagePool, tables: Sequence[Table], optimize: bool) -> None:
        self._pool = pool
        self._tables = tables
        self._optimize = optimize
        self._fresh = ReservedPages(pool, update_pages(pool, tables, optimize))
        self.reserved = (self._fresh,)

    def phases(self) -> Iterator[PageWork]:
        if self._optimize and any(map(has_holes, self._tables)):
            yield from self._phase(_Closing(self._pool, self._fresh))
        if any(table.pending is not None for table in self._tables):
            yield from self._phase(_Turning(self._pool, self._fresh))

    def _phase(self, phase: _Phase) -> Iterator[PageWork]:
        """One kind of work on all tables; they show it once it is done."""
        try:
            for table in self._tables:
                phase.plan(table)
            yield phase.work
            phase.finish()
        finally:
            phase.close()


class _Phase:
    """Tables planned anew, and the work that makes them true."""

    def __init__(self, pool: PagePool, fresh: ReservedPages) -> None:
        self.work = PageWork()
        self._pool = pool
        self._fresh = fresh
        self._made: list[tuple[Table, Table]] = []
        self._taken: list[int] = []
        self._left: list[int] = []  # pages that lose a holder, as often as they do

    def plan(self, table: Table) -> None:
        """What is to be done for a table, if anything."""
        raise NotImplementedError

    def _take(self, n: int) -> list[int]:
        pages: list[int] = self._fresh.take(n).tolist()
        self._taken += pages
        return pages

    def finish(self) -> None:
        """The work is done: tables become what it made of them."""
        for table, twin in self._made:
            table.become(twin)
        self._made, self._taken = [], []
        while self._left:
            self._pool.release_one(self._left.pop())

    def close(self) -> None:
        """What was planned and did not come to be goes back."""
        while self._taken:
            self._pool.release_one(self._taken.pop())


class _Closing(_Phase):
    """Closes holes: tokens move up, in place where nobody else holds the pages."""

    def plan(self, table: Table) -> None:
        if not has_holes(table):
            return
        size, alone = table.page_tokens, _alone(self._pool, table)
        start = first_hole(table) if alone else first_hole(table) // size * size
        positions = table.position_array()
        old = np.flatnonzero(positions != HOLE)
        old = old[old >= start]
        new = np.arange(start, start + len(old))
        n_pages = -(-(start + len(old)) // size)
        kept = n_pages if alone else start // size
        before = table.pages.copy()
        fresh = np.array(self._take(n_pages - kept), np.int32)
        after = np.concatenate([before[:kept], fresh])
        # In place a token never moves past one that is still to move: rows are done in order.
        rows = np.stack([before[old // size], old % size, after[new // size], new % size], axis=1)
        moves = rows[old != new] if alone else rows
        self.work.move(self._pool.name, moves.astype(np.int32))
        stays = np.concatenate([np.arange(start), old])
        pending = None if table.pending is None else table.pending[stays]
        twin = table.copy()
        twin.assign(after, positions[stays], pending)
        self._made.append((table, twin))
        self._left += before[kept:].tolist()


class _Turning(_Phase):
    """Rotates keys that moved, in place or on a copy where others hold the page too."""

    def plan(self, table: Table) -> None:
        if table.pending is None:
            return
        twin = table.copy()
        deltas = table.by_page(table.pending)
        for index in _turning(table).tolist():
            page = int(twin.pages[index])
            if self._pool.refs[page] - self._left.count(page) > 1:
                (copy,) = self._take(1)
                self.work.copy(self._pool.name, page, copy)
                twin.replace_page(index, copy)
                self._left.append(page)
                page = copy
            self.work.rotate(self._pool.name, page, deltas[index])
        twin.pending = None
        twin.settle()
        self._made.append((table, twin))


def _alone(pool: PagePool, table: Table, gone: Collection[int] = ()) -> bool:
    """Whether nobody else holds a table's pages from its first hole on."""
    pages = table.pages[first_hole(table) // table.page_tokens :].tolist()
    return all(int(pool.refs[page]) - (page in gone) == 1 for page in pages)


def _turning(table: Table) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Which of the table's pages hold a slot that has to be rotated."""
    if table.pending is None:
        return np.empty(0, np.intp)
    return np.flatnonzero(table.by_page(table.pending).any(axis=1))


def has_holes(table: Table) -> bool:
    """Whether some slot holds no token."""
    return first_hole(table) < table.length


def first_hole(table: Table) -> int:
    """The first slot without a token, or the table's length."""
    positions = table.positions
    if positions is None:
        return table.length
    holes = np.flatnonzero(positions == HOLE)
    return int(holes[0]) if len(holes) else table.length
