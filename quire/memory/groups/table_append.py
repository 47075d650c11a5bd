"""Appending to tables: new slots at their ends, kept, cut back or undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from quire.devices.device import PageWork
from quire.memory.batch import NewTokens
from quire.memory.groups.group import GroupAppend, Wanted
from quire.memory.groups.layout import AttentionLayout, Int32
from quire.memory.groups.table import HOLE, Table
from quire.memory.groups.views import PageView
from quire.memory.pages.pool import PagePool
from quire.memory.pages.reserved import ReservedPages

Growth = tuple[int, Table, int, int, int, bool]
"""How one sequence grows: its id and table, slots before, new slots, pages needed behind the last
one, and whether the last page is shared and has to be copied before it is written."""


def plan_growth(pool: PagePool, wanted: Iterable[Wanted[Table]]) -> tuple[list[Growth], int]:
    """How sequences grow by so many tokens each, and the number of pages that takes."""
    growths: list[Growth] = []
    need = 0
    counts, appender, frozen = pool.counts, pool.appender, pool.frozen
    for seq, table, count in wanted:
        start, size = table.length, table.page_tokens
        n_new = -(-(start + count) // size) - table.n_pages
        slot = start % size
        last = table.last_page
        # `PagePool.may_append`, without a call: this is asked of every sequence in every step.
        copies = slot > 0 and counts[last] > 1
        if copies and appender[last] == seq and slot >= frozen[last]:
            copies = False
        need += n_new + copies
        growths.append((seq, table, start, count, n_new, copies))
    return growths, need


class TableRows:
    """Page ids of running sequences as one matrix that lives from step to step.

    A row is copied only when its table's version is not the one it shows, so a step that adds no
    page copies nothing, however long the sequences are.
    """

    def __init__(self) -> None:
        self._matrix: Int32 = np.full((4, 16), -1, np.int32)
        self._versions: list[object] = [None] * 4

    def show(self, tables: list[Table]) -> Int32:
        """[len(tables), max_pages] page ids; valid until the next call."""
        rows, columns = self._matrix.shape
        versions = self._versions
        stale: list[int] = []
        for i, table in enumerate(tables):
            if i >= rows or versions[i] is not table.version:
                stale.append(i)
        if not stale:
            return self._matrix[: len(tables)]
        widest = max(tables[i].n_pages for i in stale)
        if len(tables) > rows or widest > columns:
            rows = max(rows, 2 * len(tables)) if len(tables) > rows else rows
            columns = max(columns, 2 * widest) if widest > columns else columns
            self._matrix = np.full((rows, columns), -1, np.int32)
            self._versions = versions = [None] * rows
            stale = list(range(len(tables)))
        for i in stale:
            table = tables[i]
            self._matrix[i, : table.n_pages] = table.pages
            self._matrix[i, table.n_pages :] = -1
            versions[i] = table.version
        return self._matrix[: len(tables)]


class TableAppend(GroupAppend[Table]):
    """New slots at the ends of tables.

    [0, start) was there before, [start, start + count) is written by this step's kernels. Nobody
    else can see the new slots: they lie in pages with a single holder, or above `frozen` in a
    page whose appender this sequence is. So `undo` has no bytes to restore.
    """

    def __init__(
        self, pool: PagePool, layout: AttentionLayout, rows: TableRows,
        parts: Sequence[Sequence[Wanted[Table]]], passed: Callable[[Table], None] | None,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._layout = layout
        self._rows = rows
        self._passed = passed
        growths, need = plan_growth(pool, parts[0] if len(parts) == 1 else _totals(parts))
        self._fresh = ReservedPages(pool, need) if need else None  # most steps need none
        self.reserved = () if self._fresh is None else (self._fresh,)
        self._growths: list[Growth] = []
        self._originals: dict[int, int] = {}  # shared pages whose copies took their places
        # What was planned for a single micro-batch serves as its plan.
        self._planned = growths if len(parts) == 1 else None

    def apply(self, part: Sequence[Wanted[Table]], new: NewTokens, work: PageWork) -> PageView:
        growths = self._planned
        if growths is None:
            growths = plan_growth(self._pool, part)[0]
        self._growths, self._planned = growths, None
        for seq, table, _, count, n_new, copies in growths:
            if copies:
                self._copy_last(seq, table, work)
            if n_new and self._fresh:
                table.add_pages(self._fresh.take(n_new))
            table.extend(count)
        return self._view(growths, new)

    def _copy_last(self, seq: int, table: Table, work: PageWork) -> None:
        """A copy takes the place of a shared page that is to be written (copy-on-write)."""
        assert self._fresh is not None
        original, page = table.last_page, int(self._fresh.take(1)[0])
        work.copy(self._pool.name, original, page)
        table.replace_page(table.n_pages - 1, page)
        self._fresh.originals.append(original)
        self._originals[seq] = original

    def _view(self, growths: list[Growth], new: NewTokens) -> PageView:
        """What kernels see; the tables include the new tokens as their last slots."""
        size = self._layout.page_tokens
        tables: list[Table] = []
        lengths: list[int] = []
        firsts: list[int] = []
        ends: list[int] = []
        plain = True
        for growth in growths:
            table = growth[1]
            length = table.length
            tables.append(table)
            lengths.append(length)
            firsts.append(table.first)
            ends.append(table.last_page * size + (length - 1) % size)
            plain &= table.position_buffer is None
        pages = self._rows.show(tables)
        if new.ahead is None:
            slots: Int32 = np.array(ends, np.int32)
        elif len(tables) == 1:
            start, count = growths[0][2:4]
            first = start // size
            own = pages[0, first : tables[0].n_pages].reshape(-1, 1)
            whole: Int32 = np.add(own * size, np.arange(size, dtype=np.int32))
            slots = whole.reshape(-1)[start - first * size :][:count]
        else:
            starts = np.array([growth[2] for growth in growths], np.int32)
            slot = starts[new.rows] + new.ahead
            slots = pages[new.rows, slot // size] * size + slot % size
        return PageView(
            self._layout, self._layout.page_bytes, size, pages, np.array(firsts, np.int32),
            np.array(lengths, np.int32), slots, None if plain else _slot_positions(tables),
        )  # fmt: skip

    def keep(self, accepted: Mapping[int, int]) -> None:
        for growth in self._growths:
            kept = accepted[growth[0]]
            if kept < growth[3]:
                self._shrink(growth, kept)
            if kept and self._passed is not None:
                self._passed(growth[1])
        self._growths = []
        if self._originals and self._fresh:
            self._originals = {}
            self._fresh.drop_originals()

    def undo(self) -> None:
        for growth in self._growths:
            self._shrink(growth, 0)
        self._growths = []

    def close(self) -> None:
        if self._fresh is not None:
            self._fresh.give_back()

    def _shrink(self, growth: Growth, kept: int) -> None:
        """Keeps the first `kept` new slots; with none kept, everything is as it was."""
        seq, table, start = growth[:3]
        dropped = table.truncate(start + kept)
        if len(dropped):
            self._pool.release(dropped)
        if kept == 0 and seq in self._originals and self._fresh:
            copy, original = table.last_page, self._originals.pop(seq)
            table.replace_page(table.n_pages - 1, original)
            self._fresh.originals.remove(original)
            self._pool.release_one(copy)


def _slot_positions(tables: list[Table]) -> Int32:
    """Position by slot, -1 for none."""
    matrix = np.full((len(tables), max(t.length for t in tables)), HOLE, np.int32)
    for row, table in zip(matrix, tables, strict=True):
        row[: table.length] = table.position_array()
    return matrix


def _totals(parts: Sequence[Sequence[Wanted[Table]]]) -> Iterable[Wanted[Table]]:
    """How many tokens each sequence gets in all micro-batches."""
    whole: dict[int, Wanted[Table]] = {}
    for part in parts:
        for seq, table, count in part:
            whole[seq] = (seq, table, count + whole.get(seq, (0, table, 0))[2])
    return whole.values()
