"""A stand-in for the kernels: stores each token's id and position in the bytes of its slot.

It sees memory the way kernels do, through addresses, page views and layouts. So a token that was
put in the wrong slot, overwritten, lost or read from a freed page shows up as a wrong number.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.memory.attention import AttentionMemory
from quire.memory.budget import Budget
from quire.memory.interface import MicroBatch, PageView, SeqTokens
from quire.memory.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.state_layout import StateView
from quire.memory.table import Table
from quire.memory.window import WindowMemory

GROUP = "full"
Token = tuple[int, int]
"""A token's id and its position."""


def make_layout(
    page_tokens: int = 4, head_dim: int = 2, n_layers: int = 2, window: int | None = None
) -> AttentionLayout:
    """Rows of f32 of at least two values: room for an id and a position."""
    kind: Literal["attention", "window"] = "window" if window else "attention"
    layers = tuple(range(0, 2 * n_layers, 2))
    spec = GroupSpec(GROUP, kind, layers, 1, head_dim, head_dim, window)
    return AttentionLayout(spec, KVType.F32, KVType.F32, page_tokens)


def make_attention(
    page_tokens: int = 4, head_dim: int = 2, limit: int = 1 << 20, max_tokens: int | None = None,
    budget: Budget | None = None, n_layers: int = 2, window: int | None = None,
    swa_full: bool = False,
) -> AttentionMemory:  # fmt: skip
    """An attention memory, or one with a window, with the fake kernels and poisoned pages."""
    layout = make_layout(page_tokens, head_dim, n_layers, window)
    budget = budget or Budget(limit)
    if window:
        return WindowMemory(
            layout, budget, max_tokens, rotate=rotate, move=move, poison=True, swa_full=swa_full
        )
    return AttentionMemory(layout, budget, max_tokens, rotate=rotate, move=move, poison=True)


def _row(page_address: int, part: int, row_bytes: int, slot: int) -> NDArray[np.int32]:
    cell = (ctypes.c_int32 * 2).from_address(page_address + part + slot * row_bytes)
    return np.ctypeslib.as_array(cell)


def _rows(
    page_address: int, layout: AttentionLayout, slot: int
) -> list[tuple[int, NDArray[np.int32], NDArray[np.int32]]]:
    k_row = layout.type_k.row_bytes(layout.spec.head_dim_k)
    v_row = layout.type_v.row_bytes(layout.spec.head_dim_v)
    return [
        (
            layer,
            _row(page_address, layout.k_offset(layer), k_row, slot),
            _row(page_address, layout.v_offset(layer), v_row, slot),
        )
        for layer in layout.spec.layers
    ]


def write(ubatch: MicroBatch) -> None:
    """Stores the new tokens where the view says."""
    view = ubatch.views[GROUP]
    assert isinstance(view, PageView)
    write_pages(ubatch, view)


def write_pages(ubatch: MicroBatch, view: PageView) -> None:
    """Stores the new tokens in one group."""
    for token, position, where in zip(ubatch.tokens, ubatch.positions, view.slots, strict=True):
        assert where >= 0
        page, slot = divmod(int(where), view.page_tokens)
        for layer, k, v in _rows(view.address + page * view.page_bytes, view.layout, slot):
            k[:] = token, position
            v[:] = token, layer


def _read(page_address: int, layout: AttentionLayout, slot: int) -> Token:
    found = set()
    for layer, k, v in _rows(page_address, layout, slot):
        assert k[0] == v[0] and v[1] == layer, f"slot {slot}: K {k}, V {v} in layer {layer}"
        found.add((int(k[0]), int(k[1])))
    assert len(found) == 1, f"layers disagree: {found}"
    return found.pop()


def attend(view: PageView | StateView, row: int) -> list[Token]:
    """What the attention of one sequence sees, slot by slot."""
    assert isinstance(view, PageView)
    seen = []
    for i in range(int(view.length[row])):
        position = int(view.first[row]) + i
        if view.slot_positions is not None:
            position = int(view.slot_positions[row, i])
        if position >= 0:
            page = int(view.tables[row, i // view.page_tokens])
            assert page >= 0
            address = view.address + page * view.page_bytes
            token, stored = _read(address, view.layout, i % view.page_tokens)
            assert stored == position, f"K of token {token} is of {stored}, not {position}"
            seen.append((token, position))
    return seen


def history(memory: AttentionMemory, table: Table) -> list[Token]:
    """The tokens a table holds, in the order of its slots, with their present positions."""
    tokens = []
    pending = np.zeros(table.length, np.int32) if table.pending is None else table.pending
    for i, position in enumerate(table.position_array().tolist()):
        if position >= 0:
            address = memory.pool.page_address(int(table.pages[i // table.page_tokens]))
            token, stored = _read(address, memory.layout, i % table.page_tokens)
            assert stored + pending[i] == position
            tokens.append((token, position))
    return tokens


def rotate(page_address: int, layout: AttentionLayout, deltas: NDArray[np.int32]) -> None:
    """Moves the stored positions."""
    assert deltas.shape == (layout.page_tokens,)
    for slot in np.flatnonzero(deltas):
        for _, k, _ in _rows(page_address, layout, int(slot)):
            k[1] += deltas[slot]


def move(
    source: int, target: int, layout: AttentionLayout, source_slots: NDArray[np.int32],
    target_slots: NDArray[np.int32],
) -> None:  # fmt: skip
    """Copies tokens from page to page."""
    for a, b in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
        pairs = zip(_rows(source, layout, a), _rows(target, layout, b), strict=True)
        for (_, k, v), (_, new_k, new_v) in pairs:
            new_k[:], new_v[:] = k, v


def entry(seq: int, *tokens: int) -> SeqTokens:
    """New tokens of a sequence."""
    return SeqTokens(seq, np.array(tokens, np.int32))


def append(memory: AttentionMemory, seq: int, *tokens: int) -> None:
    """Computes and keeps tokens of one sequence."""
    with memory.reserve([entry(seq, *tokens)]) as lease:
        write(lease.ubatch)
        lease.commit({seq: len(tokens)})


def tokens_of(memory: AttentionMemory, seq: int) -> list[int]:
    """The ids of a sequence's tokens."""
    return [token for token, _ in history(memory, memory.table(seq))]


def snapshot(memory: AttentionMemory) -> dict[str, object]:
    """All that must be as before when an operation was refused or undone."""
    pool = memory.pool
    live = pool.live_pages
    tables = {
        f"sequence {seq}": (t.pages.tolist(), t.position_array().tolist(), t.next_position)
        for seq, t in memory._tables.items()
    }
    return {
        "tables": tables,
        "live": live.tolist(),
        "refs": pool.refs.tolist(),
        "frozen": pool.frozen[live].tolist(),
        "committed": pool.committed,
        "budget": (pool.budget.used, pool.budget.breakdown),
        "bytes": {int(p): pool.view(int(p)).tobytes() for p in live},
    }
