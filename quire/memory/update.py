"""Pending work on tables: rotating K whose position moved, and closing holes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from quire.errors import OutOfMemory, RequestError
from quire.memory.append import SetAside
from quire.memory.interface import MemoryContext, MicroBatch, Status
from quire.memory.layout import AttentionLayout, Int32
from quire.memory.pool import PagePool
from quire.memory.table import HOLE, Table

Rotate = Callable[[int, AttentionLayout, Int32], None]
"""rotate(page_address, layout, deltas): K of slot i, in all layers, moves by deltas[i]."""

Move = Callable[[int, int, AttentionLayout, Int32, Int32], None]
"""move(from_page, to_page, layout, from_slots, to_slots): copies tokens; pages by address."""


class UpdateContext(MemoryContext):
    """Pending work on all tables, with pages set aside for what has to be copied."""

    def __init__(
        self, pool: PagePool, layout: AttentionLayout, tables: Iterable[Table],
        rotate: Rotate | None, move: Move | None, ended: Callable[[], None],
    ) -> None:  # fmt: skip
        tables = list(tables)
        self._pool = pool
        self._layout = layout
        self._rotate = rotate
        self._move = move
        self._ended: Callable[[], None] | None = ended
        self._moved = [t for t in tables if t.pending is not None]
        self._holed = [t for t in tables if _first_hole(t) < t.length] if move else []
        need = self._pages_to_rotate() + sum(self._pages_to_close(t) for t in self._holed)
        self.status = Status.SUCCESS if self._moved or self._holed else Status.NO_UPDATE
        try:
            self.aside = SetAside(pool, need)
        except OutOfMemory as error:
            self.status, self.error = Status.FAILED_PREPARE, error
            self.aside = SetAside(pool, 0)

    def _pages_to_rotate(self) -> int:
        """Each holder that moves copies a shared page, except the last one if all of them move."""
        movers = np.zeros(self._pool.max_pages, np.int32)
        for table in self._moved:
            movers[table.pages[_turning(table)]] += 1
        copies = movers - (movers == self._pool.refs)
        return int(copies[movers > 0].sum())

    def _pages_to_close(self, table: Table) -> int:
        start = self._fixed_pages(table) * self._layout.page_tokens
        live = int((table.position_array()[start:] != HOLE).sum())
        return self._layout.pages_for(live)

    def _fixed_pages(self, table: Table) -> int:
        """Pages before the first hole, which stay as they are."""
        return _first_hole(table) // self._layout.page_tokens

    @property
    def ubatch(self) -> MicroBatch:
        raise RequestError("an update has no micro-batch; it works on what memory holds already")

    def apply(self) -> None:
        """Closes holes, then rotates. After an exception each table is whole, if not yet done."""
        if self.status is not Status.SUCCESS:
            raise RequestError(f"there is nothing to apply: {self.error or 'no update is pending'}")
        try:
            for table in self._holed:
                self._close_holes(table)
            for table in self._moved:
                self._rotate_table(table)
            self.status = Status.NO_UPDATE
        except BaseException:
            self.status = Status.FAILED_COMPUTE
            raise
        finally:
            self.close()

    def next(self) -> bool:
        return False

    def close(self) -> None:
        self.aside.give_back()
        if self._ended is not None:
            ended, self._ended = self._ended, None
            ended()

    def _close_holes(self, table: Table) -> None:
        assert self._move is not None
        size = self._layout.page_tokens
        fixed = self._fixed_pages(table)
        positions = table.position_array()
        old_slots = np.flatnonzero(positions != HOLE)
        old_slots = old_slots[old_slots >= fixed * size]
        pages = table.pages[fixed:].copy()
        fresh = self.aside.pages[: self._layout.pages_for(len(old_slots))]
        new_slots = np.arange(len(old_slots))
        sources, targets = old_slots // size - fixed, new_slots // size
        for source, target in sorted(set(zip(sources.tolist(), targets.tolist(), strict=True))):
            pair = (sources == source) & (targets == target)
            self._move(
                self._pool.page_address(int(pages[source])),
                self._pool.page_address(int(fresh[target])),
                self._layout,
                (old_slots[pair] % size).astype(np.int32),
                (new_slots[pair] % size).astype(np.int32),
            )
        keep = np.concatenate([np.arange(fixed * size), old_slots])
        pending = None if table.pending is None else table.pending[keep]
        ids = np.concatenate([table.pages[:fixed], self.aside.take(len(fresh))])
        table.assign(ids, positions[keep], pending)
        self._pool.release(pages)

    def _rotate_table(self, table: Table) -> None:
        assert self._rotate is not None
        if table.pending is None:
            return
        deltas = table.by_page(table.pending)
        size = self._layout.page_tokens
        for index in _turning(table).tolist():  # each is done, and known to be, before the next
            page = int(table.pages[index])
            if self._pool.refs[page] > 1:
                copy = int(self.aside.pages[0])
                self._pool.copy_page(page, copy)
                self._rotate(self._pool.page_address(copy), self._layout, deltas[index])
                table.replace_page(index, int(self.aside.take(1)[0]))
                self._pool.release_one(page)
            else:
                self._rotate(self._pool.page_address(page), self._layout, deltas[index])
            table.pending[index * size : (index + 1) * size] = 0
        table.settle()


def _turning(table: Table) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Which of the table's pages hold a slot that has to be rotated."""
    assert table.pending is not None
    return np.flatnonzero(table.by_page(table.pending).any(axis=1))


def _first_hole(table: Table) -> int:
    """The first slot without a token, or the table's length."""
    positions = table.positions
    if positions is None:
        return table.length
    holes = np.flatnonzero(positions == HOLE)
    return int(holes[0]) if len(holes) else table.length
