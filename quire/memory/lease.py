"""Appending: new slots at the end of tables, kept, cut back or undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

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
    """Pages held by a lease or context: fresh ones it will need, and originals it has replaced.

    An original keeps its reference until the end. Two sequences of one step may both copy the
    same page, and both must find it where it was if the step is undone.
    """

    __slots__ = ("originals", "pages", "pool")

    def __init__(self, pool: PagePool, n: int) -> None:
        self.pool = pool
        self.pages = pool.allocate(n)
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

    def give_back(self) -> None:
        """Frees everything that nobody took."""
        self.drop_originals()
        if len(self.pages):
            self.pool.release(self.take(len(self.pages)))


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


def grow(growths: list[Growth], aside: SetAside) -> None:
    """Does it, with pages that were set aside. Interrupted anywhere, `shrink` undoes it."""
    for growth in growths:
        table = growth.table
        if growth.copies:
            original, page = table.last_page, int(aside.pages[0])
            aside.pool.copy_page(original, page)
            aside.take(1)
            table.replace_page(table.n_pages - 1, page)
            aside.originals.append(original)
            growth.original = original
        if growth.n_new:
            table.add_pages(aside.take(growth.n_new))
        table.extend(growth.count)


def shrink(growth: Growth, kept: int, aside: SetAside) -> None:
    """Keeps the first `kept` new slots; with none kept, everything is as it was."""
    table, pool = growth.table, aside.pool
    dropped = table.truncate(growth.start + kept)
    if len(dropped):
        pool.release(dropped)
    if kept == 0 and growth.original >= 0:
        copy = table.last_page
        table.replace_page(table.n_pages - 1, growth.original)
        aside.originals.remove(growth.original)
        growth.original = -1
        pool.release_one(copy)


class AppendLease(Lease):
    """One step's new slots.

    [0, start) was there before, [start, start + count) is written by this step's kernels. Nobody
    else can see the new slots: they lie in pages with a single holder, or above `frozen` in a
    page whose appender this sequence is. So `abort` has no bytes to restore.
    """

    def __init__(self, growths: list[Growth], aside: SetAside, ended: Callable[[], None]) -> None:
        self._growths = growths
        self._aside = aside
        self._ended = ended
        self._open = True

    def apply(self, views: Views, entries: Sequence[SeqTokens]) -> None:
        """Makes the new slots and shows them in `ubatch`; an exception ends the lease."""
        try:
            grow(self._growths, self._aside)
            self.ubatch = views.micro_batch(entries, [g.table for g in self._growths])
        except BaseException:
            self.abort()
            raise

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
                shrink(growth, kept, self._aside)
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
            grow(growths, self.aside)
        except BaseException:
            self.status = Status.FAILED_COMPUTE
            for growth in growths:
                shrink(growth, 0, self.aside)
            self.close()
            raise
        self.aside.drop_originals()
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
