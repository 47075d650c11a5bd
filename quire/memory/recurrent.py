"""Recurrent layers: a state that has seen the past, and a log of what came since."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.errors import BudgetError, RequestError
from quire.memory.append import SetAside
from quire.memory.backing import OS_PAGE
from quire.memory.budget import Budget
from quire.memory.figures import pool_stats
from quire.memory.interface import Appends, GroupStats, MemoryContext, MicroBatch, SeqTokens
from quire.memory.layout import Int32
from quire.memory.lease import FullContext, IdleContext
from quire.memory.pool import PagePool
from quire.memory.sequences import SequenceMemory, check_range
from quire.memory.state_append import StateAppends, StatePools
from quire.memory.state_layout import Fold, StateLayout, StateView
from quire.memory.state_table import StateTable, audit_state

_MAX_PAGES = 2**31 - 1  # kernels number pages with int32


class RecurrentMemory(SequenceMemory[StateTable]):
    """A state page at some position and a log of raw inputs after it, for each sequence.

    New tokens are appended to the log; when they do not fit, the log is folded into a fresh state
    page first. So a draft is verified and kept in part by moving the log's end. More tokens than
    a log holds (a prompt) are scanned into a fresh state page, all but the last, which go into
    the log: these can be taken back.

    Positions cannot move: they count the tokens, and a state cannot tell one from the others.
    """

    layout: StateLayout
    can_shift = False

    def __init__(
        self, layout: StateLayout, budget: Budget, fold: Fold, poison: bool = False
    ) -> None:
        self.layout = layout
        name = layout.spec.name
        self.states = _pool(f"{name} state", layout.state_page_bytes, budget, poison)
        self.logs = _pool(f"{name} log", layout.log_page_bytes, budget, poison)
        super().__init__((self.states, self.logs))
        self._pools = StatePools(layout, self.states, self.logs, fold)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.layout.layers

    # -- steps ----------------------------------------------------------------------------------

    def _demand(self, counts: Sequence[tuple[int, int]]) -> list[tuple[PagePool, int]]:
        needs = [
            self._pools.need(seq, self._tables.get(seq, self._empty()), [count])
            for seq, count in counts
        ]
        return [
            (self.states, sum(states for states, _ in needs)),
            (self.logs, sum(logs for _, logs in needs)),
        ]

    def _most_growth(self, table: StateTable, count: int) -> list[tuple[PagePool, int]]:
        return [(self.states, 1), (self.logs, 1)]

    def _repaged(self, table: StateTable, pages: list[Int32]) -> StateTable:
        states, logs = (int(ids[0]) if len(ids) else -1 for ids in pages)
        return StateTable(states, table.position, logs, table.log_length)

    def room_for_draft(self, seq: int) -> int:
        return self.layout.log_tokens  # where they do not fit, the log is folded first

    def _appends(
        self, parts: Sequence[Sequence[SeqTokens]], ended: Callable[[], None]
    ) -> tuple[Appends, tuple[SetAside, ...]]:
        appends = StateAppends(self._pools, self._tables, parts, ended)
        return appends, (appends.states, appends.logs)

    def init_full(self) -> MemoryContext:
        none: Int32 = np.empty(0, np.int32)
        page: Int32 = np.zeros(1, np.int32)
        view = StateView(
            self.states.address, self.logs.address, self.layout, page, page + 1, page,
            page + self.layout.log_tokens, page - 1, page,
        )  # fmt: skip
        return FullContext(MicroBatch(none, none, none, [0], {self.layout.spec.name: view}))

    def init_update(self, optimize: bool = False) -> MemoryContext:
        self.check_idle()
        return IdleContext()

    def _trim(self) -> None:
        # A state takes long to give back and to get again, and one in `log_tokens` steps of a
        # sequence folds: as many pages as the next step is likely to want stay.
        likely = 1 + len(self._tables) // self.layout.log_tokens
        for pool in self.pools:
            pool.trim(keep=likely if pool.used else 0)

    # -- sequences ------------------------------------------------------------------------------

    def _empty(self) -> StateTable:
        return StateTable()

    def _share(self, table: StateTable, seq: int) -> None:
        if table.state >= 0:
            self.states.share_one(table.state, 1, appender=seq)
        if table.log >= 0:
            self.logs.share_one(table.log, table.log_length, appender=seq)

    def _let_go(self, table: StateTable) -> None:
        if table.state >= 0:
            self.states.release_one(table.state)
        if table.log >= 0:
            self.logs.release_one(table.log)

    def _can_remove(self, table: StateTable, p0: int, p1: int) -> bool:
        p0, end = max(p0, 0), table.next_position
        if p0 >= end or 0 <= p1 <= p0:
            return True  # there is nothing to remove
        return (p0 == 0 or p0 >= table.position) and (p1 < 0 or p1 >= end)

    def _remove(self, table: StateTable, p0: int, p1: int) -> None:
        p0 = max(p0, 0)
        if p0 >= table.next_position or 0 <= p1 <= p0:
            return
        rest = _cut(table, p0)
        if rest.state != table.state:
            self.states.release_one(table.state)
        if rest.log != table.log:
            self.logs.release_one(table.log)
        table.become(rest)

    def _part(self, src: int, dst: int, p0: int, p1: int) -> StateTable:
        source, target = self._tables[src], self._tables.get(dst)
        p0, end = max(p0, 0), source.next_position
        p1 = end if p1 < 0 else min(p1, end)
        if p0 >= p1:
            return self._empty()
        if target is not None and target.length:
            raise RequestError(
                f"sequence {dst} holds {target.length} tokens, and the states of two sequences "
                "cannot be joined; empty it with seq_rm"
            )
        if p0 > 0 or p1 < source.position:
            raise RequestError(
                f"positions {p0} to {p1} of sequence {src} cannot be taken out of its state, which "
                f"has seen all before {source.position}; copy from 0 to {source.position} … {end}"
            )
        return _cut(source, p1)

    def _join(self, target: StateTable, part: StateTable, seq: int) -> None:
        assert part.length == 0, "states cannot be joined"

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.check_idle()
        self.check_add(seq, p0, p1, delta)

    def check_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        check_range(p0, p1)
        self.table(seq)
        raise RequestError(
            f"positions of group {self.layout.spec.name!r} cannot move: a recurrent state has seen "
            "its tokens in order; remove the tokens and compute them again"
        )

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self.check_idle()
        self.check_div(seq, p0, p1, divisor)

    def check_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self.check_add(seq, p0, p1, 0)

    def seq_pos_min(self, seq: int) -> int:
        """The state stands for its last token; those before cannot be returned to."""
        table = self._known(seq)
        if table is None or table.length == 0:
            return -1
        return max(table.position - 1, 0)

    # -- figures --------------------------------------------------------------------------------

    def stats(self) -> dict[str, GroupStats]:
        """Figures by pool; in that of the states, a token is a state."""
        spec = self.layout.spec
        n = len(spec.layers)
        return {
            self.states.name: self._pool_stats(self.states, 1, n * spec.state_bytes),
            self.logs.name: self._pool_stats(self.logs, spec.log_tokens, n * spec.log_bytes),
        }

    def _pool_stats(self, pool: PagePool, page_tokens: int, token_bytes: int) -> GroupStats:
        holdings = self._holdings(pool)
        seen: dict[int, int] = {}
        for pages, slots in holdings:
            for page, n in zip(pages.tolist(), slots.tolist(), strict=True):
                seen[page] = max(seen.get(page, 0), n)
        unshared = sum(len(pages) for pages, _ in holdings)
        return pool_stats(pool, page_tokens, token_bytes, sum(seen.values()), unshared)

    def _held_pages(self, pool: PagePool, table: StateTable) -> tuple[Int32, Int32]:
        if pool is self.states:
            return table.state_pages, np.ones_like(table.state_pages)
        return table.log_pages, np.full_like(table.log_pages, table.log_length)

    def _faults(self, table: StateTable) -> list[str]:
        return audit_state(table, self.layout.log_tokens)


def _cut(table: StateTable, end: int) -> StateTable:
    """The table up to a position that is 0 or in its log; nobody's references are counted."""
    length = end - table.position
    if end == 0:
        return StateTable()
    return StateTable(table.state, table.position, table.log if length else -1, length)


def _pool(name: str, page_bytes: int, budget: Budget, poison: bool) -> PagePool:
    pages = min(budget.limit // OS_PAGE * OS_PAGE // page_bytes, _MAX_PAGES)
    if pages < 1:
        raise BudgetError(
            f"one page of {name} takes {page_bytes:,} bytes, and the budget is {budget.limit:,}; "
            "raise memory_budget"
        )
    return PagePool(name, page_bytes, pages, budget, poison=poison)
