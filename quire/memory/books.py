"""The books of memory: who holds which tables, in every group at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.devices.device import PageWork
from quire.errors import ModelError, RequestError
from quire.memory.batch import SeqTokens
from quire.memory.checkpoint import Checkpoint, Checkpoints
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import Int32
from quire.memory.lease import AppendTransaction, Lease
from quire.memory.pages.demand import Demand, by_pool, fit_alone, fit_together
from quire.memory.pages.pool import PagePool
from quire.memory.tiers.parking import Parked

if TYPE_CHECKING:
    from quire.memory.contexts import UpdateContext
    from quire.memory.saved.read import Reading

Tables = tuple[Any, ...]
"""What one sequence holds: a table for each group."""


class Books:
    """Sequences, checkpoints and parked tables. A sequence is in all groups, or in none.

    One thing happens at a time: while a lease or a context is open, every other operation that
    would change memory is refused, so nothing can move under the kernels.
    """

    def __init__(self, groups: Sequence[AnyGroup]) -> None:
        self.groups = tuple(groups)
        names = [pool.name for group in groups for pool in group.pools]
        if len(set(names)) != len(names) or not names:
            raise ModelError(f"groups need names of their own; they are {names}")
        self.pools = tuple(pool for group in groups for pool in group.pools)
        self.devices = tuple(dict.fromkeys(group.device for group in groups))
        self.can_shift = all(group.can_shift for group in groups)
        """Whether `seq_add` and `seq_div` are possible."""
        self.checkpoints = Checkpoints()
        """All checkpoints by name, and how long it took to save, restore and delete them."""
        self._tables: dict[int, Tables] = {}
        self._parked: dict[int, Parked] = {}
        self._lowest = 0  # no sequence below has an id to spare
        self._no_rows: tuple[tuple[()], ...] = ((),) * len(self.groups)
        self._nothing = self._new_tables()  # what a sequence that is not there holds; to read
        self._open: AppendTransaction | UpdateContext | None = None
        self.incoming: list[Reading] = []
        """Saved state whose pages are being filled."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model that read this memory."""
        return tuple(dict.fromkeys(n for group in self.groups for n in group.layout.layers))

    @property
    def seqs(self) -> list[int]:
        """Ids of all sequences, in ascending order."""
        return sorted([*self._tables, *self._parked])

    def tables(self, seq: int) -> Tables:
        """What a sequence holds in each group; to read, not to change."""
        self._check_here(seq)
        if seq not in self._tables:
            raise RequestError(f"there is no sequence {seq}; there are {self.seqs}")
        return self._tables[seq]

    def _check_here(self, seq: int) -> None:
        if seq in self._parked:
            raise RequestError(f"sequence {seq} is parked; unpark it first")

    def check_idle(self) -> None:
        """Raises RequestError while a lease or a context is open."""
        if self._open is not None:
            raise RequestError("memory has an open lease or context; commit or close it first")

    def _new_tables(self) -> Tables:
        return tuple(group.empty() for group in self.groups)

    def _trim(self) -> None:
        for group in self.groups:
            group.trim(len(self._tables))

    # -- steps ----------------------------------------------------------------------------------

    def fits(self, counts: Iterable[tuple[int, int]]) -> bool:
        """Whether (sequence, number of new tokens), all together, could be reserved now."""
        counts = list(counts)
        n_tokens = 0
        for _, count in counts:
            n_tokens += count
        if not self._parked and self._has_plenty(len(counts), n_tokens):
            return True
        return fit_together(self.demand(counts))

    def _has_plenty(self, n_seqs: int, n_tokens: int) -> bool:
        """Whether so many tokens fit whoever gets them: no table is looked at."""
        n_bytes, free = 0, []
        for group in self.groups:
            for pool, n in group.most_pages(n_seqs, n_tokens):
                if n > pool.max_pages - pool.used:
                    return False
                n_bytes += n * (pool.page_bytes + 2 * pool.commitment.granularity)
                budget = pool.budget.whole
                free.append(budget.limit - budget.used)
        return n_bytes <= min(free)

    def demand(self, counts: Sequence[tuple[int, int]]) -> Demand:
        """The pages that reserving (sequence, number of new tokens) takes, by pool.

        For a parked sequence it is a bound: the pages it takes to bring it back are in it. With no
        new tokens they are all of it.
        """
        here: list[list[Any]] = [[] for _ in self.groups]
        parked: list[tuple[int, int]] = []
        for seq, count in counts:
            if seq in self._parked:
                parked.append((seq, count))
                continue
            for rows, table in zip(here, self._tables.get(seq) or self._new_tables(), strict=True):
                rows.append((seq, table, count))
        whole = [
            wanted
            for group, rows in zip(self.groups, here, strict=True)
            for wanted in group.demand(rows)
        ]
        for seq, count in parked:
            whole += [(part.pool, part.n_moved) for part in self._parked[seq].parts]
            if count:
                whole += [need for group in self.groups for need in group.most_pages(1, count)]
        return by_pool(whole)

    def could_hold(self, n_tokens: int) -> bool:
        """Whether a sequence of so many tokens might fit, if it were the only one."""
        return fit_alone([need for g in self.groups for need in g.least_pages(n_tokens)])

    def room_for_draft(self, seq: int) -> int:
        """The most new tokens of which a step can keep any number; `fits` says if there is room."""
        return min([group.room_for_draft for group in self.groups])

    def reserve(self, entries: Sequence[SeqTokens]) -> Lease:
        """Room for one step, or PagesError/BudgetError and nothing changed."""
        return Lease(self, entries)

    def back_ahead(self) -> None:
        """Takes memory that steps to come are likely to want, where that is slow."""
        for pool in self.pools:
            if pool.device.ahead:
                pool.back_ahead()

    # -- leases and contexts ------------------------------------------------------------------

    def begin(
        self, owner: AppendTransaction | UpdateContext, parts: Sequence[Sequence[SeqTokens]]
    ) -> list[int]:
        """A lease or context starts; returns the sequences that were made for it."""
        if self._open is not None:
            self.check_idle()
        created: list[int] = []
        for part in parts:
            for seq, _ in part:
                tables = self._tables.get(seq)
                if tables is None:
                    self._check_here(seq)
                    if seq not in created:
                        created.append(seq)
                elif self.can_shift:  # only then can positions wait to be moved
                    for group, table in zip(self.groups, tables, strict=True):
                        group.check_ready(seq, table)
        for seq in created:
            self._tables[seq] = self._new_tables()
        self._open = owner
        return created

    def wanted(
        self, parts: Sequence[Sequence[SeqTokens]]
    ) -> list[tuple[list[tuple[int, Any, int]], ...]]:
        """For each micro-batch and each group, who gets how many tokens."""
        whole = []
        for part in parts:
            rows: tuple[list[tuple[int, Any, int]], ...] = tuple(map(list, self._no_rows))
            for seq, tokens in part:
                count = len(tokens)
                for row, table in zip(rows, self._tables[seq], strict=True):
                    row.append((seq, table, count))
            whole.append(rows)
        return whole

    def end(self, created: Iterable[int]) -> None:
        """A lease or context is over."""
        self._open = None
        for seq in created:
            if self._tables[seq][0].length == 0:
                del self._tables[seq]
                self._lowest = min(self._lowest, seq)
        for group in self.groups:
            group.trim(len(self._tables))

    def tables_by_group(self) -> Iterable[tuple[AnyGroup, list[Any]]]:
        """Each group with the tables of all sequences that are here."""
        for i, group in enumerate(self.groups):
            yield group, [tables[i] for tables in self._tables.values()]

    def run(self, work: PageWork) -> None:
        """Has every device do its part of the work on pages."""
        if work:
            for device in self.devices:
                device.run(work)
            work.clear()

    # -- who holds what -----------------------------------------------------------------------

    def _known(self, seq: int) -> Tables | None:
        """The tables of a sequence, to read positions from, be it parked or not."""
        parked = self._parked.get(seq)
        return parked.tables if parked else self._tables.get(seq)

    def _let_go(self, tables: Tables) -> None:
        for i, group in enumerate(self.groups):
            group.let_go(tables[i])

    def by_group(self, tables: Tables) -> dict[str, Any]:
        """Tables by the names of their groups."""
        return {group.name: table for group, table in zip(self.groups, tables, strict=True)}

    def adopt(self, seq: int, tables: Mapping[str, Any]) -> None:
        """Gives a sequence tables, in some groups, whose pages count it as a holder already."""
        old = self._tables.get(seq) or self._new_tables()
        self._tables[seq] = tuple(
            tables.get(group.name, table) for group, table in zip(self.groups, old, strict=True)
        )
        for group, table in zip(self.groups, old, strict=True):
            if group.name in tables:
                group.let_go(table)
        self._trim()

    def holdings(self, tables: Tables) -> list[tuple[PagePool, Int32, Int32]]:
        """For each pool, the pages that tables hold, and how many slots of each they see."""
        return [
            (pool, *group.held_pages(pool, table))
            for group, table in zip(self.groups, tables, strict=True)
            for pool in group.pools
        ]

    def is_shared(self, seq: int) -> bool:
        """Whether somebody else holds a page of a sequence too."""
        held = self.holdings(self.tables(seq))
        return any(bool((pool.refs[pages] > 1).any()) for pool, pages, _ in held)

    def held_by(self, saved: Checkpoint) -> list[tuple[PagePool, Int32, Int32]]:
        """For each pool, the pages that a checkpoint holds here."""
        if saved.parked is None:
            return self.holdings(saved.tables)
        return saved.parked.kept

    def holders(
        self, cached: bool = True
    ) -> Iterable[tuple[str, int, bool, Sequence[tuple[PagePool, Int32, Int32]]]]:
        """Everybody who holds pages: what to call it, whom it appends as, whether it is cached.

        Without those that are cached it takes no time for however many prefixes there are.
        """
        for seq, tables in self._tables.items():
            yield f"sequence {seq}", seq, False, self.holdings(tables)
        for seq, parked in self._parked.items():
            yield f"parked sequence {seq}", seq, False, parked.kept
        for saved in self.checkpoints.by_name.values():
            if cached or not saved.cached:
                yield f"checkpoint {saved.name}", -1, saved.cached, self.held_by(saved)

    @property
    def reserved(self) -> list[tuple[PagePool, list[int]]]:
        """Every reference that an open lease or context, or state that is being read, holds."""
        reserved = self._open.reserved if self._open is not None else []
        incoming = [pages for one in self.incoming for pages in one.set_aside]
        return [*((one.pool, one.all_pages) for one in reserved), *incoming]

    def held_tables(self) -> list[Tables]:
        """The tables of all sequences and checkpoints whose pages are here."""
        saved = self.checkpoints.by_name.values()
        return [*self._tables.values(), *(c.tables for c in saved if c.parked is None)]
