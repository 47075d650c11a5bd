"""The conservation laws, as code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.memory.groups.layout import Int32
from quire.memory.groups.table import HOLE, Table
from quire.memory.pages.pool import PagePool

if TYPE_CHECKING:
    from quire.memory.memory import Memory


class AuditError(AssertionError):
    """A conservation law does not hold: a bug in memory, not a mistake of the caller."""


class Holder(NamedTuple):
    """Somebody who holds references: a sequence, a checkpoint, a lease."""

    label: str
    seq: int
    """Whom it may append as; -1 for holders that never write."""
    pages: Int32
    seen: Int32
    cached: bool = False
    """Whether it is the prefix index's."""


def audit(memory: Memory) -> None:
    """Raises AuditError with every conservation law that does not hold."""
    wrong: list[str] = []
    holders: dict[str, list[Holder]] = {pool.name: [] for pool in memory.pools}
    for label, seq, cached, held in memory.holders():
        for pool, pages, seen in held:
            holders[pool.name].append(Holder(label, seq, pages, seen, cached))
    for pool, reserved in memory.reserved:
        aside = np.array(reserved, np.int32)
        holders[pool.name].append(Holder("what is set aside", -1, aside, np.zeros_like(aside)))
    for pool in memory.pools:
        wrong += audit_pool(pool, holders[pool.name])
    for tables in memory.held_tables():
        for group, table in zip(memory.groups, tables, strict=True):
            wrong += group.faults(table)
        ends = {table.next_position for table in tables}
        if len(ends) > 1:
            wrong.append(f"a sequence or checkpoint ends at {sorted(ends)} in its groups")
    if wrong:
        raise AuditError("; ".join(wrong))


def audit_pool(pool: PagePool, holders: Iterable[Holder]) -> list[str]:
    """What is wrong with a pool, given everybody who holds pages of it."""
    holders = list(holders)
    counts, cached = np.zeros(pool.max_pages, np.int32), np.zeros(pool.max_pages, np.int32)
    for holder in holders:
        np.add.at(counts, holder.pages, 1)
        if holder.cached:
            np.add.at(cached, holder.pages, 1)
    live = np.zeros(pool.max_pages, bool)
    live[pool.live_pages] = True
    backed = np.frombuffer(pool.commitment.backed, np.uint8) > 0
    laws = {
        "references of holders differ from the count of pages": counts != pool.refs,
        "references of cached prefixes differ from their count": cached != pool.cached,
        "referenced pages are free": (pool.refs > 0) & ~live,
        "pages without a reference are not free": (pool.refs <= 0) & live,
        "live pages are not paid for": live & ~backed,
    }
    wrong = [f"{law}: {np.flatnonzero(bad).tolist()}" for law, bad in laws.items() if bad.any()]
    if pool.used != live.sum():
        wrong.append(f"{pool.used} pages counted as used, {live.sum()} are")
    only, some = int(((cached > 0) & (cached == counts)).sum()), int((cached > 0).sum())
    if (pool.cached_only, pool.cached_pages) != (only, some):
        wrong.append(
            f"{pool.cached_only} pages counted as only cached of {pool.cached_pages} cached, "
            f"{only} of {some} are"
        )
    if pool.commitment.count != backed.sum():
        wrong.append(f"{pool.commitment.count} pages counted as backed, {backed.sum()} are")
    return wrong + _audit_bytes(pool, np.flatnonzero(backed)) + _audit_writers(pool, holders)


def _audit_bytes(pool: PagePool, backed: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[str]:
    wrong: list[str] = []
    granule = pool.commitment.granularity
    starts = backed * pool.page_bytes // granule
    ends = -(-(backed + 1) * pool.page_bytes // granule)
    touched = {n for a, b in zip(starts.tolist(), ends.tolist(), strict=True) for n in range(a, b)}
    if len(touched) * granule != pool.committed and pool.commitment.gives_back:
        wrong.append(f"{pool.committed} bytes committed, pages lie on {len(touched) * granule}")
    held = pool.budget.breakdown
    if held.get(pool.use, 0) != pool.committed:
        wrong.append(f"{pool.committed} bytes committed, the budget says {held.get(pool.use, 0)}")
    if sum(held.values()) != pool.budget.used or pool.budget.used > pool.budget.limit:
        wrong.append(f"uses of the budget {held} against {pool.budget.used} used in all")
    return wrong


def _audit_writers(pool: PagePool, holders: list[Holder]) -> list[str]:
    """Whoever may not append to a shared page sees no slot that the appender may write."""
    wrong: list[str] = []
    for label, seq, pages, seen, _ in holders:
        shared = (pool.refs[pages] > 1) & (pool.appender[pages] != seq)
        for page in pages[shared & (seen > pool.frozen[pages])]:
            wrong.append(f"{label} sees slots of page {page} above {pool.frozen[page]} frozen ones")
    return wrong


def audit_table(table: Table) -> list[str]:
    """What is wrong with a table by itself."""
    label = f"a table of {table.length} slots"
    wrong: list[str] = []
    if table.n_pages != -(-table.length // table.page_tokens):
        wrong.append(f"{label}: {table.length} slots in {table.n_pages} pages")
        return wrong
    if len(np.unique(table.pages)) != table.n_pages:
        wrong.append(f"{label}: a page twice in {table.pages.tolist()}")
    if table.last_page != (table.pages[-1] if table.n_pages else -1):
        wrong.append(f"{label}: last page is {table.last_page}, pages {table.pages.tolist()}")
    positions = table.position_array()
    if table.next_position != (positions.max() + 1 if table.length else 0):
        wrong.append(f"{label}: goes on at {table.next_position} after {positions.tolist()}")
    if table.length and (positions[-1] == HOLE or (positions < HOLE).any()):
        wrong.append(f"{label}: ends in a hole or has a wrong position: {positions.tolist()}")
    if not table.by_page(positions != HOLE).any(axis=1).all():
        wrong.append(f"{label}: a page holds only holes: {positions.tolist()}")
    return wrong
