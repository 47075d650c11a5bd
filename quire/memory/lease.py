"""Appending: new slots at the end of tables, kept, cut back or undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quire.errors import OutOfMemory, RequestError
from quire.memory.batch import Views
from quire.memory.interface import Lease, MemoryContext, MicroBatch, SeqTokens, Status
from quire.memory.layout import Int32
from quire.memory.pool import PagePool
from quire.memory.table import Table


@dataclass(slots=True)
class Growth:
    """What one sequence gains, and what it takes to undo it."""

    seq: int
    table: Table
    start: int
    """Slots before."""
    count: int
    """New slots."""
    n_new: int
    """Pages needed behind the last one."""
    copies: bool
    """Whether the last page is shared and has to be copied before it is written."""
    original: int = -1
    """The shared page, once its copy took its place."""


class SetAside:
    """Pages taken from a pool for work that is about to be done."""

    __slots__ = ("_pool", "pages")

    def __init__(self, pool: PagePool, n: int) -> None:
        self._pool = pool
        self.pages = pool.allocate(n)

    def take(self, n: int) -> Int32:
        """The next n of them, which now belong to whoever asked."""
        taken, self.pages = self.pages[:n], self.pages[n:]
        return taken

    def give_back(self) -> None:
        """Frees those that nobody took."""
        if len(self.pages):
            self._pool.release(self.take(len(self.pages)))


def plan_growth(
    pool: PagePool, wanted: Iterable[tuple[int, Table, int]]
) -> tuple[list[Growth], int]:
    """How sequences grow by so many tokens each, and the number of pages that takes."""
    growths: list[Growth] = []
    need = 0
    for seq, table, count in wanted:
        start = table.length
        size = table.page_tokens
        n_new = -(-(start + count) // size) - table.n_pages
        slot = start % size
        copies = slot > 0 and not pool.may_append(table.last_page, slot, seq)
        need += n_new + copies
        growths.append(Growth(seq, table, start, count, n_new, copies))
    return growths, need


def grow(pool: PagePool, growths: list[Growth], aside: SetAside) -> None:
    """Does it, with pages that were set aside; after an exception everything is as it was."""
    try:
        for growth in growths:
            table = growth.table
            if growth.copies:
                original = table.last_page
                pool.copy_page(original, int(aside.pages[0]))
                table.replace_page(table.n_pages - 1, int(aside.take(1)[0]))
                growth.original = original
                pool.release_one(original)
            if growth.n_new:
                table.add_pages(aside.take(growth.n_new))
            table.extend(growth.count)
    except BaseException:
        for growth in growths:
            shrink(pool, growth, 0)
        raise


def shrink(pool: PagePool, growth: Growth, kept: int) -> None:
    """Keeps the first `kept` new slots; with none kept, everything is as it was."""
    table = growth.table
    dropped = table.truncate(growth.start + kept)
    if len(dropped):
        pool.release(dropped)
    if kept == 0 and growth.original >= 0:
        page = table.last_page
        pool.retain(np.array([growth.original], np.int32))
        table.replace_page(table.n_pages - 1, growth.original)
        pool.release_one(page)
        growth.original = -1


class AppendLease(Lease):
    """One step's new slots.

    [0, start) was there before, [start, start + count) is written by this step's kernels. Nobody
    else can see the new slots: they lie in pages with a single holder, or above `frozen` in a
    page whose appender this sequence is. So `abort` has no bytes to restore.
    """

    def __init__(self, pool: PagePool, growths: list[Growth], ended: Callable[[], None]) -> None:
        self._pool = pool
        self._growths = growths
        self._ended = ended
        self._open = True

    def commit(self, accepted: Mapping[int, int]) -> None:
        if not self._open:
            raise RequestError("a lease is committed once; this one has ended")
        for growth in self._growths:
            if not 0 <= accepted.get(growth.seq, -1) <= growth.count:
                raise RequestError(
                    f"commit needs 0 to {growth.count} tokens to keep for sequence {growth.seq}; "
                    f"it got {accepted.get(growth.seq, 'no entry')}"
                )
        if len(accepted) != len(self._growths):
            raise RequestError(
                f"commit names the sequences {sorted(accepted)}; the lease is of {self.seqs}"
            )
        self._end(accepted)

    def abort(self) -> None:
        if self._open:
            self._end({})

    def _end(self, accepted: Mapping[int, int]) -> None:
        self._open = False
        for growth in self._growths:
            kept = accepted.get(growth.seq, 0)
            if kept < growth.count:
                shrink(self._pool, growth, kept)
        self._ended()


class BatchContext(MemoryContext):
    """A batch in micro-batches; the pages of all of them are set aside from the start."""

    def __init__(
        self, views: Views, tables: dict[int, Table], parts: list[list[SeqTokens]],
        ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self._views = views
        self._pool = views.pool
        self._tables = tables
        self._parts = parts
        self._at = 0
        self._ubatch: MicroBatch | None = None
        self._ended: Callable[[], None] | None = ended
        self.status = Status.SUCCESS
        whole: dict[int, int] = {}
        for seq, tokens in chain.from_iterable(parts):
            whole[seq] = whole.get(seq, 0) + len(tokens)
        _, need = plan_growth(self._pool, [(s, tables[s], n) for s, n in whole.items()])
        try:
            self.aside = SetAside(self._pool, need)
        except OutOfMemory as error:
            self.status, self.error = Status.FAILED_PREPARE, error
            self.aside = SetAside(self._pool, 0)

    def _wanted(self, entries: Sequence[SeqTokens]) -> Iterable[tuple[int, Table, int]]:
        return ((seq, self._tables[seq], len(tokens)) for seq, tokens in entries)

    @property
    def ubatch(self) -> MicroBatch:
        if self._ubatch is None:
            raise RequestError("this micro-batch is not in memory yet; apply() puts it there")
        return self._ubatch

    def apply(self) -> None:
        if self.status.is_fail or self._at >= len(self._parts) or self._ubatch is not None:
            raise RequestError(f"there is nothing to apply: {self.error or 'next() comes first'}")
        part = self._parts[self._at]
        growths, _ = plan_growth(self._pool, self._wanted(part))
        try:
            grow(self._pool, growths, self.aside)
        except BaseException:
            self.status = Status.FAILED_COMPUTE
            self.close()
            raise
        self._ubatch = self._views.micro_batch(part, [g.table for g in growths])

    def next(self) -> bool:
        self._at += 1
        self._ubatch = None
        if self._at < len(self._parts) and not self.status.is_fail:
            return True
        self.close()
        return False

    def close(self) -> None:
        self._at = len(self._parts)
        self.aside.give_back()
        if self._ended is not None:
            ended, self._ended = self._ended, None
            ended()


class FullContext(MemoryContext):
    """Pretends that memory is full; changes nothing."""

    status = Status.SUCCESS

    def __init__(self, ubatch: MicroBatch) -> None:
        self._ubatch = ubatch

    @property
    def ubatch(self) -> MicroBatch:
        return self._ubatch

    def apply(self) -> None:
        """Nothing to do: the point is the sizes in `ubatch`."""

    def next(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing was set aside."""
