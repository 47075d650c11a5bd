"""What attention on the GPU is made of: kinds of rows, layers, and a step's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from quire.ops import Heads, HeadsHandle, Int32, PageTables, Rope, RopeHandle
from quire.ops.cuda.arrays import CudaArray
from quire.ops.cuda.kernels import heads as kernels
from quire.ops.cuda.machine import Machine, need, power_of_two


@dataclass(frozen=True)
class RowKind:
    """How a row of a head is stored."""

    kind: int
    dtype: torch.dtype
    multiply: torch.dtype
    size: int
    """Bytes of an element that addresses are counted in."""

    def row(self, dims: int) -> int:
        """Bytes of a row with its scales."""
        return self.levels(dims) + (dims // 32 * 2 if self.kind else 0)

    def levels(self, dims: int) -> int:
        """Bytes of a row without them."""
        return dims // 2 if self.kind == 2 else dims * self.size


TYPES = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8, torch.uint8: tl.uint8, torch.int64: tl.int64,
}  # fmt: skip
"""Of tensors, as kernels name them."""
KINDS = {
    "f32": RowKind(0, torch.float32, torch.float32, 4),
    "f16": RowKind(0, torch.float16, torch.float16, 2),
    "bf16": RowKind(0, torch.bfloat16, torch.bfloat16, 2),
    "q8_0": RowKind(1, torch.int8, torch.float16, 1),
    "q4_0": RowKind(2, torch.uint8, torch.float16, 1),
}


@dataclass(frozen=True)
class Layer:
    """One layer's attention."""

    heads: Heads
    k: RowKind
    v: RowKind
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.heads.n_heads // self.heads.n_kv_heads

    @property
    def multiply(self) -> torch.dtype:
        """The type that tensor cores multiply: the finer one of K and V."""
        both = {self.k.multiply, self.v.multiply}
        if len(both) > 1:
            return torch.float32
        return both.pop()

    def shapes(self, page_tokens: int) -> dict[str, Any]:
        """What kernels are compiled for."""
        h = self.heads
        dk, dv = h.head_dim_k, h.head_dim_v
        return {
            "KV_HEADS": h.n_kv_heads, "HEADS": h.n_heads, "DK": dk, "DV": dv,
            "DKP": power_of_two(dk, 32), "DVP": power_of_two(dv, 32), "TOKENS": page_tokens,
            "TYPE_K": TYPES[self.k.dtype], "TYPE_V": TYPES[self.v.dtype],
            "KIND_K": self.k.kind, "KIND_V": self.v.kind, "SIZE_K": self.k.size,
            "SIZE_V": self.v.size, "ROW_K": self.k.row(dk), "ROW_V": self.v.row(dv),
        }  # fmt: skip


class RopeTable(CudaArray):
    """Cosines and sines of positions: [n, n_rot]."""

    __slots__ = ("neox",)

    def __init__(self, values: torch.Tensor, neox: bool) -> None:
        super().__init__(values)
        self.neox = neox


SPAN = 128
"""Slots that are summed on their own; cut at absolute positions."""
TILES = (16, 64)
"""Tokens of one sequence that a program may take together."""


class PageShape(NamedTuple):
    """Sizes of a step's tables: what it has, or more, where a graph is made for more."""

    tokens: int
    seqs: int
    pages: int
    """Columns of the tables."""
    page_tokens: int
    page_bytes: int
    single: bool
    """Whether no sequence has more than one token."""
    holes: int
    """Columns of `slot_positions`, 0 where there are none."""

    @property
    def spans(self) -> int:
        """Spans that a sequence may reach into."""
        return (self.pages * self.page_tokens - 1) // SPAN + 2

    def tiles(self, size: int) -> int:
        """Tiles of so many tokens that there may be."""
        return self.tokens // size + self.seqs

    @property
    def sizes(self) -> list[int]:
        """Integers of each column."""
        tiles = [] if self.single else [3 * self.tiles(size) for size in TILES]
        tables = [self.seqs * self.pages, self.seqs, self.seqs, self.tokens, self.tokens]
        return [*tables, self.seqs * self.holes, *tiles]


def shape_of(view: PageTables, positions: Int32) -> PageShape:
    """The shape of a step as it is."""
    holes = 0 if view.slot_positions is None else view.slot_positions.shape[1]
    tokens, (seqs, pages) = len(positions), view.tables.shape
    longest = max(view.length.tolist(), default=0)
    used = min(pages, max(-(-longest // view.page_tokens), 1))
    return PageShape(
        tokens, seqs, used, view.page_tokens, view.page_bytes, tokens == seqs and not holes, holes
    )


def page_columns(
    view: PageTables, positions: Int32, seq_rows: Int32, shape: PageShape
) -> list[Int32]:
    """What kernels read of a step, in the order of `shape.sizes`; what fills them up is no token.

    That has slot -1, and a tile of it no tokens.
    """
    pages = min(shape.pages, view.tables.shape[1])
    tables = np.full((shape.seqs, shape.pages), -1, np.int32)
    tables[: len(view.tables), :pages] = view.tables[:, :pages]
    columns = [
        tables, filled(view.first, shape.seqs), filled(view.length, shape.seqs),
        filled(view.slots, shape.tokens, -1), filled(positions, shape.tokens),
    ]  # fmt: skip
    holes = view.slot_positions
    columns.append(np.empty(0, np.int32) if holes is None else holes)
    if not shape.single:
        columns += _tiles(seq_rows, shape)
    return columns


def _tiles(seq_rows: Int32, shape: PageShape) -> list[Int32]:
    """First rows, counts and sequences of the tiles of each size: [3, tiles]."""
    if len(seq_rows) and seq_rows[0] == seq_rows[-1]:  # one sequence, as most prompts
        return [_tiles_of_one(len(seq_rows), int(seq_rows[0]), size, shape) for size in TILES]
    cuts = np.flatnonzero(np.diff(seq_rows)) + 1
    starts = np.concatenate([[0], cuts]).astype(int) if len(seq_rows) else np.empty(0, int)
    counts = np.diff(np.append(starts, len(seq_rows)))
    return [_tiles_of(starts, counts, seq_rows, size, shape) for size in TILES]


def _tiles_of_one(tokens: int, row: int, size: int, shape: PageShape) -> Int32:
    found = np.zeros((3, shape.tiles(size)), np.int32)
    first = np.arange(0, tokens, size, dtype=np.int32)
    found[0, : len(first)] = first
    found[1, : len(first)] = size
    found[1, len(first) - 1] = tokens - first[-1]
    found[2, : len(first)] = row
    return found


def _tiles_of(starts: Any, counts: Any, seq_rows: Int32, size: int, shape: PageShape) -> Int32:
    per_run = -(-counts // size)
    run = np.repeat(np.arange(len(starts)), per_run)
    at = (np.arange(len(run)) - (np.cumsum(per_run) - per_run)[run]) * size
    found = np.zeros((3, shape.tiles(size)), np.int32)
    found[0, : len(run)] = starts[run] + at
    found[1, : len(run)] = np.minimum(size, counts[run] - at)
    found[2, : len(run)] = seq_rows[starts[run]] if len(run) else 0
    return found


def filled(values: Int32, size: int, with_: int = 0) -> Int32:
    """Values, and behind them as many others as are missing."""
    if len(values) == size:
        return values
    out = np.full(size, with_, np.int32)
    out[: len(values)] = values
    return out


class Paged:
    """One group's pages in one step: columns on the device, and where page 0 lies."""

    def __init__(self, base: int, shape: PageShape, columns: Sequence[torch.Tensor]) -> None:
        self.base, self.shape = base, shape
        self.tables, self.first, self.length, self.slots, self.positions, holes = columns[:6]
        self.slot_positions = holes if shape.holes else None
        self._tiles = {
            size: column.view(3, -1) for size, column in zip(TILES, columns[6:], strict=False)
        }

    def tiles(self, size: int) -> torch.Tensor:
        """Tiles of at most so many tokens: first rows, counts, sequences."""
        return self._tiles[size]


def layer_of(heads: HeadsHandle) -> Layer:
    """The layer behind a handle of this device."""
    assert isinstance(heads, Layer)
    return heads


def rope_of(rope: RopeHandle) -> CudaRope:
    """The embedding behind a handle of this device."""
    assert isinstance(rope, CudaRope)
    return rope


def need_placed(
    layer: Layer, page_bytes: int, page_tokens: int, k_offset: int, v_offset: int
) -> None:
    """Refuses K and V that would not lie inside a page."""
    h, tokens = layer.heads, page_tokens * layer.heads.n_kv_heads
    need(page_tokens > 0 and page_tokens % 16 == 0, "page_tokens must be a multiple of 16")
    need(page_bytes % 16 == 0, f"pages of {page_bytes} bytes: they must be multiples of 16")
    for offset, kind, dims in (
        (k_offset, layer.k, h.head_dim_k),
        (v_offset, layer.v, h.head_dim_v),
    ):
        inside = offset >= 0 and offset + tokens * kind.row(dims) <= page_bytes
        need(inside and offset % 16 == 0, f"K or V at {offset} lies outside a page, or unaligned")


class CudaRope:
    """A rotary embedding whose frequencies lie on the device."""

    def __init__(self, rope: Rope, machine: Machine) -> None:
        self.rope = rope
        self._freqs = machine.upload(np.ascontiguousarray(rope.freqs, np.float64))

    def turns(self, positions: torch.Tensor, mscale: float) -> torch.Tensor:
        """Cosines and sines of positions, made in float64: [n, n_rot]."""
        n, n_rot = len(positions), self.rope.n_rot
        out = torch.empty((n, n_rot), dtype=torch.float32, device=positions.device)
        if n:
            kernels.turns[(n,)](
                positions, self._freqs, out, mscale, HALF=n_rot // 2,
                BLOCK=power_of_two(n_rot // 2, 16), num_warps=1,
            )  # fmt: skip
        return out


def need_whole(view: PageTables, positions: Int32, seq_rows: Int32) -> None:
    """Refuses tables that do not fit together, and slots that are not those of their positions."""
    n_seqs, n_tokens, size = len(view.tables), len(view.slots), view.page_tokens
    need(size > 0 and size % 16 == 0, "page_tokens must be a multiple of 16")
    need(len(view.first) == n_seqs and len(view.length) == n_seqs, "one entry per sequence")
    need(len(positions) == n_tokens == len(seq_rows), "one entry per slot")
    inside = (seq_rows >= 0) & (seq_rows < n_seqs) & (view.slots >= 0)
    need(inside.all(), "a token of no sequence")
    rising = (seq_rows[1:] != seq_rows[:-1]) | (positions[1:] > positions[:-1])
    need(rising.all(), "a token does not come after the one before it")
    need((view.length <= view.tables.shape[1] * size).all(), "a table too short")
    if view.slot_positions is not None:
        need(len(view.slot_positions) == n_seqs, "one row of positions per sequence")
        need((view.length <= view.slot_positions.shape[1]).all(), "positions for every slot")
        return
    used = np.arange(view.tables.shape[1]) * size < view.length[:, None]
    need((view.tables[used] >= 0).all(), "a sequence without one of its pages")
    at = positions - view.first[seq_rows]
    need(((at >= 0) & (at < view.length[seq_rows])).all(), "a token outside its sequence")
    right = view.tables[seq_rows, at // size] * size + at % size
    need((view.slots == right).all(), "a token's slot is not the one of its position")
