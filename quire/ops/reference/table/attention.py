"""Attention over pages that lie at an address."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.ops import Array, Heads, HeadsHandle, Int32, Pages, PageTables, Rope, RopeHandle
from quire.ops.reference import attention
from quire.ops.reference.kv import BLOCK, kv_row_bytes
from quire.ops.reference.table.arrays import Arrays, HostArray, row_of, values_of
from quire.ops.reference.table.memory import need, page_rows

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")


class RopeTable(HostArray):
    """Cosines and sines of positions, and what they were made of."""

    def __init__(self, turn: attention.Turn) -> None:
        rope = turn.rope
        angles = turn.positions[:, None] * rope.freqs
        super().__init__(
            (np.concatenate([np.cos(angles), np.sin(angles)], 1) * rope.mscale).astype(np.float32)
        )
        self.turn = turn


def layer_of(heads: HeadsHandle) -> attention.Layer:
    """The layer behind a handle of this device."""
    assert isinstance(heads, attention.Layer)
    return heads


def rope_of(rope: RopeHandle) -> Rope:
    """The embedding behind a handle of this device."""
    assert isinstance(rope, Rope)
    return rope


def placed(
    heads: HeadsHandle, page_bytes: int, page_tokens: int, k_offset: int, v_offset: int
) -> attention.Layer:
    """The layer with its K and V at these offsets of a page."""
    layer = replace(layer_of(heads), k_offset=k_offset, v_offset=v_offset)
    h, tokens = layer.heads, page_tokens * layer.heads.n_kv_heads
    need(page_tokens > 0 and page_tokens % BLOCK == 0, "page_tokens must be a multiple of 16")
    for offset, kind, dims in (
        (k_offset, layer.type_k, h.head_dim_k),
        (v_offset, layer.type_v, h.head_dim_v),
    ):
        end = offset + tokens * kv_row_bytes(kind, dims)
        need(offset >= 0 and end <= page_bytes, f"K or V at {offset} lies outside a page")
    return layer


class Attention(Arrays):
    """The group `AttentionOps` of the table."""

    def rope(self, rope: Rope) -> RopeHandle:
        """The handle of a rotary embedding."""
        need(rope.n_rot > 0 and rope.n_rot == 2 * len(rope.freqs), "one frequency per pair")
        return RopeHandle(rope)

    def rope_table(self, rope: RopeHandle, positions: Int32) -> Array:
        """Cosines and sines for each position."""
        table = RopeTable(attention.Turn(rope_of(rope), positions))
        self._arrays.add(table)
        return table

    def heads(
        self, heads: Heads, type_k: str, type_v: str, q_norm: Array | None, k_norm: Array | None,
        eps: float,
    ) -> HeadsHandle:  # fmt: skip
        """The handle of a layer's attention; the norms are per head and may be None."""
        need(heads.n_heads > 0 and heads.n_kv_heads > 0, "there are no heads")
        need(heads.n_heads % heads.n_kv_heads == 0, "heads do not divide into kv heads")
        sides = (("K", type_k, heads.head_dim_k), ("V", type_v, heads.head_dim_v))
        for side, kind, dims in sides:
            need(kind in KINDS, f"unknown K/V type {kind}")
            step = 32 if kind[0] == "q" else 2
            told = f"head dimension {dims} of {side} as {kind} must be a multiple of {step}"
            need(dims > 0 and dims % step == 0, told)
        q_row, k_row = (
            None if norm is None else row_of(norm, heads.head_dim_k, "a norm")
            for norm in (q_norm, k_norm)
        )
        return HeadsHandle(attention.Layer(heads, type_k, type_v, 0, 0, q_row, k_row, eps))

    def pages(self, view: PageTables, base: int, positions: Int32, seq_rows: Int32) -> Pages:
        """One group's pages as the kernels of a step see them."""
        last = max(view.tables.max(initial=0), view.slots.max(initial=0) // view.page_tokens)
        paged = attention.Paged(
            page_rows(base, view.page_bytes, int(last) + 1), view.page_tokens, view.tables,
            view.first, view.length, view.slots, positions, seq_rows, view.slot_positions,
        )  # fmt: skip
        need_whole(paged)
        return Pages(paged)

    def attention(
        self, qkv: Array, heads: HeadsHandle, pages: Pages, rope: Array | None, k_offset: int,
        v_offset: int, store: bool = True,
    ) -> Array:  # fmt: skip
        """Norms and rotates q and k, stores k and v in their pages and attends."""
        assert isinstance(pages, attention.Paged)
        h = layer_of(heads).heads
        layer = placed(heads, pages.memory.shape[1], pages.page_tokens, k_offset, v_offset)
        q, k, v = h.n_heads * h.head_dim_k, h.n_kv_heads * h.head_dim_k, h.n_kv_heads * h.head_dim_v
        shape = len(pages.slots), q + k + v if store else q
        need(qkv.shape == shape, f"attention: qkv is {qkv.shape} where {shape} is needed")
        turn = None
        if rope is not None:
            assert isinstance(rope, RopeTable)
            need(rope.shape[0] == shape[0], f"a rope table of {rope.shape[0]} rows")
            need(rope.shape[1] <= h.head_dim_k, f"rope turns {rope.shape[1]} dimensions")
            turn = rope.turn
        run = attention.attention if store else attention.attend
        return self.new(run(values_of(qkv), layer, pages, turn))


def need_whole(pages: attention.Paged) -> None:
    """Refuses tables that do not fit together, and slots that are not those of their positions."""
    n_seqs, n_tokens = len(pages.tables), len(pages.slots)
    need(pages.page_tokens > 0 and pages.page_tokens % BLOCK == 0, "page_tokens")
    need(len(pages.first) == n_seqs and len(pages.length) == n_seqs, "one entry per sequence")
    need(len(pages.positions) == n_tokens == len(pages.seq_rows), "one entry per slot")
    rows = pages.seq_rows
    need(((rows >= 0) & (rows < n_seqs) & (pages.slots >= 0)).all(), "a token of no sequence")
    rising = (rows[1:] != rows[:-1]) | (pages.positions[1:] > pages.positions[:-1])
    need(rising.all(), "a token does not come after the one before it")
    need((pages.length <= pages.tables.shape[1] * pages.page_tokens).all(), "a table too short")
    if pages.slot_positions is not None:
        need(len(pages.slot_positions) == n_seqs, "one row of positions per sequence")
        need((pages.length <= pages.slot_positions.shape[1]).all(), "positions for every slot")
        return
    used = np.arange(pages.tables.shape[1]) * pages.page_tokens < pages.length[:, None]
    need((pages.tables[used] >= 0).all(), "a sequence without one of its pages")
    at = pages.positions - pages.first[rows]
    need(((at >= 0) & (at < pages.length[rows])).all(), "a token outside its sequence")
    page = pages.tables[rows, at // pages.page_tokens]
    right = page * pages.page_tokens + at % pages.page_tokens
    need((pages.slots == right).all(), "a token's slot is not the one of its position")
