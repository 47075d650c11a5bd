"""Where the bytes of memory are, in numbers that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from quire.memory.groups.layout import AttentionLayout, Int32
from quire.memory.groups.table import HOLE, Table
from quire.memory.pages.pool import PagePool

if TYPE_CHECKING:
    from quire.memory.memory import Memory


class GroupStats(TypedDict):
    """Figures of one pool. Sharing never makes a token smaller, so each is a number of its own."""

    pages_used: int
    pages_free: int
    """Pages that could be taken now; the budget may allow fewer than the pool has."""
    pages_shared: int
    """Pages with two holders or more."""
    pages_cached: int
    """Pages that cached prefixes hold, alone or with others."""
    tokens_used: int
    """Slots that hold a token somebody can see."""
    tokens_held: int
    """Slots of all pages in use."""
    bytes_per_token: int
    bytes_used: int
    bytes_held: int
    bytes_wasted: int
    """Bytes held for no token."""
    waste_percent: float
    bytes_unshared: int
    """What would be held if every holder had its own copy."""
    bytes_committed: int
    """What the pool takes from the budget."""


def breakdown(memory: Memory) -> dict[str, dict[str, int]]:
    """Committed bytes by device, pool and what keeps them.

    A checkpoint counts for what only it keeps alive, cached prefixes for what only they do
    together, sequences for everything that some sequence sees.
    """
    devices: dict[str, dict[str, int]] = {device.name: {} for device in memory.devices}
    by_pool = {pool.name: _Uses(pool) for pool in memory.pools}
    for label, _, cached, held in memory.holders():
        for pool, pages, _ in held:
            by_pool[pool.name].add(label, cached, pages)
    for pool, aside in memory.reserved:
        by_pool[pool.name].reserve(aside)
    for pool in memory.pools:
        for use, size in by_pool[pool.name].sizes().items():
            devices[pool.device.name][f"{pool.name}: {use}"] = size
    return devices


class _Uses:
    """Who keeps the pages of one pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._by_sequence = np.zeros(pool.max_pages, bool)
        self._alone: Counter[str] = Counter()
        self._reserved: set[int] = set()

    def add(self, label: str, cached: bool, pages: Int32) -> None:
        if not label.startswith("checkpoint"):
            self._by_sequence[pages] = True
        elif not cached:
            self._alone[label] += int((self._pool.refs[pages] == 1).sum())

    def reserve(self, pages: Collection[int]) -> None:
        self._reserved |= set(pages)

    def sizes(self) -> dict[str, int]:
        """Bytes by use; together they are what is committed."""
        pool = self._pool
        pages = {
            "sequences": int(self._by_sequence.sum()),
            "set aside": sum(not self._by_sequence[page] for page in self._reserved),
            "cached prefixes": pool.cached_only,
            **self._alone,
        }
        pages["several checkpoints"] = pool.used - sum(pages.values())
        sizes = {use: n * pool.page_bytes for use, n in pages.items()}
        kept = "idle" if pool.commitment.gives_back else "idle, kept until the pool closes"
        sizes[f"rounding and {kept}"] = pool.committed - pool.used * pool.page_bytes
        return sizes


class Footprint(NamedTuple):
    """What one sequence holds in memory; what others hold too counts in full."""

    pages: int = 0
    pages_shared: int = 0
    bytes: int = 0
    bytes_shared: int = 0


def footprint(held: Iterable[tuple[PagePool, Int32, Int32]]) -> Footprint:
    """The sum of what these are."""
    pages = shared = size = shared_size = 0
    for pool, ids, _ in held:
        n, twice = len(ids), int((pool.refs[ids] > 1).sum())
        pages, shared = pages + n, shared + twice
        size, shared_size = size + n * pool.page_bytes, shared_size + twice * pool.page_bytes
    return Footprint(pages, shared, size, shared_size)


def distinct_pages(memory: Memory, names: Collection[str]) -> dict[str, int]:
    """How many pages checkpoints hold together, by pool."""
    found: dict[str, list[Int32]] = {pool.name: [] for pool in memory.pools}
    for name in names:
        for pool, pages, _ in memory.held_by(memory.checkpoints.get(name)):
            found[pool.name].append(pages)
    return {name: len(np.unique(np.concatenate(ids))) if ids else 0 for name, ids in found.items()}


def table_stats(
    layout: AttentionLayout, pool: PagePool, held: Collection[Table],
    parked: Collection[tuple[Int32, Int32]],
) -> GroupStats:  # fmt: skip
    """Figures of a group, given every table that holds pages of it.

    Of parked sequences it takes the pages that stayed, and how many slots of each they see.
    """
    top = int(pool.live_pages.max(initial=-1)) + 1
    visible = np.zeros((top, layout.page_tokens), bool)
    for table in held:
        visible[table.pages] |= table.by_page(table.position_array() != HOLE)
    for pages, seen in parked:
        visible[pages] |= np.arange(layout.page_tokens) < seen[:, None]
    unshared = sum(table.n_pages for table in held) + sum(len(pages) for pages, _ in parked)
    tokens = int(visible.sum())
    return pool_stats(pool, layout.page_tokens, layout.bytes_per_token, tokens, unshared)


def pool_stats(
    pool: PagePool, page_tokens: int, bytes_per_token: int, tokens: int, unshared: int
) -> GroupStats:
    """Figures of a pool with so many visible tokens, and pages if nobody shared any."""
    held_bytes, used_bytes = pool.used * pool.page_bytes, tokens * bytes_per_token
    room = pool.budget.free + pool.committed - held_bytes
    return GroupStats(
        pages_used=pool.used,
        pages_free=min(pool.max_pages - pool.used, room // pool.page_bytes),
        pages_shared=int((pool.refs > 1).sum()),
        pages_cached=pool.cached_pages,
        tokens_used=tokens,
        tokens_held=pool.used * page_tokens,
        bytes_per_token=bytes_per_token,
        bytes_used=used_bytes,
        bytes_held=held_bytes,
        bytes_wasted=held_bytes - used_bytes,
        waste_percent=100.0 * (held_bytes - used_bytes) / max(held_bytes, 1),
        bytes_unshared=unshared * pool.page_bytes,
        bytes_committed=pool.committed,
    )
