"""Recurrent layers: a state that has seen the past, and a log of what came since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from quire.devices.device import Device, GroupKernels
from quire.errors import BudgetError, RequestError
from quire.memory.groups.group import Change, Group, Holding, Wanted
from quire.memory.groups.layout import Int32
from quire.memory.groups.state_append import StateAppend
from quire.memory.groups.state_layout import StateLayout
from quire.memory.groups.state_pools import StatePools
from quire.memory.groups.state_table import StateTable, audit_state
from quire.memory.groups.views import StateView
from quire.memory.pages.demand import Demand
from quire.memory.pages.pool import PagePool
from quire.memory.stats import GroupStats, pool_stats

_MAX_PAGES = 2**31 - 1  # kernels number pages with int32


class RecurrentGroup(Group[StateTable]):
    """A state page at some position and a log of raw inputs after it, for each sequence.

    New tokens are appended to the log; when they do not fit, the log is folded into a fresh state
    page first. So a draft is verified and kept in part by moving the log's end. More tokens than
    a log holds (a prompt) are scanned into a fresh state page, all but the last, which go into
    the log: these can be taken back. Where a log is folded is a matter of what fits, or, on
    devices that say so, of positions alone (`choose_at_positions`).

    Positions cannot move: they count the tokens, and a state cannot tell one from the others.
    """

    layout: StateLayout
    can_shift = False

    def __init__(
        self, layout: StateLayout, device: Device, kernels: GroupKernels, poison: bool = False
    ) -> None:
        self.layout = layout
        self.device = device
        self.room_for_draft = layout.log_tokens  # where they do not fit, the log is folded first
        name = layout.spec.name
        self.states = _pool(f"{name} state", layout.state_page_bytes, device, poison)
        self.logs = _pool(f"{name} log", layout.log_page_bytes, device, poison)
        self.pools = (self.states, self.logs)
        device.bind(name, layout, kernels, (self.states.name, self.logs.name))
        at_positions = device.ops.folds_at_positions
        self._pools = StatePools(layout, self.states, self.logs, at_positions)

    # -- tables and their holders ---------------------------------------------------------------

    def empty(self) -> StateTable:
        return StateTable()

    def share(self, table: StateTable, seq: int) -> None:
        if table.state >= 0:
            self.states.share_one(table.state, 1, appender=seq)
        if table.log >= 0:
            self.logs.share_one(table.log, table.log_length, appender=seq)

    def let_go(self, table: StateTable) -> None:
        if table.state >= 0:
            self.states.release_one(table.state)
        if table.log >= 0:
            self.logs.release_one(table.log)

    def held_pages(self, pool: PagePool, table: StateTable) -> Holding:
        if pool is self.states:
            return table.state_pages, np.ones_like(table.state_pages)
        return table.log_pages, np.full_like(table.log_pages, table.log_length)

    def repaged(self, table: StateTable, pages: Sequence[Int32]) -> StateTable:
        state, log = (int(ids[0]) if len(ids) else -1 for ids in pages)
        return StateTable(state, table.position, log, table.log_length)

    def faults(self, table: StateTable) -> list[str]:
        return audit_state(table, self.layout.log_tokens)

    # -- growing --------------------------------------------------------------------------------

    def most_pages(self, n_seqs: int, n_tokens: int) -> Demand:
        logs = 3 if self._pools.at_positions else 2  # a shared log is copied, then followed
        return [(self.states, 2 * n_seqs), (self.logs, logs * n_seqs)]

    def least_pages(self, n_tokens: int) -> Demand:
        return [(self.states, 1), (self.logs, 0)]

    def demand(self, wanted: Sequence[Wanted[StateTable]]) -> Demand:
        states, logs = self._pools.need_of_all([wanted])
        return [(self.states, states), (self.logs, logs)]

    def append(self, parts: Sequence[Sequence[Wanted[StateTable]]]) -> StateAppend:
        return StateAppend(self._pools, parts)

    def full_view(self) -> StateView:
        page: Int32 = np.zeros(1, np.int32)
        layout, length = self.layout, page + self.layout.log_tokens
        sizes = layout.state_page_bytes, layout.log_page_bytes, layout.log_stride
        rest = page - 1, page, page - 1, length
        return StateView(layout, *sizes, page, page + 1, page, length, *rest)

    def grow(self) -> None:
        for pool in self.pools:
            pool.grow(min(self.device.budget.limit // pool.page_bytes, _MAX_PAGES))

    def trim(self, n_seqs: int) -> None:
        # A state takes long to give back and to get again, and one in `log_tokens` steps of a
        # sequence folds: as many pages as the next step is likely to want stay.
        likely = 1 + n_seqs // self.layout.log_tokens
        for pool in self.pools:
            keep = likely if pool.used else 0
            if pool.commitment.count > pool.used + keep:
                pool.trim(keep)

    # -- cutting and joining --------------------------------------------------------------------

    def can_remove(self, table: StateTable, p0: int, p1: int) -> bool:
        p0, end = max(p0, 0), table.next_position
        if p0 >= end or 0 <= p1 <= p0:
            return True  # there is nothing to remove
        return (p0 == 0 or p0 >= table.position) and (p1 < 0 or p1 >= end)

    def remove(self, table: StateTable, p0: int, p1: int) -> None:
        p0 = max(p0, 0)
        if p0 >= table.next_position or 0 <= p1 <= p0:
            return
        rest = _cut(table, p0)
        if rest.state != table.state:
            self.states.release_one(table.state)
        if rest.log != table.log:
            self.logs.release_one(table.log)
        table.become(rest)

    def part(self, source: StateTable, target: StateTable, p0: int, p1: int) -> StateTable:
        p0, end = max(p0, 0), source.next_position
        p1 = end if p1 < 0 else min(p1, end)
        if p0 >= p1:
            return self.empty()
        if target.length:
            raise RequestError(
                f"the sequence to copy to holds {target.length} tokens, and the states of two "
                "sequences cannot be joined; empty it with seq_rm"
            )
        if p0 > 0 or p1 < source.position:
            raise RequestError(
                f"positions {p0} to {p1} cannot be taken out of a state that has seen all before "
                f"{source.position}; copy from 0 to {source.position} … {end}"
            )
        return _cut(source, p1)

    def join(self, target: StateTable, part: StateTable, seq: int) -> None:
        assert part.length == 0, "states cannot be joined"

    def shifted(self, table: StateTable, p0: int, p1: int, change: Change) -> NoReturn:
        raise RequestError(
            f"positions of group {self.name!r} cannot move: a recurrent state has seen its tokens "
            "in order; remove the tokens and compute them again"
        )

    def shift(self, table: StateTable, shifted: object) -> None:
        raise AssertionError("`shifted` refuses it")

    def first_position(self, table: StateTable) -> int:
        """The state stands for its last token; those before cannot be returned to."""
        return max(table.position - 1, 0)

    # -- figures --------------------------------------------------------------------------------

    def stats(
        self, tables: Sequence[StateTable], parked: Mapping[str, Sequence[Holding]]
    ) -> dict[str, GroupStats]:
        """Figures by pool; in that of the states, a token is a state."""
        spec = self.layout.spec
        n = len(spec.layers)
        sizes = {
            self.states: (1, n * spec.state_bytes),
            self.logs: (spec.log_tokens, n * spec.log_bytes),
        }
        figures: dict[str, GroupStats] = {}
        for pool, (page_tokens, token_bytes) in sizes.items():
            held = [self.held_pages(pool, table) for table in tables] + [*parked[pool.name]]
            seen: dict[int, int] = {}
            for pages, slots in held:
                for page, count in zip(pages.tolist(), slots.tolist(), strict=True):
                    seen[page] = max(seen.get(page, 0), count)
            unshared = sum(len(pages) for pages, _ in held)
            figures[pool.name] = pool_stats(
                pool, page_tokens, token_bytes, sum(seen.values()), unshared
            )
        return figures


def _cut(table: StateTable, end: int) -> StateTable:
    """The table up to a position that is 0 or in its log; nobody's references are counted."""
    length = end - table.position
    if end == 0:
        return StateTable()
    return StateTable(table.state, table.position, table.log if length else -1, length)


def _pool(name: str, page_bytes: int, device: Device, poison: bool) -> PagePool:
    budget = device.budget
    limit = budget.limit - budget.limit % device.granularity
    pages, most = (min(size // page_bytes, _MAX_PAGES) for size in (limit, device.capacity))
    if pages < 1:
        raise BudgetError(
            f"one page of {name} takes {page_bytes:,} bytes, and the budget is {budget.limit:,}; "
            "raise memory_budget"
        )
    return PagePool(name, page_bytes, pages, device, poison=poison, most_pages=most)
