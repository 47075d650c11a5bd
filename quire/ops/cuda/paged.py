"""What attention on the GPU is made of: kinds of rows, layers, and a step's pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.ops import Heads, HeadsHandle, Int32, PageTables, Rope, RopeHandle
from quire.ops.cuda.arrays import CudaArray
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
            "KIND_K": self.k.kind, "KIND_V": self.v.kind, "SIZE_K": self.k.size,
            "SIZE_V": self.v.size, "ROW_K": self.k.row(dk), "ROW_V": self.v.row(dv),
        }  # fmt: skip

    def pointers(self, machine: Machine, base: int) -> tuple[torch.Tensor, ...]:
        """Values and scales of K, then of V, as kernels address them from a base."""
        half = machine.pointer(base, torch.float16)
        return machine.pointer(base, self.k.dtype), half, machine.pointer(base, self.v.dtype), half


class RopeTable(CudaArray):
    """Cosines and sines of positions: [n, n_rot]."""

    __slots__ = ("neox",)

    def __init__(self, values: torch.Tensor, neox: bool) -> None:
        super().__init__(values)
        self.neox = neox


@dataclass
class Paged:
    """One group's pages in one step."""

    base: int
    page_bytes: int
    page_tokens: int
    n: int
    counts: list[tuple[int, int, int]]
    """Runs of tokens of one sequence: first row, how many, the sequence's row."""
    spans: int
    """Spans of the longest sequence."""
    tables: torch.Tensor
    first: torch.Tensor
    length: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    slot_positions: torch.Tensor | None
    columns: tuple[int, int]
    """Of tables and of slot_positions."""
    machine: Machine
    _tiles: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def tiles(self, size: int) -> list[torch.Tensor]:
        """Tiles of at most so many tokens: first rows, counts, sequences."""
        if size not in self._tiles:
            found = [
                (row + at, min(size, count - at), seq)
                for row, count, seq in self.counts
                for at in range(0, count, size)
            ]
            columns = np.array(found, np.int32).reshape(-1, 3).T
            self._tiles[size] = self.machine.upload_all(list(columns))
        return self._tiles[size]


def layer_of(heads: HeadsHandle) -> Layer:
    """The layer behind a handle of this device."""
    assert isinstance(heads, Layer)
    return heads


def rope_of(rope: RopeHandle) -> Rope:
    """The embedding behind a handle of this device."""
    assert isinstance(rope, Rope)
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


def turns(rope: Rope, positions: torch.Tensor, mscale: float) -> torch.Tensor:
    """Cosines and sines of positions, made in float64."""
    freqs = torch.from_numpy(np.ascontiguousarray(rope.freqs, np.float64)).to(positions.device)
    angles = positions.double()[:, None] * freqs
    return (torch.cat([angles.cos(), angles.sin()], 1) * mscale).float()


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
