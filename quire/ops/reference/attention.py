"""What attention over pages means, in plain NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops import Heads, Rope
from quire.ops.reference.kv import (
    Bytes,
    kv_row_bytes,
    load_keys,
    load_values,
    store_keys,
    store_values,
)
from quire.ops.reference.matrices import Floats, Ints, rms_norm


@dataclass(frozen=True)
class Turn:
    """A rotary embedding at the positions of some tokens."""

    rope: Rope
    positions: Ints

    def __call__(self, x: Floats) -> Floats:
        """Rotates x [n, heads, dims]."""
        return rope(x, self.positions, self.rope)


def rope(x: Floats, positions: Ints, rope: Rope) -> Floats:
    """Rotates the first n_rot dimensions of x [n, heads, dims] by position."""
    angles = positions[:, None].astype(np.float64) * rope.freqs
    cos, sin = (f(angles)[:, None, :] * rope.mscale for f in (np.cos, np.sin))
    out = x.astype(np.float64)
    half = rope.n_rot // 2
    if rope.neox:
        first, second = slice(0, half), slice(half, rope.n_rot)
    else:
        first, second = slice(0, rope.n_rot, 2), slice(1, rope.n_rot, 2)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out.astype(np.float32)


@dataclass(frozen=True)
class Paged:
    """One group's pages in one step, as `_cpu.Pages` has them."""

    memory: Bytes
    """[pages, bytes of a page]."""
    page_tokens: int
    tables: Ints
    first: Ints
    length: Ints
    slots: Ints
    positions: Ints
    seq_rows: Ints
    slot_positions: Ints | None = None

    def positions_of(self, seq: int) -> Ints:
        """The position in each slot of a sequence, -1 for a hole."""
        n = int(self.length[seq])
        if self.slot_positions is not None:
            return self.slot_positions[seq, :n]
        return np.arange(n, dtype=np.int32) + np.int32(self.first[seq])

    def part(self, page: int, offset: int, heads: int, kind: str, dims: int) -> Bytes:
        """The bytes of one layer's K or V in a page."""
        size = heads * self.page_tokens * kv_row_bytes(kind, dims)
        return self.memory[page, offset : offset + size]


@dataclass(frozen=True)
class Layer:
    """One layer's attention: its shape, its types, where its K and V lie in a page."""

    heads: Heads
    type_k: str
    type_v: str
    k_offset: int
    v_offset: int
    q_norm: Floats | None = None
    k_norm: Floats | None = None
    eps: float = 0.0


def attention(qkv: Floats, layer: Layer, pages: Paged, turn: Turn | None) -> Floats:
    """Norm, rotation, storing, then softmax over what each token sees: [n, heads * dims of V]."""
    h = layer.heads
    n, at = len(qkv), h.n_heads * h.head_dim_k
    mid = at + h.n_kv_heads * h.head_dim_k
    q = qkv[:, :at].reshape(n, h.n_heads, h.head_dim_k)
    k = qkv[:, at:mid].reshape(n, h.n_kv_heads, h.head_dim_k)
    v = qkv[:, mid:].reshape(n, h.n_kv_heads, h.head_dim_v)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, layer.eps)
    if turn is not None:
        k = turn(k)
    for i, slot in enumerate(pages.slots):
        page, inside = divmod(int(slot), pages.page_tokens)
        store_keys(_key_part(layer, pages, page), layer.type_k, inside, k[i])
        store_values(_value_part(layer, pages, page), layer.type_v, inside, v[i])
    return attend(q.reshape(n, -1), layer, pages, turn)


def attend(q: Floats, layer: Layer, pages: Paged, turn: Turn | None) -> Floats:
    """The same for keys and values that are stored already."""
    h = layer.heads
    n = len(q)
    x = q.reshape(n, h.n_heads, h.head_dim_k)
    if layer.q_norm is not None:
        x = rms_norm(x, layer.q_norm, layer.eps)
    if turn is not None:
        x = turn(x)
    out = np.zeros((n, h.n_heads, h.head_dim_v), np.float64)
    for i in range(n):
        keys, values = _visible(layer, pages, int(pages.seq_rows[i]), int(pages.positions[i]))
        if len(keys):
            out[i] = _softmax_attention(x[i].astype(np.float64), keys, values, h)
    return out.reshape(n, -1).astype(np.float32)


def _key_part(layer: Layer, pages: Paged, page: int) -> Bytes:
    h = layer.heads
    return pages.part(page, layer.k_offset, h.n_kv_heads, layer.type_k, h.head_dim_k)


def _value_part(layer: Layer, pages: Paged, page: int) -> Bytes:
    h = layer.heads
    return pages.part(page, layer.v_offset, h.n_kv_heads, layer.type_v, h.head_dim_v)


def _visible(layer: Layer, pages: Paged, seq: int, position: int) -> tuple[Floats, Floats]:
    """Keys and values that a position of a sequence sees, [slots, heads, dims] each."""
    h = layer.heads
    at = pages.positions_of(seq)
    seen = (at >= 0) & (at <= position)
    if h.window:
        seen &= at > position - h.window
    slots = np.flatnonzero(seen)
    keys = np.empty((len(slots), h.n_kv_heads, h.head_dim_k), np.float32)
    values = np.empty((len(slots), h.n_kv_heads, h.head_dim_v), np.float32)
    for place in np.unique(slots // pages.page_tokens):
        page = int(pages.tables[seq, place])
        mine = slots // pages.page_tokens == place
        inside = slots[mine] % pages.page_tokens
        part = _key_part(layer, pages, page)
        keys[mine] = load_keys(part, layer.type_k, h.n_kv_heads, h.head_dim_k)[inside]
        part = _value_part(layer, pages, page)
        values[mine] = load_values(part, layer.type_v, h.n_kv_heads, h.head_dim_v)[inside]
    return keys, values


def _softmax_attention(
    q: NDArray[np.float64], keys: Floats, values: Floats, heads: Heads
) -> NDArray[np.float64]:
    group = heads.n_heads // heads.n_kv_heads
    grouped = q.reshape(heads.n_kv_heads, group, -1)
    scores = np.einsum("hgd,shd->hgs", grouped, keys.astype(np.float64)) * heads.scale
    if heads.softcap:
        scores = heads.softcap * np.tanh(scores / heads.softcap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: NDArray[np.float64] = np.einsum("hgs,shd->hgd", weights, values.astype(np.float64))
    return out.reshape(heads.n_heads, -1)


def rotate_keys(part: Bytes, kind: str, deltas: Ints, heads: int, dims: int, turn: Rope) -> None:
    """Turns the keys of a page's K part on by a number of positions per slot."""
    plain = Rope(turn.n_rot, turn.freqs, turn.neox)
    turned = rope(load_keys(part, kind, heads, dims), deltas, plain)
    for slot in np.flatnonzero(deltas):
        store_keys(part, kind, int(slot), turned[slot])
