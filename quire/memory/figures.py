"""Where the bytes of a pool are, in numbers that add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from quire.memory.interface import GroupStats
from quire.memory.layout import AttentionLayout, Int32
from quire.memory.pool import PagePool
from quire.memory.table import HOLE, Table


def breakdown(
    pool: PagePool,
    sequences: Collection[Int32],
    checkpoints: Mapping[str, Int32],
    aside: Collection[int],
) -> dict[str, int]:
    """Committed bytes by what keeps them: a checkpoint counts for what only it keeps alive.

    Given are the pages of each sequence, of each checkpoint, and those set aside.
    """
    by_sequence = np.zeros(pool.max_pages, bool)
    for pages_held in sequences:
        by_sequence[pages_held] = True
    pages = {
        "sequences": int(by_sequence.sum()),
        "set aside": len({page for page in aside if not by_sequence[page]}),
    }
    for name, ids in checkpoints.items():
        pages[f"checkpoint {name}"] = int((pool.refs[ids] == 1).sum())
    pages["several checkpoints"] = pool.used - sum(pages.values())
    parts = {part: n * pool.page_bytes for part, n in pages.items()}
    kept = "idle" if pool.backing.gives_back else "idle, kept until the pool closes"
    parts[f"rounding and {kept}"] = pool.committed - pool.used * pool.page_bytes
    return parts


def group_stats(
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
