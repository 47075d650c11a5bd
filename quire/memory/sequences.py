"""Tables by sequence and by checkpoint: what all kinds with pages of their own have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from time import perf_counter_ns
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from quire.errors import RequestError
from quire.memory.append import SetAside
from quire.memory.audit import AuditError, Holder, audit_pool
from quire.memory.checkpoint import Checkpoint, Checkpoints
from quire.memory.figures import breakdown
from quire.memory.interface import Appends, Lease, MemoryContext, Returning, SeqTokens
from quire.memory.layout import AttentionLayout, Int32
from quire.memory.lease import AppendLease, BatchContext
from quire.memory.parking import Parked, TableReturning, own_pages, store_pages
from quire.memory.pool import PagePool
from quire.memory.state_io import SavedState
from quire.memory.state_layout import StateLayout
from quire.memory.tiers import Tier


class AnyTable(Protocol):
    """What one sequence holds, whatever the kind."""

    @property
    def length(self) -> int:
        """0 when it holds nothing."""

    @property
    def next_position(self) -> int:
        """Where new tokens go."""

    def copy(self) -> Self:
        """The same pages in a table of its own; nobody's references are counted."""


T = TypeVar("T", bound=AnyTable)


class SequenceMemory(SavedState, Generic[T]):
    """Tables, one per sequence, over one or more pools.

    One thing happens at a time: while a lease or a context is open, every other operation that
    would change memory is refused, so nothing can move under the kernels.
    """

    layout: AttentionLayout | StateLayout

    def __init__(self, pools: tuple[PagePool, ...]) -> None:
        self.pools = pools
        self.checkpoints: Checkpoints[T] = Checkpoints()
        self._tables: dict[int, T] = {}
        self._parked: dict[int, Parked[T]] = {}
        self._open: tuple[SetAside, ...] = ()

    # -- what a kind has to say -----------------------------------------------------------------

    @abstractmethod
    def _empty(self) -> T:
        """The table of a sequence without tokens."""

    @abstractmethod
    def _share(self, table: T, seq: int) -> None:
        """One more holder of a table's pages; where there was one, `seq` is who may append."""

    @abstractmethod
    def _let_go(self, table: T) -> None:
        """One holder less of a table's pages."""

    @abstractmethod
    def _appends(
        self, parts: Sequence[Sequence[SeqTokens]], ended: Callable[[], None]
    ) -> tuple[Appends, tuple[SetAside, ...]]:
        """Room for these micro-batches and the pages set aside for them; or OutOfMemory."""

    @abstractmethod
    def _can_remove(self, table: T, p0: int, p1: int) -> bool:
        """Whether a table without these positions can be represented."""

    @abstractmethod
    def _remove(self, table: T, p0: int, p1: int) -> None:
        """Removes positions from a table that can do without them."""

    @abstractmethod
    def _part(self, src: int, dst: int, p0: int, p1: int) -> T:
        """A table with these positions of `src`, to go into `dst`; RequestError if it cannot."""

    @abstractmethod
    def _join(self, target: T, part: T, seq: int) -> None:
        """Takes hold of part of `seq`'s table and adds it to a table that holds something else."""

    @abstractmethod
    def _held_pages(self, pool: PagePool, table: T) -> tuple[Int32, Int32]:
        """The pages of one pool that a table holds, and how many slots of each it sees."""

    @abstractmethod
    def _faults(self, table: T) -> list[str]:
        """What is wrong with a table by itself."""

    @abstractmethod
    def _repaged(self, table: T, pages: list[Int32]) -> T:
        """A table that lies in other pages, given those of each pool."""

    @abstractmethod
    def _most_growth(self, table: T, count: int) -> list[tuple[PagePool, int]]:
        """Pages of each pool that so many new tokens take at most."""

    @abstractmethod
    def _demand(self, counts: Sequence[tuple[int, int]]) -> list[tuple[PagePool, int]]:
        """`demand` of sequences that are not parked."""

    def _check_ready(self, seq: int, table: T) -> None:
        """Refuses to append to a table that is not ready for it."""

    def _exchange(self, old: T, new: T, seq: int) -> None:
        """Lets go of a table of `seq` and takes hold of another."""
        self._let_go(old)
        self._share(new, seq)

    def _replace(self, seq: int, table: T) -> None:
        """Gives a sequence a table whose pages count it as a holder already."""
        old = self._tables.get(seq)
        self._tables[seq] = table
        if old is not None:
            self._let_go(old)
        self._trim()

    def _trim(self) -> None:
        for pool in self.pools:
            pool.trim()

    @property
    def leaves(self) -> tuple[Self, ...]:
        return (self,)

    # -- steps ----------------------------------------------------------------------------------

    @property
    def seqs(self) -> list[int]:
        return sorted([*self._tables, *self._parked])

    def table(self, seq: int) -> T:
        """What a sequence holds; to read, not to change."""
        self._check_here(seq)
        if seq not in self._tables:
            raise RequestError(f"there is no sequence {seq}; there are {self.seqs}")
        return self._tables[seq]

    def _check_here(self, seq: int) -> None:
        if seq in self._parked:
            raise RequestError(f"sequence {seq} is parked; unpark it first")

    def _known(self, seq: int) -> T | None:
        """The table of a sequence, to read positions from, be it parked or not."""
        parked = self._parked.get(seq)
        return parked.table if parked else self._tables.get(seq)

    def demand(self, counts: Sequence[tuple[int, int]]) -> list[tuple[PagePool, int]]:
        whole = self._demand([(seq, n) for seq, n in counts if seq not in self._parked])
        for seq, count in counts:
            if parked := self._parked.get(seq):
                whole += [(part.pool, part.n_moved) for part in parked.parts]
                whole += self._most_growth(parked.table, count)
        return _by_pool(whole)

    def check_idle(self) -> None:
        if self._open:
            raise RequestError("memory has an open lease or context; commit or close it first")

    def prepare(self, parts: Sequence[Sequence[SeqTokens]]) -> Appends:
        self.check_idle()
        created = []
        for seq, _ in chain.from_iterable(parts):
            self._check_here(seq)
            table = self._tables.get(seq)
            if table is not None:
                self._check_ready(seq, table)
            elif seq not in created:
                created.append(seq)
        for seq in created:
            self._tables[seq] = self._empty()
        try:
            appends, self._open = self._appends(parts, lambda: self._end(created))
        except BaseException:
            self._end(created)
            raise
        return appends

    def reserve(self, entries: Sequence[SeqTokens]) -> Lease:
        return AppendLease(self.prepare, entries)

    def init_batch(
        self, batch: Sequence[SeqTokens], n_ubatch: int, embd_all: bool = False
    ) -> MemoryContext:
        return BatchContext(self.prepare, batch, n_ubatch)

    def _end(self, created: Iterable[int]) -> None:
        """A lease or context is over."""
        self._open = ()
        for seq in created:
            if self._tables[seq].length == 0:
                del self._tables[seq]
        self._trim()

    # -- sequences ------------------------------------------------------------------------------

    def clear(self, data: bool) -> None:
        self.check_idle()
        for table in self._held_tables():
            self._let_go(table)
        self._tables.clear()
        for seq in list(self._parked):
            self._drop_parked(seq)
        self.checkpoints.by_name.clear()
        for pool in self.pools:
            pool.trim()
            if data:
                pool.wipe()

    def seq_new(self) -> int:
        self.check_idle()
        taken = set(self.seqs)
        seq = next(i for i in range(len(taken) + 1) if i not in taken)
        self._tables[seq] = self._empty()
        return seq

    def seq_free(self, seq: int) -> None:
        self.check_idle()
        if seq < 0:
            raise RequestError(f"sequence ids start at 0; {seq} cannot be freed")
        self._drop_parked(seq)
        if seq in self._tables:
            self._let_go(self._tables.pop(seq))
            self._trim()

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        self.check_idle()
        if not self.can_rm(seq, p0, p1):
            return False
        for gone in self._parked_in(seq):
            self._drop_parked(gone)
            self._tables[gone] = self._empty()
        for table in self._named(seq):
            self._remove(table, p0, p1)
        self._trim()
        return True

    def can_rm(self, seq: int, p0: int, p1: int) -> bool:
        check_range(p0, p1)
        if p0 > 0 or p1 >= 0:  # a parked sequence can go as a whole
            for parked in self._parked_in(seq):
                self._check_here(parked)
        return all(self._can_remove(table, p0, p1) for table in self._named(seq))

    def _named(self, seq: int) -> list[T]:
        """The table of a sequence that may not be there, or all tables."""
        tables = self._tables
        return list(tables.values()) if seq < 0 else [tables[seq]] if seq in tables else []

    def _parked_in(self, seq: int) -> list[int]:
        """Those of the named sequences that are parked."""
        return [other for other in self._parked if seq < 0 or other == seq]

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.check_idle()
        part = self._checked_part(src, dst, p0, p1)
        if src == dst:
            return
        target = self._tables.get(dst)
        if target is None or target.length == 0:
            self._share(part, src)
            self._tables[dst] = part
        else:
            self._join(target, part, src)

    def check_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self._checked_part(src, dst, p0, p1)

    def _checked_part(self, src: int, dst: int, p0: int, p1: int) -> T:
        check_range(p0, p1)
        source = self.table(src)
        if dst < 0:
            raise RequestError(f"sequence ids start at 0; {dst} cannot be copied to")
        self._check_here(dst)
        return source if src == dst else self._part(src, dst, p0, p1)

    def seq_keep(self, seq: int) -> None:
        self.check_idle()
        self.table(seq)
        for other in list(self._parked):
            self._drop_parked(other)
            self._tables[other] = self._empty()
        for other, table in self._tables.items():
            if other != seq:
                self._let_go(table)
                self._tables[other] = self._empty()
        self._trim()

    def seq_pos_max(self, seq: int) -> int:
        table = self._known(seq)
        return -1 if table is None else table.next_position - 1

    # -- tiers ----------------------------------------------------------------------------------

    def park_bytes(self, seq: int) -> int:
        table = self.table(seq)
        held = [(pool, self._held_pages(pool, table)[0]) for pool in self.pools]
        return sum(int(own_pages(pool, pages).sum()) * pool.page_bytes for pool, pages in held)

    def park(self, seq: int, tier: Tier) -> None:
        self.check_idle()
        table = self.table(seq)
        held = [(pool, *self._held_pages(pool, table)) for pool in self.pools]
        parts = store_pages(held, tier)
        for part in parts:
            part.pool.release(part.pages[part.moved])
        self._parked[seq] = Parked(self._tables.pop(seq), parts)
        self._trim()

    def returning(self, seq: int) -> Returning:
        self.check_idle()
        if seq not in self._parked:
            raise RequestError(f"sequence {seq} is not parked; parked are {sorted(self._parked)}")
        parked = self._parked[seq]

        def back(pages: list[Int32]) -> None:
            self._tables[seq] = self._repaged(parked.table, pages)
            del self._parked[seq]

        return TableReturning(parked, back, self._trim)

    def _drop_parked(self, seq: int) -> None:
        if seq in self._parked:
            self._parked.pop(seq).drop()
            self._trim()

    # -- checkpoints ----------------------------------------------------------------------------

    def checkpoint_supported(self) -> bool:
        return True

    def checkpoint_save(self, seq: int, name: str | None = None) -> str:
        self.check_idle()
        start = perf_counter_ns()
        table = self.table(seq)
        name = self.checkpoints.new_name(name)
        self._share(table, seq)
        self.checkpoints.by_name[name] = Checkpoint(name, seq, table.copy())
        self.checkpoints.timings["save"].add(perf_counter_ns() - start)
        return name

    def checkpoint_restore(self, seq: int, name: str) -> None:
        self.check_idle()
        start = perf_counter_ns()
        saved = self.checkpoints.get(name).table
        if seq < 0:
            raise RequestError(f"sequence ids start at 0; nothing can be restored to {seq}")
        self._drop_parked(seq)
        # The checkpoint never writes, so where it is alone the sequence becomes the appender.
        if seq in self._tables:
            self._exchange(self._tables[seq], saved, seq)
        else:
            self._share(saved, seq)
        self._tables[seq] = saved.copy()
        self._trim()
        self.checkpoints.timings["restore"].add(perf_counter_ns() - start)

    def checkpoint_delete(self, name: str) -> None:
        self.check_idle()
        start = perf_counter_ns()
        self._let_go(self.checkpoints.get(name).table)
        del self.checkpoints.by_name[name]
        self._trim()
        self.checkpoints.timings["delete"].add(perf_counter_ns() - start)

    # -- figures --------------------------------------------------------------------------------

    def checkpoint_pages(self, names: Collection[str]) -> dict[str, int]:
        tables = [self.checkpoints.get(name).table for name in names]
        return {
            pool.name: len({p for t in tables for p in self._held_pages(pool, t)[0].tolist()})
            for pool in self.pools
        }

    def memory_breakdown(self) -> dict[str, dict[str, int]]:
        parts: dict[str, int] = {}
        for pool in self.pools:
            held = [self._held_pages(pool, table)[0] for table in self._tables.values()]
            held += [pages for pages, _ in self._kept_parked(pool)]
            saved = {
                name: self._held_pages(pool, checkpoint.table)[0]
                for name, checkpoint in self.checkpoints.by_name.items()
            }
            for part, size in breakdown(pool, held, saved, self._aside(pool)).items():
                parts[f"{pool.name}: {part}"] = size
        return {"cpu": parts}

    def audit(self) -> None:
        wrong: list[str] = []
        for pool in self.pools:
            holders = [
                Holder(f"sequence {seq}", seq, *self._held_pages(pool, table))
                for seq, table in self._tables.items()
            ]
            for seq, parked in self._parked.items():
                holders.append(Holder(f"parked sequence {seq}", seq, *parked.kept(pool)))
            holders += [
                Holder(f"checkpoint {c.name!r}", -1, *self._held_pages(pool, c.table))
                for c in self.checkpoints.by_name.values()
            ]
            aside = np.array(self._aside(pool), np.int32)
            holders.append(Holder("what is set aside", -1, aside, np.zeros_like(aside)))
            wrong += audit_pool(pool, holders)
        for table in self._held_tables():
            wrong += self._faults(table)
        if wrong:
            raise AuditError("; ".join(wrong))

    def close(self) -> None:
        self.clear(data=False)
        for pool in self.pools:
            pool.close()

    def _aside(self, pool: PagePool) -> list[int]:
        """Every reference to a page of this pool that an open lease or context holds."""
        return [page for aside in self._open if aside.pool is pool for page in aside.all_pages]

    def _kept_parked(self, pool: PagePool) -> list[tuple[Int32, Int32]]:
        """What parked sequences still hold of a pool, and the slots they see."""
        return [parked.kept(pool) for parked in self._parked.values()]

    def _holdings(self, pool: PagePool) -> list[tuple[Int32, Int32]]:
        """The pages of a pool that each holder has, and how many slots of each it sees."""
        held = [self._held_pages(pool, table) for table in self._held_tables()]
        return held + self._kept_parked(pool)

    def _held_tables(self) -> list[T]:
        return [*self._tables.values(), *(c.table for c in self.checkpoints.by_name.values())]


def _by_pool(demand: list[tuple[PagePool, int]]) -> list[tuple[PagePool, int]]:
    """Each pool once, with all that is wanted of it."""
    whole: dict[int, tuple[PagePool, int]] = {}
    for pool, n in demand:
        whole[id(pool)] = (pool, n + whole.get(id(pool), (pool, 0))[1])
    return list(whole.values())


def check_range(p0: int, p1: int) -> None:
    """Refuses a range whose end comes first."""
    if 0 <= p1 < p0:
        raise RequestError(f"positions from {p0} to {p1} are no range; the end comes first")
