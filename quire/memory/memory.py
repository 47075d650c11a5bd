"""Memory: what sequences hold in every group of a model's layers.

The method names are those of llama.cpp's `llama_memory_i`. Ranges of positions are half open;
a negative start means 0 and a negative end means "to the end".

Memory keeps books: tables of page ids, and who holds which page. Bytes are moved by devices, which
are told by `PageWork`. Whatever only some groups might refuse is asked of all of them before any
changes, so a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, BinaryIO

import numpy as np

from quire.devices.device import Device, PageWork
from quire.errors import RequestError
from quire.memory import audit, stats
from quire.memory.batch import MicroBatch, SeqTokens
from quire.memory.books import Tables
from quire.memory.contexts import BatchContext, FullContext, MemoryContext, UpdateContext
from quire.memory.groups.group import Change, Holding
from quire.memory.groups.layout import Int32
from quire.memory.keeping import Keeping
from quire.memory.pages.demand import Demand, fit_together
from quire.memory.saved import read, write
from quire.memory.saved.types import Extra, Found, StateFlags, StateRead
from quire.memory.stats import Footprint, GroupStats


class Memory(Keeping):
    """What all kinds of memory can do, over any number of groups."""

    # -- contexts ----------------------------------------------------------------------------------

    def init_batch(
        self, batch: Sequence[SeqTokens], n_ubatch: int, embd_all: bool = False
    ) -> MemoryContext:
        """Micro-batches of at most n_ubatch tokens, with room set aside for all of them.

        `embd_all` (every token's output is wanted) is for kinds that split differently then.
        """
        return BatchContext(self, batch, n_ubatch)

    def init_full(self) -> MemoryContext:
        """A context that pretends one sequence holds every page; applying it changes nothing."""
        none: Int32 = np.empty(0, np.int32)
        views = {group.name: group.full_view() for group in self.groups}
        return FullContext(MicroBatch(none, none, none, [0], views, PageWork()))

    def init_update(self, optimize: bool = False) -> MemoryContext:
        """Pending work: rotating K that moved; with `optimize`, closing holes as well."""
        return UpdateContext(self, optimize)

    def update_fits(self, optimize: bool = False, without: str | None = None) -> bool:
        """Whether `init_update` would find room, now or once a checkpoint is deleted."""
        gone = self.checkpoints.get(without).tables if without else [None] * len(self.groups)
        demand: Demand = []
        for (group, tables), table in zip(self.tables_by_group(), gone, strict=True):
            demand += group.update_demand(tables, optimize, table)
        return fit_together(demand)

    # -- sequences ------------------------------------------------------------------------------

    def clear(self, data: bool) -> None:
        """Forgets all sequences and checkpoints; `data` also wipes bytes that stay committed."""
        self.check_idle()
        for name in list(self.checkpoints.by_name):
            self._forget(name)
        for tables in self._tables.values():
            self._let_go(tables)
        self._tables.clear()
        self._lowest = 0
        for seq in list(self._parked):
            self._drop_parked(seq)
        self._trim()
        if data:
            for pool in self.pools:
                pool.trim()
                pool.wipe()

    def seq_new(self) -> int:
        """The lowest sequence id nobody uses, now in use."""
        self.check_idle()
        seq = self._lowest
        while seq in self._tables or seq in self._parked:
            seq += 1
        self._tables[seq] = self._new_tables()
        self._lowest = seq + 1
        return seq

    def seq_free(self, seq: int) -> None:
        """Removes a sequence and frees its id."""
        self.check_idle()
        if seq < 0:
            raise RequestError(f"sequence ids start at 0; {seq} cannot be freed")
        self._lowest = min(self._lowest, seq)
        self._drop_parked(seq)
        if seq in self._tables:
            self._let_go(self._tables.pop(seq))
            self._trim()

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Removes positions (seq < 0: of every sequence); False, and no change, if it cannot."""
        self.check_idle()
        if not self.can_rm(seq, p0, p1):
            return False
        for gone in self._parked_in(seq):
            self._drop_parked(gone)
            self._tables[gone] = self._new_tables()
        for tables in self._named(seq):
            for group, table in zip(self.groups, tables, strict=True):
                group.remove(table, p0, p1)
        self._trim()
        return True

    def can_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Whether `seq_rm` would remove these positions."""
        check_range(p0, p1)
        if p0 > 0 or p1 >= 0:  # a parked sequence can go as a whole
            for parked in self._parked_in(seq):
                self._check_here(parked)
        for tables in self._named(seq):
            for group, table in zip(self.groups, tables, strict=True):
                if not group.can_remove(table, p0, p1):
                    return False
        return True

    def _named(self, seq: int) -> list[Tables]:
        """The tables of a sequence that may not be there, or of all."""
        tables = self._tables
        return list(tables.values()) if seq < 0 else [tables[seq]] if seq in tables else []

    def _parked_in(self, seq: int) -> list[int]:
        """Those of the named sequences that are parked."""
        return [other for other in self._parked if seq < 0 or other == seq]

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Shares positions of one sequence with another, which must not hold any of them."""
        self.check_idle()
        check_range(p0, p1)
        source = self.tables(src)
        if dst < 0:
            raise RequestError(f"sequence ids start at 0; {dst} cannot be copied to")
        self._check_here(dst)
        if src == dst:
            return
        target = self._tables.get(dst) or self._nothing
        parts: list[Any] = []
        for i, group in enumerate(self.groups):
            parts.append(group.part(source[i], target[i], p0, p1))
        if target[0].length:
            for i, group in enumerate(self.groups):
                group.join(target[i], parts[i], src)
            return
        for i, group in enumerate(self.groups):
            group.share(parts[i], src)
        self._tables[dst] = tuple(parts)

    def seq_keep(self, seq: int) -> None:
        """Empties every other sequence."""
        self.check_idle()
        self.tables(seq)
        for other in list(self._parked):
            self._drop_parked(other)
            self._tables[other] = self._new_tables()
        for other, tables in self._tables.items():
            if other != seq:
                self._let_go(tables)
                self._tables[other] = self._new_tables()
        self._trim()

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Moves positions by delta; K is rotated by the next `init_update`."""
        self._shift(seq, p0, p1, lambda positions: positions + delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divides positions, rounding down; K is rotated by the next `init_update`."""
        if divisor < 1:
            raise RequestError(f"positions can be divided by 1 or more, not by {divisor}")
        self._shift(seq, p0, p1, lambda positions: positions // divisor)

    def _shift(self, seq: int, p0: int, p1: int, change: Change) -> None:
        self.check_idle()
        check_range(p0, p1)
        pairs = list(zip(self.groups, self.tables(seq), strict=True))
        planned = [group.shifted(table, p0, p1, change) for group, table in pairs]
        for (group, table), shifted in zip(pairs, planned, strict=True):
            group.shift(table, shifted)

    def seq_pos_min(self, seq: int) -> int:
        """The smallest position that all groups hold of a sequence, -1 when it is empty."""
        tables = self._known(seq)
        if tables is None or tables[0].length == 0:
            return -1
        return max(g.first_position(t) for g, t in zip(self.groups, tables, strict=True))

    def seq_pos_max(self, seq: int) -> int:
        """The largest position a sequence holds, -1 when it is empty."""
        tables = self._known(seq)
        return -1 if tables is None else tables[0].next_position - 1

    # -- saved state -------------------------------------------------------------------------------

    def checkpoint_to_bytes(self, name: str, model: str = "") -> bytes:
        """A checkpoint for another process or device; copies every page it holds."""
        return write.checkpoint_to_bytes(self, name, model)

    def checkpoint_from_bytes(self, data: bytes, name: str | None = None, model: str = "") -> str:
        """A new checkpoint, in pages of its own, of what `checkpoint_to_bytes` made; its name.

        Without a name it gets the one it had, or one that is made up where that is taken.
        """
        return read.checkpoint_from_bytes(self, data, name, model)

    def state_write(
        self, io: BinaryIO, seq: int = -1, flags: StateFlags = StateFlags.WHOLE, *,
        checkpoints: Sequence[str] = (), model: str = "", extra: Extra | None = None,
    ) -> None:  # fmt: skip
        """Writes a sequence and the checkpoints named; or (-1) all sequences and checkpoints.

        `model` says whose state it is. A partial state has no checkpoints.
        """
        write.state_image(self, seq, flags, checkpoints, model, extra or Extra()).write(io)

    def state_read(
        self, io: BinaryIO, seq: int = -1, flags: StateFlags = StateFlags.WHOLE, *,
        model: str = "", source: str = "saved state",
        check: Callable[[Found], None] | None = None,
    ) -> StateRead:  # fmt: skip
        """Reads what `state_write` wrote: one sequence into `seq`, which is new or empty, or all.

        A partial state goes to sequences that hold the same positions in full attention. `check`
        may raise before anything is changed; `source` is the name for errors. SessionFileError,
        OutOfMemory or RequestError leave memory as it was.
        """
        return read.state_read(self, io, seq, flags, model, source, check)

    # -- figures --------------------------------------------------------------------------------

    def checkpoint_pages(self, names: Collection[str]) -> dict[str, int]:
        """How many pages these checkpoints hold together, by pool as in `stats`."""
        return stats.distinct_pages(self, names)

    @property
    def cached_bytes(self) -> int:
        """Bytes that nobody but the prefix index keeps alive."""
        return sum(pool.cached_only * pool.page_bytes for pool in self.pools)

    def cached_bytes_on(self, device: Device) -> int:
        """Those of them that are on one device."""
        return sum(p.cached_only * p.page_bytes for p in self.pools if p.device is device)

    def memory_breakdown(self) -> dict[str, dict[str, int]]:
        """Committed bytes by device and use; they add up to what is really held."""
        return stats.breakdown(self)

    def footprint(self, seq: int) -> Footprint:
        """What one sequence holds here; of a parked one, what stayed."""
        if seq in self._parked:
            return stats.footprint(self._parked[seq].kept)
        tables = self._known(seq)
        return Footprint() if tables is None else stats.footprint(self.holdings(tables))

    def stats(self) -> dict[str, GroupStats]:
        """Figures by pool."""
        kept: dict[str, list[Holding]] = {pool.name: [] for pool in self.pools}
        saved = [c.parked for c in self.checkpoints.by_name.values() if c.parked]
        for parked in [*self._parked.values(), *saved]:
            for part in parked.parts:
                kept[part.pool.name].append(part.kept)
        figures: dict[str, GroupStats] = {}
        for i, group in enumerate(self.groups):
            figures |= group.stats([tables[i] for tables in self.held_tables()], kept)
        return figures

    def audit(self) -> None:
        """Raises AuditError with every conservation law that does not hold."""
        audit.audit(self)

    @property
    def specs_by_device(self) -> dict[Device, list[Any]]:
        """What the model declared of the groups on each device."""
        found: dict[Device, list[Any]] = {device: [] for device in self.devices}
        for group in self.groups:
            found[group.device].append(group.layout.spec)
        return found

    def grow(self) -> None:
        """Has as many pages as the budgets can pay for now."""
        for group in self.groups:
            group.grow()

    def close(self) -> None:
        """Gives everything back; the memory is of no use afterwards."""
        for reading in list(self.incoming):
            reading.give_back()
        self.clear(data=False)
        for pool in self.pools:
            pool.close()


def check_range(p0: int, p1: int) -> None:
    """Refuses a range whose end comes first."""
    if 0 <= p1 < p0:
        raise RequestError(f"positions from {p0} to {p1} are no range; the end comes first")
