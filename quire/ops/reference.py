"""What every operation means, in plain NumPy: the truth that kernels are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops import SILU_MUL, Heads, Rope

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]

BLOCK = 16
"""Tokens whose values of one dimension lie side by side in the keys of a page."""


# ---- activations, norm, rotation ------------------------------------------------------------


def silu(x: Floats) -> Floats:
    """x · sigmoid(x)."""
    y = x.astype(np.float64)
    return np.asarray(y / (1 + np.exp(-y)), np.float32)


def gelu(x: Floats) -> Floats:
    """The tanh approximation of gelu."""
    y = x.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)
    return np.asarray(0.5 * y * (1 + np.tanh(inner)), np.float32)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x divided by its root mean square over the last axis, times weight."""
    y = x.astype(np.float64)
    scale = 1 / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    return np.asarray(y * scale * weight, np.float32)


def add_norm(into: Floats, x: Floats, weight: Floats, eps: float) -> Floats:
    """What `into` holds afterwards."""
    return into + rms_norm(x, weight, eps)


def softcap(x: Floats, cap: float) -> Floats:
    """x held softly between -cap and cap."""
    return np.asarray(cap * np.tanh(x.astype(np.float64) / cap), np.float32)


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


# ---- keys and values in pages ---------------------------------------------------------------


def kv_row_bytes(kind: str, dims: int) -> int:
    """Bytes of one token's row of one kv head."""
    if kind in ("q8_0", "q4_0"):
        return dims // 32 * {"q8_0": 34, "q4_0": 18}[kind]
    return dims * {"f32": 4, "f16": 2, "bf16": 2}[kind]


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    """The upper half of a float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def quantize(kind: str, x: Floats) -> tuple[Bytes, NDArray[np.float16]]:
    """Rows of groups of 32 as bytes and scales, in ggml's way; q4_0 puts d and d+16 in a byte."""
    groups = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    at = np.abs(groups).argmax(-1)[..., None]
    extreme = np.take_along_axis(groups, at, -1)
    with np.errstate(divide="ignore"):
        scale = np.abs(extreme) / np.float32(127) if kind == "q8_0" else extreme / np.float32(-8)
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    y = groups * inverse
    if kind == "q8_0":
        whole = np.floor(np.abs(y))
        q = np.copysign(whole + (np.abs(y) - whole >= 0.5), y).astype(np.int8).view(np.uint8)
    else:
        n = np.minimum(np.trunc(y + np.float32(8.5)), 15).astype(np.uint8)
        q = n[..., :16] | n[..., 16:] << 4
    return q.reshape(*x.shape[:-1], -1), scale[..., 0].astype(np.float16)


def dequantize(kind: str, q: Bytes, scales: NDArray[np.float16]) -> Floats:
    """The inverse of quantize."""
    groups = np.ascontiguousarray(q).reshape(*scales.shape, -1)
    if kind == "q8_0":
        values = groups.view(np.int8).astype(np.float32)
    else:
        values = np.concatenate([groups & 15, groups >> 4], -1).astype(np.float32) - 8
    out: Floats = values * scales[..., None].astype(np.float32)
    return out.reshape(*scales.shape[:-1], -1)


_DENSE: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def _dense(kind: str, x: Floats) -> NDArray[np.generic]:
    return to_bf16(x) if kind == "bf16" else x.astype(_DENSE[kind])


def _widen(kind: str, x: NDArray[np.generic]) -> Floats:
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def _key_views(part: Bytes, kind: str, heads: int, dims: int) -> tuple[Bytes, NDArray[np.float16]]:
    """Bytes [head, block, rows, 16] and scales [head, block, dims/32, 16] of quantised keys."""
    blocks = part.reshape(heads, -1, BLOCK * kv_row_bytes(kind, dims))
    n = BLOCK * dims // (1 if kind == "q8_0" else 2)
    shape = (heads, blocks.shape[1], -1, BLOCK)
    return blocks[..., :n].reshape(shape), blocks[..., n:].view(np.float16).reshape(shape)


def store_keys(part: Bytes, kind: str, slot: int, x: Floats) -> None:
    """Puts one token's keys x [heads, dims] into a slot of a page's K part."""
    heads, dims = x.shape
    block, lane = divmod(slot, BLOCK)
    if kind in _DENSE:
        view = part.view(_DENSE[kind]).reshape(heads, -1, dims, BLOCK)
        view[:, block, :, lane] = _dense(kind, x)
        return
    q, scales = _key_views(part, kind, heads, dims)
    q[:, block, :, lane], scales[:, block, :, lane] = quantize(kind, x)


def load_keys(part: Bytes, kind: str, heads: int, dims: int) -> Floats:
    """A page's keys as float32 [page_tokens, heads, dims]."""
    if kind in _DENSE:
        values = _widen(kind, part.view(_DENSE[kind]).reshape(heads, -1, dims, BLOCK))
        return values.transpose(1, 3, 0, 2).reshape(-1, heads, dims)
    q, scales = _key_views(part, kind, heads, dims)
    order = (1, 3, 0, 2)
    return dequantize(kind, q.transpose(order), scales.transpose(order)).reshape(-1, heads, dims)


def _value_views(
    part: Bytes, kind: str, heads: int, dims: int
) -> tuple[Bytes, NDArray[np.float16]]:
    """Bytes [head, token, bytes] and scales [head, token, dims/32] of quantised values."""
    rows = part.reshape(heads, -1)
    tokens = rows.shape[1] // kv_row_bytes(kind, dims)
    n = tokens * dims // (1 if kind == "q8_0" else 2)
    shape = (heads, tokens, -1)
    return rows[:, :n].reshape(shape), rows[:, n:].view(np.float16).reshape(shape)


def store_values(part: Bytes, kind: str, slot: int, x: Floats) -> None:
    """Puts one token's values x [heads, dims] into a slot of a page's V part."""
    heads, dims = x.shape
    if kind in _DENSE:
        part.view(_DENSE[kind]).reshape(heads, -1, dims)[:, slot] = _dense(kind, x)
        return
    q, scales = _value_views(part, kind, heads, dims)
    q[:, slot], scales[:, slot] = quantize(kind, x)


def load_values(part: Bytes, kind: str, heads: int, dims: int) -> Floats:
    """A page's values as float32 [page_tokens, heads, dims]."""
    if kind in _DENSE:
        return _widen(kind, part.view(_DENSE[kind]).reshape(heads, -1, dims)).transpose(1, 0, 2)
    q, scales = _value_views(part, kind, heads, dims)
    return dequantize(kind, q, scales).reshape(heads, -1, dims).transpose(1, 0, 2)


# ---- attention over pages -------------------------------------------------------------------


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


def attention(qkv: Floats, layer: Layer, pages: Paged, turn: Rope | None) -> Floats:
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
        k = rope(k, pages.positions, turn)
    for i, slot in enumerate(pages.slots):
        page, inside = divmod(int(slot), pages.page_tokens)
        store_keys(_key_part(layer, pages, page), layer.type_k, inside, k[i])
        store_values(_value_part(layer, pages, page), layer.type_v, inside, v[i])
    return attend(q.reshape(n, -1), layer, pages, turn)


def attend(q: Floats, layer: Layer, pages: Paged, turn: Rope | None) -> Floats:
    """The same for keys and values that are stored already."""
    h = layer.heads
    n = len(q)
    x = q.reshape(n, h.n_heads, h.head_dim_k)
    if layer.q_norm is not None:
        x = rms_norm(x, layer.q_norm, layer.eps)
    if turn is not None:
        x = rope(x, pages.positions, turn)
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


# ---- sampling -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """What one sequence wants of its samples; 0 turns top_k off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


def edit_logits(
    logits: Floats, sampling: Sampling, counts: dict[int, int], allowed: NDArray[np.bool_] | None
) -> Floats:
    """Bias, penalties for the tokens counted, then minus infinity where not allowed.

    A count of 0 is a prompt's token, which only the repetition penalty is about.
    """
    x = logits.astype(np.float32)
    for token, value in sampling.bias:
        x[token] += np.float32(value)
    repetition = np.float32(sampling.repetition_penalty)
    for token, count in counts.items():
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        if count > 0:
            frequency = np.float32(sampling.frequency_penalty) * np.float32(count)
            x[token] -= frequency + np.float32(sampling.presence_penalty)
    if allowed is not None:
        x[~allowed] = -np.inf
    return x


def candidates(x: Floats, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that the filters leave, most likely first (ties by id), and their probabilities."""
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -np.inf]
    if sampling.temperature == 0:
        return order[:1], np.ones(1)
    if sampling.top_k:
        order = order[: sampling.top_k]
    y = x[order].astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.where(y == y[0], 1.0, np.exp((y - y[0]) / np.float32(sampling.temperature)))
    if sampling.top_p < 1:
        reached = np.cumsum(weights) >= sampling.top_p * weights.sum()
        keep = int(reached.argmax()) + 1 if reached.any() else len(order)
        order, weights = order[:keep], weights[:keep]
    keep = int((weights >= sampling.min_p).sum())
    order, weights = order[:keep], weights[:keep]
    return order, weights / weights.sum()


def probabilities(x: Floats, sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that a sample of edited logits is drawn from."""
    order, p = candidates(x, sampling)
    out = np.zeros(len(x))
    out[order] = p
    return out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def race(tokens: NDArray[np.int64], p: NDArray[np.float64], u: float) -> NDArray[np.float64]:
    """Scores in an exponential race: p / -log(u_i), with u_i hashed from u and the token's id."""
    key = _mix(np.array([u]).view(np.uint64))
    number = _mix(key + (tokens + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    u_i = (number >> np.uint64(11) | np.uint64(1)).astype(np.float64) * 2.0**-53
    score: NDArray[np.float64] = p / -np.log(u_i)
    return score


def sample(x: Floats, sampling: Sampling, u: float) -> int:
    """The token of the highest score in the race, ties by id."""
    order, p = candidates(x, sampling)
    score = race(order, p, u)
    return int(order[score == score.max()].min())


def logprobs(logits: Floats, ids: Ints, top: int) -> tuple[Floats, Ints, Floats]:
    """Log-softmax of ids, and the `top` most likely tokens with theirs, row by row."""
    x = logits.astype(np.float64)
    best = x.max(-1, keepdims=True)
    p = x - best - np.log(np.exp(x - best).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top]
    chosen = np.take_along_axis(p, ids[:, None].astype(np.int64), -1)[:, 0]
    tops = np.take_along_axis(p, order, -1)
    return chosen.astype(np.float32), order.astype(np.int32), tops.astype(np.float32)


# ---- matrices -------------------------------------------------------------------------------


def quantize_activations(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Rows as int8 in groups of 32 columns, and the scale of each group."""
    groups = np.ascontiguousarray(x, np.float32).reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        scale = np.where(top < 1e-30, np.float32(0), top / np.float32(127))
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    q = np.rint(groups * inverse[..., None]).astype(np.int8)
    return q.reshape(x.shape), scale


def linear(
    x: Floats,
    w: Floats,
    norm: Floats | None = None,
    eps: float = 0.0,
    act: int = 0,
    bias: Floats | None = None,
    into: Floats | None = None,
    exact: bool = False,
) -> Floats:
    """w · prologue(x) + bias (+ into); activations go through int8 unless exact."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if act:
        gate, up = np.split(x, 2, axis=-1)
        x = (silu if act == SILU_MUL else gelu)(gate) * up
    y = x.astype(np.float64)
    if not exact:
        q, scale = quantize_activations(x)
        y = q.astype(np.float64) * np.repeat(scale.astype(np.float64), 32, axis=-1)
    out = y @ w.astype(np.float64).T
    for term in (bias, into):
        if term is not None:
            out = out + term
    return out.astype(np.float32)


def linear_fine(x: Floats, w: Floats, norm: Floats, eps: float) -> Floats:
    """w · rms_norm(x) with 16 bits of each activation: int8, and int8 of what that loses."""
    h = rms_norm(x, norm, eps)
    q, scales = quantize_activations(h)
    groups = q.reshape(*scales.shape, -1) * scales[..., None]
    rest = (h - groups.reshape(h.shape)).astype(np.float32)
    return linear(h, w) + linear(rest, w)


def embed(table: Floats, ids: Ints, scale: float = 1.0) -> Floats:
    """Rows of a matrix by id, times scale."""
    return table[ids] * np.float32(scale)
