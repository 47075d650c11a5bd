"""Sequences in poisoned pages, on the reference and on the GPU alike."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops import Heads, Ops, Rope
from quire.ops.reference.kv import kv_row_bytes
from tests.cuda.sides import Bytes, cuda, reference

Floats = NDArray[np.float32]
Work = Sequence[tuple[int, int]]
"""Sequences of a step, and how many new tokens each has."""
N_PAGES = 96


def full_rope(dims: int, neox: bool = True, n_rot: int = 0, mscale: float = 1.0) -> Rope:
    """A usual rotary embedding."""
    n = n_rot or dims
    return Rope(n, 10000.0 ** (-np.arange(0, n, 2) / n), neox, mscale)


class Tables:
    """Which pages sequences have: the same on both sides."""

    def __init__(self, page_tokens: int, page_bytes: int) -> None:
        self.page_tokens, self.page_bytes = page_tokens, page_bytes
        self.tables: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.slot_positions: dict[int, list[int]] = {}
        self.free = [int(p) for p in np.random.default_rng(5).permutation(N_PAGES)]

    def add(self, work: Work) -> tuple[Any, NDArray[np.int32], NDArray[np.int32]]:
        """Room for more tokens: the view, positions and sequences of a step."""
        slots, positions, rows, size = [], [], [], self.page_tokens
        for row, (seq, count) in enumerate(work):
            table = self.tables.setdefault(seq, [])
            old = self.length.get(seq, 0)
            for slot in range(old, old + count):
                if slot // size >= len(table):
                    table.append(self.free.pop())
                slots.append(table[slot // size] * size + slot % size)
                at = self.slot_positions.get(seq)
                positions.append(at[slot] if at else self.first.get(seq, 0) + slot)
                rows.append(row)
            self.length[seq] = old + count
        return self.view([seq for seq, _ in work], slots), _int32(positions), _int32(rows)

    def view(self, seqs: list[int], slots: list[int]) -> Any:
        """What the kernels see."""
        tables = np.full((len(seqs), max(len(self.tables[s]) for s in seqs)), -1, np.int32)
        for i, s in enumerate(seqs):
            tables[i, : len(self.tables[s])] = self.tables[s]
        holes = None
        if self.slot_positions:
            holes = np.full((len(seqs), max(self.length[s] for s in seqs)), -1, np.int32)
            for i, s in enumerate(seqs):
                n = self.length[s]
                plain = list(range(self.first.get(s, 0), self.first.get(s, 0) + n))
                holes[i, :n] = self.slot_positions.get(s, plain)[:n]
        return SimpleNamespace(
            page_bytes=self.page_bytes, page_tokens=self.page_tokens, tables=tables,
            first=_int32([self.first.get(s, 0) for s in seqs]),
            length=_int32([self.length[s] for s in seqs]), slots=_int32(slots),
            slot_positions=holes,
        )  # fmt: skip


class Side:
    """One implementation, with pages of its own."""

    def __init__(self, ops: Ops, rig: Rig) -> None:
        self.ops = ops
        self.bytes = Bytes(ops, N_PAGES, rig.page_bytes)
        norms = [None if n is None else ops.vector(n) for n in rig.norms]
        self.heads = ops.heads(rig.heads, rig.type_k, rig.type_v, norms[0], norms[1], 1e-6)
        self.rope = None if rig.rope is None else ops.rope(rig.rope)
        self.offsets = rig.offsets

    def run(self, step: Any, qkv: Floats, store: bool = True) -> Floats:
        """One step."""
        view, positions, rows = step
        pages = self.ops.pages(view, self.bytes.base, positions, rows)
        table = None if self.rope is None else self.ops.rope_table(self.rope, positions)
        out = self.ops.attention(
            self.ops.array(qkv), self.heads, pages, table, *self.offsets, store=store
        )
        return self.ops.numpy(out)


class Rig:
    """One layer in the middle of a page, and both sides of it."""

    def __init__(
        self, heads: Heads, type_k: str = "f16", type_v: str = "f16", page_tokens: int = 16,
        rope: Rope | None = None, norms: tuple[Floats | None, Floats | None] = (None, None),
        align: int = 64,
    ) -> None:  # fmt: skip
        self.heads, self.type_k, self.type_v = heads, type_k, type_v
        self.page_tokens, self.rope, self.norms = page_tokens, rope, norms
        tokens = heads.n_kv_heads * page_tokens
        k, v = (
            -(-tokens * kv_row_bytes(kind, dims) // align) * align
            for kind, dims in ((type_k, heads.head_dim_k), (type_v, heads.head_dim_v))
        )
        self.offsets = align, align + k + align
        self.page_bytes = k + v + 3 * align
        self.tables = Tables(page_tokens, self.page_bytes)
        self.want, self.got = Side(reference(), self), Side(cuda(), self)

    @property
    def cols(self) -> int:
        """Columns of q, k and v."""
        h = self.heads
        return (h.n_heads + h.n_kv_heads) * h.head_dim_k + h.n_kv_heads * h.head_dim_v

    def values(self, n: int, seed: int = 0) -> Floats:
        """Random q, k and v."""
        return np.random.default_rng(seed).standard_normal((n, self.cols)).astype(np.float32)


def _int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)
