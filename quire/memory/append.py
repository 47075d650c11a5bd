"""Appending to tables: new slots at their ends, kept, cut back or undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quire.memory.batch import Views
from quire.memory.interface import Appends, MicroBatch, SeqTokens
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


class TableAppends(Appends):
    """New slots at the ends of tables.

    [0, start) was there before, [start, start + count) is written by this step's kernels. Nobody
    else can see the new slots: they lie in pages with a single holder, or above `frozen` in a
    page whose appender this sequence is. So `undo` has no bytes to restore.
    """

    def __init__(
        self, views: Views, tables: Mapping[int, Table], parts: Sequence[Sequence[SeqTokens]],
        kept: Callable[[Table], None], ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self._views = views
        self._tables = tables
        self._kept = kept
        self._ended = ended
        growths, need = self._plan(_totals(parts))
        self.aside = SetAside(views.pool, need)
        self._growths: list[Growth] = []
        # What was planned for a single micro-batch serves as its plan.
        self._planned = growths if len(parts) == 1 else None

    def _plan(self, counts: Iterable[tuple[int, int]]) -> tuple[list[Growth], int]:
        return plan_growth(self._views.pool, [(seq, self._tables[seq], n) for seq, n in counts])

    def apply(self, entries: Sequence[SeqTokens]) -> MicroBatch:
        if self._planned is None:
            self._planned = self._plan([(seq, len(tokens)) for seq, tokens in entries])[0]
        self._growths, self._planned = self._planned, None
        try:
            grow(self._growths, self.aside)
            return self._views.micro_batch(entries, [g.table for g in self._growths])
        except BaseException:
            self.undo()
            raise

    def check(self, accepted: Mapping[int, int]) -> None:
        """Any number can be kept."""

    def keep(self, accepted: Mapping[int, int]) -> None:
        for growth in self._growths:
            kept = accepted[growth.seq]
            if kept < growth.count:
                shrink(growth, kept, self.aside)
            if kept:
                self._kept(growth.table)
        self._growths = []
        self.aside.drop_originals()

    def undo(self) -> None:
        for growth in self._growths:
            shrink(growth, 0, self.aside)
        self._growths = []

    def close(self) -> None:
        self.aside.give_back()
        self._ended()


def _totals(parts: Sequence[Sequence[SeqTokens]]) -> Iterable[tuple[int, int]]:
    """How many tokens each sequence gets in all micro-batches."""
    if len(parts) == 1:
        return [(seq, len(tokens)) for seq, tokens in parts[0]]
    whole: dict[int, int] = {}
    for seq, tokens in chain.from_iterable(parts):
        whole[seq] = whole.get(seq, 0) + len(tokens)
    return whole.items()
