"""Full attention: every token stays, page by page, until somebody removes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from quire.errors import BudgetError, OutOfMemory, RequestError
from quire.memory.audit import AuditError, Holder, audit_pool, audit_table
from quire.memory.backing import OS_PAGE
from quire.memory.batch import Views, check_entries, split_batch
from quire.memory.budget import Budget
from quire.memory.checkpoint import Checkpoint, Checkpoints
from quire.memory.figures import breakdown, group_stats
from quire.memory.interface import GroupStats, Lease, Memory, MemoryContext, SeqTokens, Status
from quire.memory.layout import AttentionLayout
from quire.memory.lease import AppendLease, BatchContext, FullContext, SetAside, plan_growth
from quire.memory.pool import PagePool
from quire.memory.table import HOLE, Table
from quire.memory.update import Move, Rotate, UpdateContext

Int64 = NDArray[np.int64]

_MAX_SLOTS = 2**31 - 1  # kernels number slots and positions with int32
_MAX_POSITION = 2**31 - 2


class AttentionMemory(Memory):
    """Tables of pages, one per sequence, over one pool.

    One thing happens at a time: while a lease or a context is open, every other operation that
    would change memory is refused, so nothing can move under the kernels.
    """

    def __init__(
        self, layout: AttentionLayout, budget: Budget, max_tokens: int | None = None,
        demand_paged: bool = True, rotate: Rotate | None = None, move: Move | None = None,
        poison: bool = False,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.can_shift = rotate is not None
        self.checkpoints = Checkpoints()
        name = layout.spec.name
        n_bytes = budget.limit if demand_paged else budget.free
        max_pages = _max_pages(layout, n_bytes, max_tokens)
        self.pool = PagePool(name, layout.page_bytes, max_pages, budget, demand_paged, poison)
        self._rotate = rotate
        self._move = move
        self._tables: dict[int, Table] = {}
        self._views = Views(layout, self.pool)
        self._open: SetAside | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return self.layout.layers

    def table(self, seq: int) -> Table:
        """What a sequence holds; to read, not to change."""
        if seq not in self._tables:
            raise RequestError(f"there is no sequence {seq}; there are {sorted(self._tables)}")
        return self._tables[seq]

    # -- steps ----------------------------------------------------------------------------------

    def fits(self, counts: Iterable[tuple[int, int]]) -> bool:
        empty = Table(self.layout.page_tokens)
        wanted = ((seq, self._tables.get(seq, empty), count) for seq, count in counts)
        return self.pool.fits(plan_growth(self.pool, wanted)[1])

    def reserve(self, entries: Sequence[SeqTokens]) -> Lease:
        created = self._prepare(entries)
        tables = self._tables
        growths, need = plan_growth(
            self.pool, [(seq, tables[seq], len(tokens)) for seq, tokens in entries]
        )
        try:
            self._open = SetAside(self.pool, need)
        except OutOfMemory:
            self._end(created)
            raise
        lease = AppendLease(growths, self._open, lambda: self._end(created))
        lease.apply(self._views, entries)
        return lease

    def init_batch(
        self, batch: Sequence[SeqTokens], n_ubatch: int, embd_all: bool = False
    ) -> MemoryContext:
        parts = split_batch(batch, n_ubatch)
        created = self._prepare(batch)
        context = BatchContext(self._views, self._tables, parts, lambda: self._end(created))
        self._open = context.aside
        if context.status.is_fail:
            context.close()
        return context

    def init_full(self) -> MemoryContext:
        return FullContext(self._views.full())

    def init_update(self, optimize: bool = False) -> MemoryContext:
        self._check_idle()
        if optimize and self._move is None:
            raise RequestError("closing holes needs a kernel that moves tokens; none was given")
        context = UpdateContext(
            self.pool, self.layout, self._tables.values(), self._rotate,
            self._move if optimize else None, lambda: self._end([]),
        )  # fmt: skip
        self._open = context.aside
        if context.status is not Status.SUCCESS:
            context.close()
        return context

    def _prepare(self, entries: Sequence[SeqTokens]) -> list[int]:
        """Checks a batch and makes tables for sequences that have none; returns their ids."""
        self._check_idle()
        check_entries(entries)
        created = []
        for seq, _ in entries:
            table = self._tables.get(seq)
            if table is None:
                created.append(seq)
            elif table.pending is not None:
                raise RequestError(f"positions of sequence {seq} moved; apply init_update() first")
        for seq in created:
            self._tables[seq] = Table(self.layout.page_tokens)
        return created

    def _end(self, created: list[int]) -> None:
        """A lease or context is over: what it did not use goes back."""
        if self._open is not None:
            self._open.give_back()
            self._open = None
        for seq in created:
            if self._tables[seq].length == 0:
                del self._tables[seq]
        self.pool.trim()

    def _check_idle(self) -> None:
        if self._open is not None:
            raise RequestError("memory has an open lease or context; commit or close it first")

    # -- sequences ------------------------------------------------------------------------------

    def clear(self, data: bool) -> None:
        self._check_idle()
        for table in self._held_tables():
            self.pool.release(table.pages)
        self._tables.clear()
        self.checkpoints.by_name.clear()
        self.pool.trim()
        if data:
            self.pool.wipe()

    def seq_new(self) -> int:
        self._check_idle()
        seq = next(i for i in range(len(self._tables) + 1) if i not in self._tables)
        self._tables[seq] = Table(self.layout.page_tokens)
        return seq

    def seq_free(self, seq: int) -> None:
        if seq < 0:
            raise RequestError(f"sequence ids start at 0; {seq} cannot be freed")
        self.seq_rm(seq, -1, -1)
        self._tables.pop(seq, None)

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        self._check_idle()
        _check_range(p0, p1)
        tables = self._tables
        for table in tables.values() if seq < 0 else [tables[seq]] if seq in tables else []:
            self._remove(table, p0, p1)
        self.pool.trim()
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

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self._check_idle()
        _check_range(p0, p1)
        source = self.table(src)
        if dst < 0:
            raise RequestError(f"sequence ids start at 0; {dst} cannot be copied to")
        if src == dst:
            return
        part = source.copy()
        if p0 > 0 or p1 >= 0:
            part.cut(~source.within(p0, p1))
        target = self._tables.get(dst)
        if target is None or target.length == 0:
            self.pool.share(part.pages, part.seen(), appender=src)
            self._tables[dst] = part
        elif part.length:
            _check_disjoint(dst, target, part)
            known = np.isin(part.pages, target.pages)
            self.pool.share(part.pages[~known], part.seen()[~known], appender=src)
            self.pool.freeze(part.pages[known], part.seen()[known])
            target.join(part)

    def seq_keep(self, seq: int) -> None:
        self._check_idle()
        self.table(seq)
        for other, table in self._tables.items():
            if other != seq:
                self.pool.release(table.truncate(0))
        self.pool.trim()

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._shift(seq, p0, p1, lambda positions: positions + delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        if divisor < 1:
            raise RequestError(f"positions can be divided by 1 or more, not by {divisor}")
        self._shift(seq, p0, p1, lambda positions: positions // divisor)

    def _shift(self, seq: int, p0: int, p1: int, change: Callable[[Int64], Int64]) -> None:
        self._check_idle()
        _check_range(p0, p1)
        if not self.can_shift:
            raise RequestError(
                f"positions of group {self.layout.spec.name!r} cannot move: the model gives no way "
                "to rotate K; remove the tokens and compute them again"
            )
        table = self.table(seq)
        inside = table.within(p0, p1)
        if not inside.any():
            return
        target = change(table.position_array().astype(np.int64))
        low, high = int(target[inside].min()), int(target[inside].max())
        if low < 0 or high > _MAX_POSITION:
            raise RequestError(
                f"positions of sequence {seq} would become {low} to {high}; they have to stay from "
                f"0 to {_MAX_POSITION}"
            )
        table.move(inside, np.where(inside, target, 0).astype(np.int32))

    def seq_pos_min(self, seq: int) -> int:
        table = self._tables.get(seq)
        if table is None or table.length == 0:
            return -1
        positions = table.positions
        return table.first if positions is None else int(positions[positions != HOLE].min())

    def seq_pos_max(self, seq: int) -> int:
        table = self._tables.get(seq)
        return -1 if table is None else table.next_position - 1

    # -- checkpoints ----------------------------------------------------------------------------

    def checkpoint_supported(self) -> bool:
        return True

    def checkpoint_save(self, seq: int, name: str | None = None) -> str:
        self._check_idle()
        start = perf_counter_ns()
        table = self.table(seq)
        name = self.checkpoints.new_name(name)
        self.pool.share(table.pages, table.seen(), appender=seq)
        self.checkpoints.by_name[name] = Checkpoint(name, seq, table.copy())
        self.checkpoints.timings["save"].add(perf_counter_ns() - start)
        return name

    def checkpoint_restore(self, seq: int, name: str) -> None:
        self._check_idle()
        start = perf_counter_ns()
        saved = self.checkpoints.get(name).table
        if seq < 0:
            raise RequestError(f"sequence ids start at 0; nothing can be restored to {seq}")
        same = 0
        if seq in self._tables:
            current = self._tables[seq]
            same = current.same_pages(saved)  # these stay, with one reference from each
            self.pool.release(current.pages[same:])
        # The checkpoint never writes, so where it is alone the sequence becomes the appender.
        self.pool.share(saved.pages[same:], saved.seen()[same:], appender=seq)
        self._tables[seq] = saved.copy()
        self.pool.trim()
        self.checkpoints.timings["restore"].add(perf_counter_ns() - start)

    def checkpoint_delete(self, name: str) -> None:
        self._check_idle()
        start = perf_counter_ns()
        self.pool.release(self.checkpoints.get(name).table.pages)
        del self.checkpoints.by_name[name]
        self.pool.trim()
        self.checkpoints.timings["delete"].add(perf_counter_ns() - start)

    # -- figures --------------------------------------------------------------------------------

    def memory_breakdown(self) -> dict[str, dict[str, int]]:
        aside = [] if self._open is None else self._open.all_pages
        parts = breakdown(self.pool, self._tables.values(), self.checkpoints.by_name, aside)
        name = self.layout.spec.name
        return {"cpu": {f"{name}: {part}": size for part, size in parts.items()}}

    def stats(self) -> dict[str, GroupStats]:
        return {self.layout.spec.name: group_stats(self.layout, self.pool, self._held_tables())}

    def audit(self) -> None:
        holders = [
            Holder(f"sequence {seq}", seq, table.pages, table.seen())
            for seq, table in self._tables.items()
        ]
        holders += [
            Holder(f"checkpoint {c.name!r}", -1, c.table.pages, c.table.seen())
            for c in self.checkpoints.by_name.values()
        ]
        if self._open is not None:
            pages = np.array(self._open.all_pages, np.int32)
            holders.append(Holder("what is set aside", -1, pages, np.zeros_like(pages)))
        wrong = audit_pool(self.pool, holders)
        for table in self._held_tables():
            wrong += audit_table(table)
        if wrong:
            raise AuditError("; ".join(wrong))

    def close(self) -> None:
        self.clear(data=False)
        self.pool.close()

    def _held_tables(self) -> list[Table]:
        return [*self._tables.values(), *(c.table for c in self.checkpoints.by_name.values())]


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


def _check_range(p0: int, p1: int) -> None:
    if 0 <= p1 < p0:
        raise RequestError(f"positions from {p0} to {p1} are no range; the end comes first")


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
