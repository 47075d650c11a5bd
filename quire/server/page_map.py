"""Who holds which pages, and what a budget's bytes are for: small enough to send often.

`look` runs on the engine's loop and only takes copies of ids; `pool_map` and `budget_parts` make
what is sent of them, elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.memory.groups.layout import Int32
from quire.memory.memory import Memory
from quire.memory.pages.pool import PagePool

MAX_CELLS = 4096
"""A map has at most so many cells; each stands for several pages where there are more."""
MAX_HOLDERS = 64
"""Holders that are told by name; all others are one."""

Holder = tuple[str, str]
"""A kind (session, checkpoint, request, cached) and an id."""


@dataclass
class PoolLook:
    """One pool as it was at a moment."""

    name: str
    kind: str
    """What the budget calls its bytes: kv, window or state."""
    page_bytes: int
    pages_max: int
    pages_used: int
    committed: int
    refs: Int32
    cached: NDArray[np.bool_]
    cached_only: int
    by_label: dict[str, Int32] = field(default_factory=dict)

    @property
    def top(self) -> int:
        """Pages from this id on are free."""
        return len(self.refs)


def look(memory: Memory) -> list[PoolLook]:
    """All pools; between steps."""
    pools = {pool.name: _look(pool, group.kind) for group in memory.groups for pool in group.pools}
    for label, _, _, held in memory.holders(cached=False):
        for pool, pages, _ in held:
            if len(pages):
                pools[pool.name].by_label[label] = pages.copy()
    return list(pools.values())


def _look(pool: PagePool, kind: str) -> PoolLook:
    top = int(pool.live_pages.max(initial=-1)) + 1
    use = "state" if kind == "recurrent" else "window" if kind == "window" else "kv"
    return PoolLook(
        pool.name, use, pool.page_bytes, pool.max_pages, pool.used, pool.committed,
        pool.refs[:top].copy(), pool.cached[:top] > 0, pool.cached_only,
    )  # fmt: skip


def pool_map(pool: PoolLook, names: Mapping[str, Holder]) -> dict[str, Any]:
    """What is drawn of a pool; `names` says who is behind memory's labels."""
    per_cell = max(-(-pool.top // MAX_CELLS), 1)
    masks: dict[Holder, NDArray[np.bool_]] = {}
    for label, pages in pool.by_label.items():
        holder = names.get(label) or _nameless(label)
        if holder not in masks and len(masks) >= MAX_HOLDERS:
            holder = (holder[0], "")
        masks.setdefault(holder, np.zeros(pool.top, bool))[pages] = True
    if pool.cached.any():
        masks["cached", ""] = pool.cached
    shared = pool.refs > 1
    return {
        "name": pool.name, "kind": pool.kind, "page_bytes": pool.page_bytes,
        "pages_max": pool.pages_max, "pages_used": pool.pages_used,
        "pages_shared": int(shared.sum()),
        "per_cell": per_cell, "cells": -(-pool.top // per_cell), "shared": runs(shared, per_cell),
        "held": [
            {"kind": kind, "id": id, "pages": int(mask.sum()), "at": runs(mask, per_cell)}
            for (kind, id), mask in masks.items()
        ],
    }  # fmt: skip


def _nameless(label: str) -> Holder:
    return ("checkpoint" if label.startswith("checkpoint") else "request", "")


def runs(mask: NDArray[np.bool_], per_cell: int = 1) -> list[int]:
    """Where a mask is true, as start, length, start, length…, in cells."""
    if per_cell > 1:
        mask = np.logical_or.reduceat(mask, np.arange(0, len(mask), per_cell))
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    flat: list[int] = np.stack([starts, ends - starts], axis=1).ravel().tolist()
    return flat


def budget_parts(breakdown: Mapping[str, int], pools: list[PoolLook]) -> list[dict[str, Any]]:
    """The uses of a budget, in the order in which they are drawn; they add up to what is used."""
    left = dict(breakdown)
    parts = [_part("weights", "weights", left.pop("weights", 0))]
    kept = {"checkpoints": 0, "cached prefixes": 0}
    for pool in pools:
        left.pop(f"pages of {pool.name}", None)
        seen = np.zeros(pool.top, bool)
        for label, pages in pool.by_label.items():
            if not label.startswith("checkpoint"):
                seen[pages] = True
        alone = pool.pages_used - int(seen.sum()) - pool.cached_only
        kept["checkpoints"] += alone * pool.page_bytes
        kept["cached prefixes"] += pool.cached_only * pool.page_bytes
        rest = pool.committed - (alone + pool.cached_only) * pool.page_bytes
        name = f"K/V of {pool.name}" if pool.kind != "state" else pool.name
        parts.append(_part(name, pool.kind, rest))
    parts.append(_part("checkpoints", "checkpoints", kept["checkpoints"]))
    parts.append(_part("cached prefixes", "cached", kept["cached prefixes"]))
    parts.append(_part("compute", "compute", left.pop("compute", 0)))
    parts += [_part(use, "other", size) for use, size in left.items()]
    return parts


def _part(name: str, kind: str, size: int) -> dict[str, Any]:
    return {"name": name, "kind": kind, "bytes": size}
