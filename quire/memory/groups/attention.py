"""Full attention: every token stays, page by page, until somebody removes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.devices.device import Device, GroupKernels
from quire.errors import BudgetError, RequestError
from quire.memory.audit import audit_table
from quire.memory.groups.group import Change, Group, GroupUpdate, Holding, Wanted
from quire.memory.groups.layout import MAX_POSITION, AttentionLayout, Int32
from quire.memory.groups.table import HOLE, Mask, Table
from quire.memory.groups.table_append import TableAppend, TableRows, plan_growth
from quire.memory.groups.update import TableUpdate, has_holes, update_pages
from quire.memory.groups.views import PageView
from quire.memory.pages.demand import Demand
from quire.memory.pages.pool import PagePool
from quire.memory.stats import GroupStats, table_stats

_MAX_SLOTS = 2**31 - 1  # kernels number slots with int32


@dataclass(frozen=True)
class Shifted:
    """What moving positions comes to: which slots move, the positions of all, what is lost then."""

    inside: Mask
    target: Int32
    lost: range = range(0)


class AttentionGroup(Group[Table]):
    """Tables of pages over one pool."""

    layout: AttentionLayout
    room_for_draft = MAX_POSITION

    def __init__(
        self, layout: AttentionLayout, device: Device, kernels: GroupKernels | None = None,
        max_tokens: int | None = None, demand_paged: bool = True, poison: bool = False,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.device = device
        kernels = kernels or GroupKernels()
        self.can_shift = kernels.rotate is not None
        self._can_move = kernels.move is not None
        budget = device.budget
        n_bytes = budget.limit if demand_paged else budget.free
        n_bytes -= n_bytes % device.granularity
        max_pages = _max_pages(layout, n_bytes, max_tokens)
        name = layout.spec.name
        self._grows = demand_paged and max_tokens is None
        most = _most_pages(layout, device.capacity) if self._grows else max_pages
        self.pool = PagePool(name, layout.page_bytes, max_pages, device, demand_paged, poison, most)
        self.pools = (self.pool,)
        device.bind(name, layout, kernels, (self.pool.name,))
        self._rows = TableRows()

    # -- tables and their holders ---------------------------------------------------------------

    def empty(self) -> Table:
        return Table(self.layout.page_tokens)

    def share(self, table: Table, seq: int) -> None:
        if table.position_buffer is not None or table.n_pages == 0:
            self.pool.share(table.pages, table.seen(), appender=seq)
            return
        slots, full = table.page_tokens, table.n_pages - 1  # all pages but the last are full
        self.pool.share_full(table.pages[:full], slots)
        self.pool.share_one(table.last_page, table.length - full * slots, appender=seq)

    def let_go(self, table: Table) -> None:
        self.pool.release(table.pages)

    def exchange(self, old: Table, new: Table, seq: int) -> None:
        same = old.same_pages(new)  # these stay, with one reference from each
        self.pool.release(old.pages[same:])
        self.pool.share(new.pages[same:], new.seen()[same:], appender=seq)

    def held_pages(self, pool: PagePool, table: Table) -> Holding:
        return table.pages, table.seen()

    def repaged(self, table: Table, pages: Sequence[Int32]) -> Table:
        twin = table.copy()
        twin.replace_pages(pages[0])
        return twin

    def faults(self, table: Table) -> list[str]:
        return audit_table(table)

    # -- growing --------------------------------------------------------------------------------

    def most_pages(self, n_seqs: int, n_tokens: int) -> Demand:
        return [(self.pool, n_tokens // self.layout.page_tokens + 2 * n_seqs)]

    def least_pages(self, n_tokens: int) -> Demand:
        return [(self.pool, self.layout.pages_for(n_tokens))]

    def demand(self, wanted: Sequence[Wanted[Table]]) -> Demand:
        return [(self.pool, plan_growth(self.pool, wanted)[1])]

    def append(self, parts: Sequence[Sequence[Wanted[Table]]]) -> TableAppend:
        return TableAppend(self.pool, self.layout, self._rows, parts, None)

    def check_ready(self, seq: int, table: Table) -> None:
        if table.pending is not None:
            raise RequestError(f"positions of sequence {seq} moved; apply init_update() first")

    def full_view(self) -> PageView:
        none: Int32 = np.empty(0, np.int32)
        n_pages = self.pool.max_pages
        length = np.array([n_pages * self.layout.page_tokens], np.int32)
        pages = np.arange(n_pages, dtype=np.int32)[None]
        sizes = self.layout.page_bytes, self.layout.page_tokens
        return PageView(self.layout, *sizes, pages, np.zeros(1, np.int32), length, none, None)

    def update(self, tables: Sequence[Table], optimize: bool) -> GroupUpdate | None:
        waiting = self._waiting(tables, optimize)
        return TableUpdate(self.pool, waiting, optimize) if waiting else None

    def update_demand(
        self, tables: Sequence[Table], optimize: bool, gone: Table | None
    ) -> list[tuple[PagePool, int]]:
        pages = set() if gone is None else set(gone.pages.tolist())
        need = update_pages(self.pool, self._waiting(tables, optimize), optimize, pages)
        freed = 0 if gone is None else int((self.pool.refs[gone.pages] == 1).sum())
        return [(self.pool, max(need - freed, 0))]

    def _waiting(self, tables: Sequence[Table], optimize: bool) -> list[Table]:
        if optimize and not self._can_move:
            raise RequestError("closing holes needs a kernel that moves tokens; none was given")
        return [t for t in tables if t.pending is not None or (optimize and has_holes(t))]

    def grow(self) -> None:
        if self._grows:
            self.pool.grow(_most_pages(self.layout, self.device.budget.limit))

    def trim(self, n_seqs: int) -> None:
        idle = self.pool.commitment.count - self.pool.used
        if idle > 0 and idle > (keep := self.pool.spare):
            self.pool.trim(keep)

    # -- cutting and joining --------------------------------------------------------------------

    def can_remove(self, table: Table, p0: int, p1: int) -> bool:
        return True

    def remove(self, table: Table, p0: int, p1: int) -> None:
        if table.position_buffer is None and (p1 < 0 or p1 >= table.next_position):
            kept = max(p0 - table.first, 0)  # a tail: no slot has to be looked at
            dropped = table.truncate(kept) if kept < table.length else None
        else:
            inside = table.within(p0, p1)
            dropped = table.cut(inside) if inside.any() else None
        if dropped is not None and len(dropped):
            self.pool.release(dropped)

    def part(self, source: Table, target: Table, p0: int, p1: int) -> Table:
        part = source.copy()
        if p0 > 0 or p1 >= 0:
            part.cut(~part.within(p0, p1))
        if target.length and part.length:
            _check_disjoint(target, part)
        return part

    def join(self, target: Table, part: Table, seq: int) -> None:
        if part.length == 0:
            return
        known = np.isin(part.pages, target.pages)
        self.pool.share(part.pages[~known], part.seen()[~known], appender=seq)
        self.pool.freeze(part.pages[known], part.seen()[known])
        target.join(part)

    def shifted(self, table: Table, p0: int, p1: int, change: Change) -> Shifted:
        if not self.can_shift:
            raise RequestError(
                f"positions of group {self.name!r} cannot move: the model gives no way to rotate "
                "K; remove the tokens and compute them again"
            )
        inside = table.within(p0, p1)
        positions = table.position_array().astype(np.int64)
        target = np.where(inside, change(positions), positions)
        if inside.any():
            low, high = int(target[inside].min()), int(target[inside].max())
            if low < 0 or high > MAX_POSITION:
                raise RequestError(
                    f"positions would become {low} to {high}; they have to stay from 0 to "
                    f"{MAX_POSITION}"
                )
        return Shifted(inside, target.astype(np.int32))

    def shift(self, table: Table, shifted: Shifted) -> None:
        if shifted.inside.any():
            table.move(shifted.inside, shifted.target)

    def first_position(self, table: Table) -> int:
        positions = table.positions
        return table.first if positions is None else int(positions[positions != HOLE].min())

    # -- figures --------------------------------------------------------------------------------

    def stats(
        self, tables: Sequence[Table], parked: Mapping[str, Sequence[Holding]]
    ) -> dict[str, GroupStats]:
        figures = table_stats(self.layout, self.pool, tables, parked[self.pool.name])
        return {self.pool.name: figures}


def _most_pages(layout: AttentionLayout, n_bytes: int) -> int:
    """Pages that bytes can hold and kernels can number."""
    return min(n_bytes // layout.page_bytes, _MAX_SLOTS // layout.page_tokens)


def _max_pages(layout: AttentionLayout, n_bytes: int, max_tokens: int | None) -> int:
    """Pages for the tokens asked for, or as many as the bytes can hold."""
    most = _MAX_SLOTS // layout.page_tokens
    pages = _most_pages(layout, n_bytes)
    if max_tokens is not None:
        pages = layout.pages_for(max_tokens)
    if not 1 <= pages <= most:
        raise BudgetError(
            f"there is room for {pages} pages of group {layout.spec.name!r}, it has to be 1 to "
            f"{most}: a page of {layout.page_tokens} tokens takes {layout.page_bytes:,} bytes of "
            f"{n_bytes:,}, and the cap is {max_tokens} tokens; change memory_budget or "
            "kv_cache_tokens"
        )
    return pages


def _check_disjoint(target: Table, part: Table) -> None:
    both = np.intersect1d(target.position_array(), part.position_array())
    both = both[both != HOLE]
    if len(both):
        raise RequestError(
            f"the sequence to copy to holds {len(both)} of the positions already, {both[0]} first; "
            "remove them with seq_rm"
        )
    if target.clashes(part):
        raise RequestError(
            "the sequence to copy to holds some of these tokens already, moved to other positions; "
            "apply init_update() first"
        )
