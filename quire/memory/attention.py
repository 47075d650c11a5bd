"""Full attention: every token stays, page by page, until somebody removes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.errors import BudgetError, RequestError
from quire.memory.append import SetAside, TableAppends, plan_growth
from quire.memory.audit import audit_table
from quire.memory.backing import OS_PAGE
from quire.memory.batch import Views
from quire.memory.budget import Budget
from quire.memory.figures import group_stats
from quire.memory.interface import Appends, GroupStats, MemoryContext, SeqTokens, Status
from quire.memory.layout import MAX_POSITION, AttentionLayout, Int32
from quire.memory.lease import FullContext
from quire.memory.pool import PagePool
from quire.memory.sequences import SequenceMemory, check_range
from quire.memory.table import HOLE, Mask, Table
from quire.memory.update import Move, Rotate, UpdateContext

Int64 = NDArray[np.int64]
Change = Callable[[Int64], Int64]
"""New positions from old ones."""

_MAX_SLOTS = 2**31 - 1  # kernels number slots with int32


class AttentionMemory(SequenceMemory[Table]):
    """Tables of pages, one per sequence, over one pool."""

    layout: AttentionLayout

    def __init__(
        self, layout: AttentionLayout, budget: Budget, max_tokens: int | None = None,
        demand_paged: bool = True, rotate: Rotate | None = None, move: Move | None = None,
        poison: bool = False,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.can_shift = rotate is not None
        name = layout.spec.name
        n_bytes = budget.limit if demand_paged else budget.free
        max_pages = _max_pages(layout, n_bytes, max_tokens)
        self.pool = PagePool(name, layout.page_bytes, max_pages, budget, demand_paged, poison)
        super().__init__((self.pool,))
        self._rotate = rotate
        self._move = move
        self._views = Views(layout, self.pool)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.layout.layers

    # -- steps ----------------------------------------------------------------------------------

    def _demand(self, counts: Sequence[tuple[int, int]]) -> list[tuple[PagePool, int]]:
        empty = self._empty()
        wanted = ((seq, self._tables.get(seq, empty), count) for seq, count in counts)
        return [(self.pool, plan_growth(self.pool, wanted)[1])]

    def _most_growth(self, table: Table, count: int) -> list[tuple[PagePool, int]]:
        return [(self.pool, self.layout.pages_for(table.length + count) - table.n_pages + 1)]

    def _repaged(self, table: Table, pages: list[Int32]) -> Table:
        twin = table.copy()
        for index, page in enumerate(pages[0].tolist()):
            twin.replace_page(index, page)
        return twin

    def room_for_draft(self, seq: int) -> int:
        return MAX_POSITION

    def _appends(
        self, parts: Sequence[Sequence[SeqTokens]], ended: Callable[[], None]
    ) -> tuple[Appends, tuple[SetAside, ...]]:
        appends = TableAppends(self._views, self._tables, parts, self._kept, ended)
        return appends, (appends.aside,)

    def _check_ready(self, seq: int, table: Table) -> None:
        if table.pending is not None:
            raise RequestError(f"positions of sequence {seq} moved; apply init_update() first")

    def _kept(self, table: Table) -> None:
        """New tokens of a table are there to stay."""

    def init_full(self) -> MemoryContext:
        return FullContext(self._views.full())

    def init_update(self, optimize: bool = False) -> MemoryContext:
        self.check_idle()
        if optimize and self._move is None:
            raise RequestError("closing holes needs a kernel that moves tokens; none was given")
        context = UpdateContext(
            self.pool, self.layout, self._tables.values(), self._rotate,
            self._move if optimize else None, lambda: self._end([]),
        )  # fmt: skip
        self._open = (context.aside,)
        if context.status is not Status.SUCCESS:
            context.close()
        return context

    # -- sequences ------------------------------------------------------------------------------

    def _empty(self) -> Table:
        return Table(self.layout.page_tokens)

    def _share(self, table: Table, seq: int) -> None:
        if table.positions is not None or table.n_pages == 0:
            self.pool.share(table.pages, table.seen(), appender=seq)
            return
        slots, full = table.page_tokens, table.n_pages - 1  # all pages but the last are full
        self.pool.share_full(table.pages[:full], slots)
        self.pool.share_one(table.last_page, table.length - full * slots, appender=seq)

    def _let_go(self, table: Table) -> None:
        self.pool.release(table.pages)

    def _exchange(self, old: Table, new: Table, seq: int) -> None:
        same = old.same_pages(new)  # these stay, with one reference from each
        self.pool.release(old.pages[same:])
        self.pool.share(new.pages[same:], new.seen()[same:], appender=seq)

    def _can_remove(self, table: Table, p0: int, p1: int) -> bool:
        return True

    def _remove(self, table: Table, p0: int, p1: int) -> None:
        if table.positions is None and (p1 < 0 or p1 >= table.next_position):
            kept = max(p0 - table.first, 0)  # a tail: no slot has to be looked at
            dropped = table.truncate(kept) if kept < table.length else None
        else:
            inside = table.within(p0, p1)
            dropped = table.cut(inside) if inside.any() else None
        if dropped is not None and len(dropped):
            self.pool.release(dropped)

    def _part(self, src: int, dst: int, p0: int, p1: int) -> Table:
        part = self._tables[src].copy()
        if p0 > 0 or p1 >= 0:
            part.cut(~part.within(p0, p1))
        target = self._tables.get(dst)
        if target is not None and target.length and part.length:
            _check_disjoint(dst, target, part)
        return part

    def _join(self, target: Table, part: Table, seq: int) -> None:
        if part.length == 0:
            return
        known = np.isin(part.pages, target.pages)
        self.pool.share(part.pages[~known], part.seen()[~known], appender=seq)
        self.pool.freeze(part.pages[known], part.seen()[known])
        target.join(part)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._shift(seq, p0, p1, lambda positions: positions + delta)

    def check_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._moved(seq, p0, p1, lambda positions: positions + delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        _check_divisor(divisor)
        self._shift(seq, p0, p1, lambda positions: positions // divisor)

    def check_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        _check_divisor(divisor)
        self._moved(seq, p0, p1, lambda positions: positions // divisor)

    def _shift(self, seq: int, p0: int, p1: int, change: Change) -> None:
        self.check_idle()
        inside, target = self._moved(seq, p0, p1, change)
        if inside.any():
            self._tables[seq].move(inside, target)

    def _moved(self, seq: int, p0: int, p1: int, change: Change) -> tuple[Mask, Int32]:
        """Which slots move, and the positions of all slots then; RequestError if they cannot."""
        check_range(p0, p1)
        if not self.can_shift:
            raise RequestError(
                f"positions of group {self.layout.spec.name!r} cannot move: the model gives no way "
                "to rotate K; remove the tokens and compute them again"
            )
        table = self.table(seq)
        inside = table.within(p0, p1)
        positions = table.position_array().astype(np.int64)
        target = np.where(inside, change(positions), positions)
        if inside.any():
            low, high = int(target[inside].min()), int(target[inside].max())
            if low < 0 or high > MAX_POSITION:
                raise RequestError(
                    f"positions of sequence {seq} would become {low} to {high}; they have to stay "
                    f"from 0 to {MAX_POSITION}"
                )
        return inside, target.astype(np.int32)

    def seq_pos_min(self, seq: int) -> int:
        table = self._known(seq)
        if table is None or table.length == 0:
            return -1
        positions = table.positions
        return table.first if positions is None else int(positions[positions != HOLE].min())

    # -- figures --------------------------------------------------------------------------------

    def stats(self) -> dict[str, GroupStats]:
        parked = self._kept_parked(self.pool)
        held = self._held_tables()
        return {self.layout.spec.name: group_stats(self.layout, self.pool, held, parked)}

    def _held_pages(self, pool: PagePool, table: Table) -> tuple[Int32, Int32]:
        return table.pages, table.seen()

    def _faults(self, table: Table) -> list[str]:
        return audit_table(table)


def _max_pages(layout: AttentionLayout, n_bytes: int, max_tokens: int | None) -> int:
    """Pages for the tokens asked for, or as many as the bytes can hold."""
    most = _MAX_SLOTS // layout.page_tokens
    if max_tokens is None:
        pages = min(n_bytes // OS_PAGE * OS_PAGE // layout.page_bytes, most)
    else:
        pages = layout.pages_for(max_tokens)
    if not 1 <= pages <= most:
        raise BudgetError(
            f"there is room for {pages} pages of group {layout.spec.name!r}, it has to be 1 to "
            f"{most}: a page of {layout.page_tokens} tokens takes {layout.page_bytes:,} bytes of "
            f"{n_bytes:,}, and the cap is {max_tokens} tokens; change memory_budget or "
            "kv_cache_tokens"
        )
    return pages


def _check_disjoint(dst: int, target: Table, part: Table) -> None:
    both = np.intersect1d(target.position_array(), part.position_array())
    both = both[both != HOLE]
    if len(both):
        raise RequestError(
            f"sequence {dst} holds {len(both)} of the positions to copy already, {both[0]} first; "
            "remove them with seq_rm"
        )
    if target.clashes(part):
        raise RequestError(
            f"sequence {dst} holds tokens to be copied already, moved to other positions; apply "
            "init_update() first"
        )


def _check_divisor(divisor: int) -> None:
    if divisor < 1:
        raise RequestError(f"positions can be divided by 1 or more, not by {divisor}")
