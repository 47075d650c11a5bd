"""What is kept beside running sequences: checkpoints, and pages that lie in a tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.errors import RequestError
from quire.memory.books import Books, Tables
from quire.memory.checkpoint import Checkpoint
from quire.memory.groups.layout import Int32
from quire.memory.pages.demand import fit_together
from quire.memory.pages.pool import PagePool
from quire.memory.tiers.parking import Counts, Parked, all_here, leaving, move_out
from quire.memory.tiers.tiers import Tier


class Leavers(NamedTuple):
    """Sequences and checkpoints that may leave together: what they alone hold can go to a tier."""

    members: Sequence[int | str]
    counts: Counts


class Keeping(Books):
    """Checkpoints by name, and sequences and checkpoints whose own pages are parked."""

    # -- tiers ----------------------------------------------------------------------------------

    def park_bytes(self, seq: int, leavers: Leavers | None = None) -> int:
        """Bytes that parking a sequence would move, further ones if it is parked already.

        They are what nobody else holds; or nobody but those who may leave with it.
        """
        return self._bytes_leaving(seq, leavers)

    def park(self, seq: int, tier: Tier, leavers: Leavers | None = None) -> None:
        """Moves a sequence's own pages to a tier; until `unpark` it only has positions.

        What it shares with some who may leave, and nobody else holds, moves for all of them: those
        are parked too then.
        """
        self.check_idle()
        tier.check(self.park_bytes(seq, leavers))  # only a failing disk is found out later
        self._move_out(seq, tier, leavers)

    def leavers(self, members: Sequence[int | str]) -> Leavers:
        """Sequences and checkpoints (by name) that may leave, and how many hold each page here."""
        counts = {pool.name: np.zeros(pool.max_pages, np.int32) for pool in self.pools}
        for one in members:
            for pool, pages, _ in self._held_here(one):
                counts[pool.name][pages] += 1
        return Leavers(members, counts)

    def copies(self) -> Leavers:
        """Nobody; with them a sequence takes copies along of what others hold too."""
        return Leavers((), {pool.name: pool.refs for pool in self.pools})

    def given_back_but(self, stay: Sequence[int | str], budget: Budget) -> int:
        """Bytes of a budget that come back when only these sequences and checkpoints stay."""
        held, freed = self._pages_of(stay, self.reserved), 0
        for pool in self.pools:
            if pool.budget.whole is budget.whole:
                freed += pool.committed - pool.commitment.bytes_under(held[pool.name])
        return freed

    def bytes_here(self, members: Sequence[int | str]) -> int:
        """Bytes of the pages that any of these sequences and checkpoints holds here."""
        held = self._pages_of(members, ())
        return sum(len(held[pool.name]) * pool.page_bytes for pool in self.pools)

    def _pages_of(
        self, members: Sequence[int | str], more: Iterable[tuple[PagePool, list[int]]]
    ) -> dict[str, NDArray[np.intp]]:
        """Each pool's pages that any of these holds here, ascending; pools may be vast."""
        found = {pool.name: [np.zeros(0, np.intp)] for pool in self.pools}
        for one in members:
            for pool, pages, _ in self._held_here(one):
                found[pool.name].append(pages.astype(np.intp))
        for pool, some in more:
            found[pool.name].append(np.array(some, np.intp))
        return {name: np.unique(np.concatenate(each)) for name, each in found.items()}

    def bytes_in(self, tier: Tier, members: Sequence[int | str]) -> int:
        """Bytes of these sequences and checkpoints that are in a tier."""
        parts = [part for one in members for part in self._as_parked(one).parts]
        stored = {away.stored for part in parts for away in part.away}
        return sum(one.n_bytes for one in stored if one.tier is tier)

    def _held_here(self, one: int | str) -> list[tuple[PagePool, Int32, Int32]]:
        if isinstance(one, str):
            return self.held_by(self.checkpoints.get(one))
        parked = self._parked.get(one)
        return self.holdings(self.tables(one)) if parked is None else parked.kept

    def _bytes_leaving(self, one: int | str, leavers: Leavers | None) -> int:
        counts, held = leavers and leavers.counts, self._held_here(one)
        return sum(int(leaving(p, ids, counts).sum()) * p.page_bytes for p, ids, _ in held)

    def _move_out(self, one: int | str, tier: Tier, leavers: Leavers | None) -> None:
        """Moves pages to a tier; whoever holds any of them is parked then."""
        first, counts = self._as_parked(one), leavers and leavers.counts
        others = leavers.members if leavers else ()
        parked = {other: self._as_parked(other) for other in others if other != one}
        move_out(first, list(parked.values()), tier, counts)
        for other, found in {one: first, **parked}.items():
            if other == one or any(part.away for part in found.parts):
                self._note_parked(other, found)
        self._trim()

    def _as_parked(self, one: int | str) -> Parked:
        """What is parked, or could be."""
        if isinstance(one, str):
            saved = self.checkpoints.get(one)
            tables, seq, cached = saved.tables, -1, saved.cached
            found = saved.parked
        else:
            found = self._parked.get(one)
            tables, seq, cached = self._tables.get(one, ()), one, False
        return found or all_here(tables, self.holdings(tables), seq, cached)

    def _note_parked(self, one: int | str, parked: Parked) -> None:
        if isinstance(one, str):
            self.checkpoints.get(one).parked = parked
        else:
            self._parked[one] = parked
            self._tables.pop(one, None)

    def is_parked(self, seq: int) -> bool:
        """Whether a sequence only has positions."""
        return seq in self._parked

    def unpark(self, seq: int) -> None:
        """Brings a parked sequence back; or an error, and it stays parked."""
        self.check_idle()
        if seq not in self._parked:
            raise RequestError(f"sequence {seq} is not parked; parked are {sorted(self._parked)}")
        self._tables[seq] = self._brought_back(self._parked[seq])
        del self._parked[seq]

    def _brought_back(self, parked: Parked) -> Tables:
        """Tables with all their pages here again; or an error and nothing changed."""
        try:
            pages = iter(parked.bring_back())
        except BaseException:
            self._trim()
            raise
        return tuple(
            group.repaged(table, [next(pages) for _ in group.pools])
            for group, table in zip(self.groups, parked.tables, strict=True)
        )

    def _drop_parked(self, seq: int) -> None:
        if seq in self._parked:
            self._parked.pop(seq).drop()
            self._trim()

    # -- checkpoints ----------------------------------------------------------------------------

    def checkpoint_supported(self) -> bool:
        """Whether checkpoints can be taken: of every kind."""
        return True

    def checkpoint_save(self, seq: int, name: str | None = None, cached: bool = False) -> str:
        """Keeps a sequence as it is now under a name (made up if None); moves no bytes."""
        if self._open is not None:
            self.check_idle()
        start = perf_counter_ns()
        tables = self._tables.get(seq) or self.tables(seq)
        name = self.checkpoints.new_name(name)
        kept = []
        for i, group in enumerate(self.groups):
            group.share(tables[i], seq)
            kept.append(tables[i].copy())
        self.checkpoints.by_name[name] = saved = Checkpoint(name, seq, tuple(kept), cached)
        if cached:
            self._cache(saved, 1)
        self.checkpoints.timings["save"].add(perf_counter_ns() - start)
        return name

    def checkpoint_restore(self, seq: int, name: str) -> None:
        """Makes a sequence what the checkpoint holds; the checkpoint stays.

        One that is parked comes back first; or an error, and nothing has changed.
        """
        if self._open is not None:
            self.check_idle()
        start = perf_counter_ns()
        if seq < 0:
            raise RequestError(f"sequence ids start at 0; nothing can be restored to {seq}")
        found = self.checkpoints.get(name)
        if found.parked is not None:
            self.checkpoint_unpark(name)
        saved = found.tables
        if seq in self._parked:
            self._drop_parked(seq)
        # The checkpoint never writes, so where it is alone the sequence becomes the appender.
        old, copies = self._tables.get(seq), []
        for i, group in enumerate(self.groups):
            if old is None:
                group.share(saved[i], seq)
            else:
                group.exchange(old[i], saved[i], seq)
            copies.append(saved[i].copy())
        self._tables[seq] = tuple(copies)
        for group in self.groups:
            group.trim(len(self._tables))
        self.checkpoints.timings["restore"].add(perf_counter_ns() - start)

    def checkpoint_take(self, seq: int) -> str:
        """Keeps a parked sequence under a name, and leaves it empty; nothing comes back for it."""
        self.check_idle()
        parked = self._parked.pop(seq)
        for part in parked.parts:
            part.pool.freeze(*part.kept)  # it sees what it could have written
            part.seq = -1
        name = self.checkpoints.new_name(None)
        self.checkpoints.by_name[name] = Checkpoint(name, seq, parked.tables, parked=parked)
        self._tables[seq] = self._new_tables()
        return name

    def checkpoint_give(self, seq: int, name: str) -> None:
        """Makes a sequence what a parked checkpoint holds, in its place: it stays parked."""
        self.check_idle()
        parked = self.checkpoints.get(name).parked
        assert parked is not None, "its pages are here"
        del self.checkpoints.by_name[name]
        self._drop_parked(seq)
        if seq in self._tables:
            self._let_go(self._tables.pop(seq))
        for part in parked.parts:
            part.seq = seq
        self._parked[seq] = parked
        self._trim()

    def checkpoint_delete(self, name: str) -> None:
        """Forgets a checkpoint and frees what nobody else holds."""
        if self._open is not None:
            self.check_idle()
        start = perf_counter_ns()
        self._forget(name)
        for group in self.groups:
            group.trim(len(self._tables))
        self.checkpoints.timings["delete"].add(perf_counter_ns() - start)

    def _forget(self, name: str) -> None:
        saved = self.checkpoints.get(name)
        if saved.cached:
            self._cache(saved, -1)
        del self.checkpoints.by_name[name]
        if saved.parked is not None:
            saved.parked.drop()
            return
        for i, group in enumerate(self.groups):
            group.let_go(saved.tables[i])

    def _cache(self, saved: Checkpoint, by: int) -> None:
        """Counts a checkpoint's pages as the prefix index's, or no longer."""
        for pool, pages, _ in self.held_by(saved):
            pool.cache(pages, by)

    def checkpoint_park_bytes(self, name: str, leavers: Leavers | None = None) -> int:
        """Bytes that parking a checkpoint would move, as `park_bytes` counts them."""
        return self._bytes_leaving(name, leavers)

    def checkpoint_park(self, name: str, tier: Tier, leavers: Leavers | None = None) -> None:
        """Moves a checkpoint's own pages to a tier, and what it shares with some who may leave."""
        self.check_idle()
        tier.check(self.checkpoint_park_bytes(name, leavers))
        self._move_out(name, tier, leavers)

    def checkpoint_unpark(self, name: str) -> None:
        """Brings a checkpoint's pages back, if they are parked; or an error and no change."""
        self.check_idle()
        saved = self.checkpoints.get(name)
        if saved.parked is not None:
            saved.tables, saved.parked = self._brought_back(saved.parked), None

    def checkpoint_fits(self, name: str) -> bool:
        """Whether a checkpoint's pages are here, or could be brought back now."""
        parked = self.checkpoints.get(name).parked
        return parked is None or fit_together([(part.pool, part.n_moved) for part in parked.parts])

    def checkpoint_bytes(self, name: str) -> int:
        """Bytes of memory that nobody but this checkpoint keeps alive."""
        held = self.held_by(self.checkpoints.get(name))
        return sum(int((pool.refs[pages] == 1).sum()) * pool.page_bytes for pool, pages, _ in held)
