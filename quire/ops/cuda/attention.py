"""The group `AttentionOps` of the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from quire.ops import Array, Heads, HeadsHandle, Int32, Pages, PageTables, Rope, RopeHandle
from quire.ops.cuda.arrays import Arrays, row_of, values_of
from quire.ops.cuda.kernels import attend as kernels
from quire.ops.cuda.kernels import heads as head_kernels
from quire.ops.cuda.machine import from_lowest, need, power_of_two
from quire.ops.cuda.paged import (
    KINDS,
    Layer,
    Paged,
    RopeTable,
    layer_of,
    need_placed,
    need_whole,
    rope_of,
    turns,
)
from quire.ops.cuda.products import MULTIPLY

SPAN = 512
"""Slots that are summed on their own; cut at absolute positions."""
_FULL = 264
"""Programs that fill a large GPU twice; with fewer, spans run in parallel."""


class Attention(Arrays):
    """The group `AttentionOps` of the table."""

    def rope(self, rope: Rope) -> RopeHandle:
        """The handle of a rotary embedding."""
        need(rope.n_rot > 0 and rope.n_rot == 2 * len(rope.freqs), "one frequency per pair")
        return RopeHandle(rope)

    def rope_table(self, rope: RopeHandle, positions: Int32) -> Array:
        """Cosines and sines for each position."""
        r = rope_of(rope)
        return RopeTable(turns(r, self.machine.upload(positions), r.mscale), r.neox)

    def heads(
        self, heads: Heads, type_k: str, type_v: str, q_norm: Array | None, k_norm: Array | None,
        eps: float,
    ) -> HeadsHandle:  # fmt: skip
        """The handle of a layer's attention; the norms are per head and may be None."""
        need(heads.n_heads > 0 and heads.n_kv_heads > 0, "there are no heads")
        need(heads.n_heads % heads.n_kv_heads == 0, "heads do not divide into kv heads")
        for kind, dims in ((type_k, heads.head_dim_k), (type_v, heads.head_dim_v)):
            need(kind in KINDS, f"unknown K/V type {kind}")
            need(dims > 0 and dims % (32 if kind[0] == "q" else 2) == 0, f"{dims} dims as {kind}")
        q_row, k_row = (
            None if norm is None else row_of(norm, heads.head_dim_k, "a norm")
            for norm in (q_norm, k_norm)
        )
        return HeadsHandle(Layer(heads, KINDS[type_k], KINDS[type_v], q_row, k_row, eps))

    def pages(self, view: PageTables, base: int, positions: Int32, seq_rows: Int32) -> Pages:
        """One group's pages as the kernels of a step see them."""
        need_whole(view, positions, seq_rows)
        n = len(view.slots)
        cuts = np.flatnonzero(np.diff(seq_rows)) + 1
        starts = np.concatenate([[0], cuts]).astype(int) if n else np.empty(0, int)
        ends = np.append(starts[1:], n)
        runs = [(int(a), int(b - a), int(seq_rows[a])) for a, b in zip(starts, ends, strict=True)]
        longest = int((view.length + view.first % SPAN).max(initial=0))
        holes = view.slot_positions
        pages = view.slots // view.page_tokens
        base, (tables, slots) = from_lowest(base, view.page_bytes, view.tables, pages)
        slots = slots * view.page_tokens + view.slots % view.page_tokens
        columns = [tables, view.first, view.length, slots, positions]
        uploaded = self.machine.upload_all(columns + ([] if holes is None else [holes]))
        widths = view.tables.shape[1], 0 if holes is None else holes.shape[1]
        first, length, at = uploaded[1], uploaded[2], uploaded[4]
        return Pages(Paged(
            base, view.page_bytes, view.page_tokens, n, runs, -(-longest // SPAN), uploaded[0],
            first, length, uploaded[3], at, None if holes is None else uploaded[5], widths,
            self.machine,
        ))  # fmt: skip

    def attention(
        self, qkv: Array, heads: HeadsHandle, pages: Pages, rope: Array | None, k_offset: int,
        v_offset: int, store: bool = True,
    ) -> Array:  # fmt: skip
        """Norms and rotates q and k, stores k and v in their pages and attends."""
        assert isinstance(pages, Paged)
        layer = layer_of(heads)
        h = layer.heads
        need_placed(layer, pages.page_bytes, pages.page_tokens, k_offset, v_offset)
        q = h.n_heads * h.head_dim_k
        kv = h.n_kv_heads * (h.head_dim_k + h.head_dim_v)
        shape = pages.n, q + kv if store else q
        need(qkv.shape == shape, f"attention: qkv is {qkv.shape} where {shape} is needed")
        if rope is not None:
            assert isinstance(rope, RopeTable)
            need(rope.shape[0] == shape[0], f"a rope table of {rope.shape[0]} rows")
            need(rope.shape[1] <= h.head_dim_k, f"rope turns {rope.shape[1]} dimensions")
        out = self.machine.empty(pages.n, h.n_heads * h.head_dim_v)
        if pages.n:
            offsets = k_offset, v_offset
            queries = self._enter(values_of(qkv), layer, pages, rope, offsets, store)
            self._attend(queries, out, layer, pages, offsets)
        return self.new(out)

    def _enter(
        self, qkv: torch.Tensor, layer: Layer, pages: Paged, rope: RopeTable | None,
        offsets: tuple[int, int], store: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Queries as attention takes them; keys and values are stored."""
        h, empty = layer.heads, self.machine.empty
        dtype = self.machine.half(layer.multiply)
        queries = empty(pages.n, h.n_heads * h.head_dim_k, dtype=dtype)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        head_kernels.enter[(pages.n, h.n_heads + (2 * h.n_kv_heads if store else 0))](
            qkv, queries, *layer.pointers(self.machine, pages.base), pages.slots,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            qkv if rope is None else rope.values, pages.page_bytes, *offsets, qkv.shape[1],
            layer.eps, N_ROT=0 if rope is None else rope.shape[1],
            NEOX=rope is not None and rope.neox, Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None, **layer.shapes(pages.page_tokens), num_warps=1,
        )  # fmt: skip
        return queries

    def _attend(
        self, queries: torch.Tensor, out: torch.Tensor, layer: Layer, pages: Paged,
        offsets: tuple[int, int],
    ) -> None:  # fmt: skip
        h, n = layer.heads, pages.n
        group = h.n_heads // h.n_kv_heads
        dtype = self.machine.half(layer.multiply)
        shapes = layer.shapes(pages.page_tokens)
        tile = _tile(shapes, group, max(count for _, count, _ in pages.counts), dtype)
        tiles = pages.tiles(max(tile["BM"] // group, 1))
        n_tiles, n_queries = len(tiles[0]), n * h.n_heads
        split = pages.spans > 1 and n_tiles * h.n_kv_heads < _FULL
        spans = pages.spans if split else 1
        parts, tops, masses = out, out, out
        if split:
            parts = self.machine.empty(spans, n_queries, h.head_dim_v)
            tops, masses = self.machine.empty(2, spans, n_queries)
        holes = pages.slot_positions
        kernels.attend[(n_tiles, h.n_kv_heads, spans)](
            queries, out, parts, tops, masses, *layer.pointers(self.machine, pages.base),
            pages.tables, pages.first, pages.length, pages.positions,
            pages.first if holes is None else holes, *tiles, n, *pages.columns, pages.page_bytes,
            *offsets, h.scale, h.softcap, h.window, MULTIPLY=MULTIPLY[dtype],
            CAPPED=h.softcap > 0, HOLES=holes is not None, SPLIT=split, SPAN=SPAN,
            **shapes, **tile,
        )  # fmt: skip
        if split:
            kernels.merge_splits[(triton.cdiv(n_queries, 4),)](
                out, parts, tops, masses, n_queries, spans, DV=h.head_dim_v, DVP=shapes["DVP"],
                BM=4, num_warps=1,
            )  # fmt: skip


def _tile(shapes: dict[str, Any], group: int, longest: int, dtype: torch.dtype) -> dict[str, Any]:
    """The shape of a tile: the queries of it change no bit, so they may follow the batch."""
    wide = max(shapes["DKP"], shapes["DVP"])
    exact = dtype is torch.float32
    most = 32 if exact else (64 if wide > 128 else 128)
    # Of values that are unpacked on the way, small and large tiles add in orders of their own.
    least = 64 if not exact and (shapes["KIND_K"] or shapes["KIND_V"]) else 16
    rows = min(power_of_two(longest * group, least), max(most, power_of_two(group, 16)))
    block = 32 if exact or wide > 128 else 64
    return {
        "BM": rows, "BN": block, "num_warps": 8 if rows >= 128 else 4,
        "num_stages": 1 if exact else 2,
    }  # fmt: skip
