"""The group `AttentionOps` of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from quire.ops import Array, Heads, HeadsHandle, Int32, Pages, PageTables, Rope, RopeHandle
from quire.ops.cuda import attend_native
from quire.ops.cuda.arrays import Arrays, Later, row_of, values_of
from quire.ops.cuda.kernels import attend as kernels
from quire.ops.cuda.kernels import heads as head_kernels
from quire.ops.cuda.machine import Machine, OnDevice, need, power_of_two
from quire.ops.cuda.paged import (
    KINDS,
    SPAN,
    TILES,
    CudaRope,
    Layer,
    Paged,
    RopeTable,
    layer_of,
    need_placed,
    need_whole,
    page_columns,
    rope_of,
    shape_of,
)
from quire.ops.cuda.products import MULTIPLY
from quire.ops.cuda.prompts import attend_prompt, prompt_tile

_AHEAD = 4
"""Up to so many tokens a kernel is launched before the one that it waits for has ended."""
_PROGRAMS = 2048
"""Programs that decoding is cut into at most, by spans of slots."""
_FULL = 264
"""Programs that fill a large GPU twice; with fewer, spans run in parallel."""


class Attention(Arrays):
    """The group `AttentionOps` of the table."""

    _counters: torch.Tensor | None = None

    def rope(self, rope: Rope) -> RopeHandle:
        """The handle of a rotary embedding."""
        need(rope.n_rot > 0 and rope.n_rot == 2 * len(rope.freqs), "one frequency per pair")
        return RopeHandle(CudaRope(rope, self.machine))

    def rope_table(self, rope: RopeHandle, positions: Int32 | OnDevice) -> Array:
        """Cosines and sines for each position."""
        mine = rope_of(rope)
        turns = mine.turns(self.machine.integers(positions), mine.rope.mscale)
        return RopeTable(turns, mine.rope.neox)

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
        return HeadsHandle(Layer(heads, KINDS[type_k], KINDS[type_v], q_row, k_row, eps))

    def pages(self, view: PageTables, base: int, positions: Int32, seq_rows: Int32) -> Pages:
        """One group's pages as the kernels of a step see them."""
        need_whole(view, positions, seq_rows)
        shape = shape_of(view, positions)
        columns = page_columns(view, positions, seq_rows, shape)
        return Pages(Paged(base, shape, self.machine.upload_all(columns)))

    def attention(
        self, qkv: Array, heads: HeadsHandle, pages: Pages, rope: Array | None, k_offset: int,
        v_offset: int, store: bool = True,
    ) -> Array:  # fmt: skip
        """Norms and rotates q and k, stores k and v in their pages and attends."""
        assert isinstance(pages, Paged)
        layer = layer_of(heads)
        h = layer.heads
        sizes = pages.shape
        need_placed(layer, sizes.page_bytes, sizes.page_tokens, k_offset, v_offset)
        q = h.n_heads * h.head_dim_k
        kv = h.n_kv_heads * (h.head_dim_k + h.head_dim_v)
        shape = sizes.tokens, q + kv if store else q
        need(qkv.shape == shape, f"attention: qkv is {qkv.shape} where {shape} is needed")
        if rope is not None:
            assert isinstance(rope, RopeTable)
            need(rope.shape[0] == shape[0], f"a rope table of {rope.shape[0]} rows")
            need(rope.shape[1] <= h.head_dim_k, f"rope turns {rope.shape[1]} dimensions")
        out = self.new(self.machine.empty(sizes.tokens, h.n_heads * h.head_dim_v))
        if sizes.tokens:
            call = _Call(values_of(qkv), layer, pages, rope, (k_offset, v_offset), store)
            if sizes.single:
                self._decode(call, out.base)
            else:
                queries = self._enter(call)
                out.pending = Later(lambda to: self._attend(call, queries, to))
        return out

    def _decode(self, call: _Call, out: torch.Tensor) -> None:
        """One token of each sequence, in one launch."""
        h, pages, shape = call.layer.heads, call.pages, call.pages.shape
        n_queries, rows = shape.seqs * h.n_heads, shape.seqs * h.n_kv_heads
        if attend_native.takes(self.machine, call.layer, shape.page_tokens):
            attend_native.decode(
                self.machine, call.layer, pages, call.rope, call.qkv, out, call.offsets,
                call.store, self._arrivals(rows),
            )  # fmt: skip
            return
        parts = self.machine.empty(shape.spans, n_queries, h.head_dim_v)
        tops, masses = self.machine.empty(2, shape.spans, n_queries)
        tile = _tile(call.layer, shape.page_tokens, 1, self.machine)
        if rows <= _FULL and tile["num_stages"] > 1:
            tile["num_stages"] = 5  # little else is in flight: two blocks at a time
        ahead = shape.seqs <= _AHEAD and self.machine.launches_ahead
        per = triton.cdiv(shape.spans * rows, _PROGRAMS)  # spans that one program takes
        kernels.decode[(shape.seqs, h.n_kv_heads, triton.cdiv(shape.spans, per))](
            call.qkv, out, parts, tops, masses, self._arrivals(rows),
            pages.base, pages.tables, pages.first, pages.length, pages.slots, pages.positions,
            call.q_norm, call.k_norm, call.turns, shape.seqs, shape.pages, shape.page_bytes,
            *call.offsets, call.qkv.shape[1], call.layer.eps, h.scale, h.softcap, h.window, per,
            **call.constants, **tile, CAPPED=h.softcap > 0, STORE=call.store, SPAN=SPAN,
            **_ahead(ahead),
        )  # fmt: skip

    def _arrivals(self, n: int) -> torch.Tensor:
        """Counters that are 0 between launches; graphs hold the ones they were made with."""
        if self._counters is None or len(self._counters) < n:
            size = power_of_two(n, 4096)
            self._counters = torch.zeros(size, dtype=torch.int32, device=self.machine.device)
        return self._counters

    def _enter(self, call: _Call) -> torch.Tensor:
        """Queries as attention takes them; keys and values are stored."""
        h, shape = call.layer.heads, call.pages.shape
        dtype = self.machine.half(call.layer.multiply)
        queries = self.machine.empty(shape.tokens, h.n_heads * h.head_dim_k, dtype=dtype)
        rows = min(power_of_two(h.n_heads), 16)
        parts = triton.cdiv(h.n_heads, rows)
        head_kernels.enter[(shape.tokens, parts + (2 if call.store else 0))](
            call.qkv, queries, call.pages.base, call.pages.slots, call.q_norm, call.k_norm,
            call.turns, shape.page_bytes, *call.offsets, call.qkv.shape[1], call.layer.eps,
            **call.constants, BQ=rows, BKV=power_of_two(h.n_kv_heads), Q_PARTS=parts,
            **_ahead(self.machine.launches_ahead),
        )  # fmt: skip
        return queries

    def _attend(self, call: _Call, queries: torch.Tensor, out: torch.Tensor) -> None:
        """What queries find in the pages."""
        h, pages, shape = call.layer.heads, call.pages, call.pages.shape
        if size := prompt_tile(self.machine, call.layer, pages, call.offsets):
            attend_prompt(self.machine, call.layer, pages, call.offsets, size, queries, out)
            return
        size = triton_tile(call.layer)
        tiles = pages.tiles(size)
        programs, n_queries = tiles.shape[1] * h.n_kv_heads, shape.tokens * h.n_heads
        at_once = spans_at_once(programs, shape.spans)
        parts = tops = masses = out
        if at_once:
            parts = self.machine.empty(at_once, n_queries, h.head_dim_v)
            tops, masses = self.machine.empty(2, at_once, n_queries)
        holes = pages.slot_positions
        tile = _tile(call.layer, shape.page_tokens, size, self.machine)
        for span, count, row in _waves(shape.spans, at_once) if at_once else [(0, 1, 0)]:
            kernels.attend[(tiles.shape[1], h.n_kv_heads, count)](
                queries, out, parts[row:], tops[row:], masses[row:], pages.base, pages.tables,
                pages.first, pages.length, pages.positions,
                pages.first if holes is None else holes, *tiles, shape.tokens, shape.pages,
                shape.holes, shape.page_bytes, *call.offsets, h.scale, h.softcap, h.window, span,
                CAPPED=h.softcap > 0, HOLES=holes is not None, SPLIT=at_once > 0, SPAN=SPAN,
                **call.layer.shapes(shape.page_tokens), **tile,
                **_ahead(self.machine.launches_ahead),
            )  # fmt: skip
            if at_once:
                kernels.merge_splits[(triton.cdiv(n_queries, 4),)](
                    out, parts, tops, masses, n_queries, row + count, DV=h.head_dim_v,
                    DVP=power_of_two(h.head_dim_v, 32), BM=4, LAST=span + count == shape.spans,
                    num_warps=1,
                )  # fmt: skip


def triton_tile(layer: Layer) -> int:
    """Tokens of a tile of a prompt."""
    return TILES[1] if layer.group * TILES[1] <= _most(layer) else TILES[0]


def spans_at_once(programs: int, spans: int) -> int:
    """Spans that run in parallel where programs that take them all are few; 0 where they do not.

    As many as fill the GPU: each takes memory for all queries. They are merged in order, so what
    was merged before is one more of them.
    """
    return min(1 + -(-2 * _FULL // programs), spans) if programs < _FULL else 0


def _waves(spans: int, at_once: int) -> Iterator[tuple[int, int, int]]:
    """The first span of each wave, their number, and where the first is put: behind what is known
    from the waves before."""
    span = row = 0
    while span < spans:
        count = min(at_once - row, spans - span)
        yield span, count, row
        span, row = span + count, 1


@dataclass(frozen=True)
class _Call:
    """One layer's attention in one step."""

    qkv: torch.Tensor
    layer: Layer
    pages: Paged
    rope: RopeTable | None
    offsets: tuple[int, int]
    store: bool

    @property
    def q_norm(self) -> torch.Tensor:
        return self.qkv if self.layer.q_norm is None else self.layer.q_norm

    @property
    def k_norm(self) -> torch.Tensor:
        return self.qkv if self.layer.k_norm is None else self.layer.k_norm

    @property
    def turns(self) -> torch.Tensor:
        return self.qkv if self.rope is None else self.rope.values

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels that norm, turn and store are compiled for."""
        rope = self.rope
        return self.layer.shapes(self.pages.shape.page_tokens) | {
            "N_ROT": 0 if rope is None else rope.shape[1],
            "NEOX": rope is not None and rope.neox,
            "Q_NORM": self.layer.q_norm is not None, "K_NORM": self.layer.k_norm is not None,
        }  # fmt: skip


def _ahead(ahead: bool) -> dict[str, Any]:
    """How a kernel is launched before the one that it waits for has ended."""
    return {"AHEAD": True, "launch_pdl": True} if ahead else {"AHEAD": False}


def _most(layer: Layer) -> int:
    """Queries that a program takes at most."""
    shapes = layer.shapes(16)
    wide = max(shapes["DKP"], shapes["DVP"])
    return 32 if layer.multiply is torch.float32 else (64 if wide > 128 else 128)


def _tile(layer: Layer, page_tokens: int, tokens: int, machine: Machine) -> dict[str, Any]:
    """The shape of a tile of so many tokens: it changes no bit, so it may follow the batch."""
    shapes = layer.shapes(page_tokens)
    group = layer.heads.n_heads // layer.heads.n_kv_heads
    dtype = machine.half(layer.multiply)
    exact = dtype is torch.float32
    # Of values that are unpacked on the way, small and large tiles add in orders of their own.
    least = 64 if not exact and (layer.k.kind or layer.v.kind) else 16
    rows = power_of_two(tokens * group, least)
    block = 32 if exact or max(shapes["DKP"], shapes["DVP"]) > 128 else 64
    return {
        "BM": rows, "BN": block, "MULTIPLY": MULTIPLY[dtype], "num_warps": 8 if rows >= 128 else 4,
        "num_stages": 1 if exact else 2,
    }  # fmt: skip
