"""Keys and values in pages: a token's row of a head, stored, loaded, turned and moved.

A part of a page holds, head by head, the rows of its tokens: values of the type, or levels of all
tokens and behind them the scales of all tokens, one for 32 values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.cuda.kernels.rows import inverse_root

F32 = tl.constexpr(0)
Q8_0 = tl.constexpr(1)
Q4_0 = tl.constexpr(2)
"""Kinds of rows; 0 stands for every type that is stored as it is."""


@triton.jit
def head_start(page_bytes, page, offset, head, TOKENS: tl.constexpr, ROW: tl.constexpr):
    """The byte at which a head's part of a page starts; ROW is the bytes of a token."""
    return page * page_bytes + offset + head * (TOKENS * ROW)


@triton.jit
def store_row(
    values, scales, start, slot, x, d, KIND: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Stores a token's row x [DP] of a head whose part starts at byte `start`."""
    if KIND == 0:
        at = start // SIZE + slot * D + d
        tl.store(values + at, x.to(values.dtype.element_ty), mask=d < D)
    else:
        groups: tl.constexpr = DP // 32
        g = tl.arange(0, groups)
        y = tl.reshape(x, [groups, 32])
        if KIND == 1:
            scale = tl.div_rn(tl.max(tl.abs(y), 1), tl.full([groups], 127.0, tl.float32))
        else:
            best = tl.argmax(tl.abs(y), 1, tie_break_left=True)
            mine = tl.arange(0, 32)[None, :] == best[:, None]
            scale = tl.sum(tl.where(mine, y, 0.0), 1) * -0.125
        one = tl.full([groups], 1.0, tl.float32)
        inverse = tl.where(scale == 0, 0.0, tl.div_rn(one, tl.where(scale == 0, 1.0, scale)))
        y = y * inverse[:, None]
        n_levels: tl.constexpr = D if KIND == 1 else D // 2
        if KIND == 1:
            whole = tl.floor(tl.abs(y))
            whole += tl.where(tl.abs(y) - whole >= 0.5, 1.0, 0.0)
            level = tl.reshape(tl.where(y < 0, -whole, whole), [DP]).to(tl.int8)
            tl.store(values + start + slot * n_levels + d, level, mask=d < D)
        else:
            level = tl.minimum((y + 8.5).to(tl.int32), 15)
            half = tl.arange(0, 2)[None, :, None] * 4
            pair = tl.sum(tl.reshape(level, [groups, 2, 16]) << half, 1)
            at = tl.arange(0, DP // 2)
            level = tl.reshape(pair, [DP // 2]).to(tl.uint8)
            tl.store(values + start + slot * n_levels + at, level, mask=at < n_levels)
        at = (start + TOKENS * n_levels) // 2 + slot * (D // 32) + g
        tl.store(scales + at, scale.to(tl.float16), mask=g < D // 32)


@triton.jit
def load_rows(
    values, scales, start, slot, d, inside, KIND: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rows of a head in float32 or the stored type: start, slot and d as broadcast together."""
    if KIND == 0:
        x = tl.load(values + (start // SIZE + slot * D + d), mask=inside, other=0.0)
    else:
        n_levels: tl.constexpr = D if KIND == 1 else D // 2
        if KIND == 1:
            x = tl.load(values + (start + slot * n_levels + d), mask=inside, other=0)
            x = x.to(tl.float32)
        else:
            at = start + slot * n_levels + d // 32 * 16 + d % 16
            x = tl.load(values + at, mask=inside, other=0)
            x = ((x >> (d // 16 % 2 * 4).to(tl.uint8)) & 15).to(tl.float32) - 8.0
        at = (start + TOKENS * n_levels) // 2 + slot * (D // 32) + d // 32
        x *= tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def partner(d, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """What a rotation pairs a dimension with, the number of the pair, and the sign of its sine."""
    if NEOX:
        second = d >= N_ROT // 2
        other = tl.where(second, d - N_ROT // 2, d + N_ROT // 2)
        pair = tl.minimum(d, other)
    else:
        second = d % 2 == 1
        other = tl.where(second, d - 1, d + 1)
        pair = d // 2
    return other, pair, tl.where(second, 1.0, -1.0)


@triton.jit
def _turned(
    x, weight, table, token, d, eps, D: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """A head's row, normed and rotated."""
    inside = d < D
    y = tl.load(x + d, mask=inside, other=0.0)
    inverse = 1.0
    if NORM:
        inverse = inverse_root(tl.sum(y * y, 0) / D, eps)
        y = y * inverse * tl.load(weight + d, mask=inside, other=0.0)
    if N_ROT > 0:
        turns = d < N_ROT
        other, pair, sign = partner(d, N_ROT, NEOX)
        z = tl.load(x + other, mask=turns, other=0.0)
        if NORM:
            z = z * inverse * tl.load(weight + other, mask=turns, other=0.0)
        cos = tl.load(table + token * N_ROT + pair, mask=turns, other=1.0)
        sin = tl.load(table + token * N_ROT + N_ROT // 2 + pair, mask=turns, other=0.0)
        y = y * cos + z * sign * sin
    return y


@triton.jit
def enter(
    qkv, q_out, k_values, k_scales, v_values, v_scales, slots, q_norm, k_norm, table, page_bytes,
    k_offset, v_offset, stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr, N_ROT: tl.constexpr,
    NEOX: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, KIND_K: tl.constexpr,
    KIND_V: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, ROW_K: tl.constexpr,
    ROW_V: tl.constexpr,
):  # fmt: skip
    """One head of one token: q is normed, turned and kept; k and v go into their page."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv + token * stride
    d = tl.arange(0, DKP)
    if head < HEADS:
        q = _turned(row + head * DK, q_norm, table, token, d, eps, DK, N_ROT, NEOX, Q_NORM)
        at = (token * HEADS + head) * DK + d
        tl.store(q_out + at, q.to(q_out.dtype.element_ty), mask=d < DK)
    else:
        where = tl.load(slots + token).to(tl.int64)
        page, slot = where // TOKENS, where % TOKENS
        if head < HEADS + KV_HEADS:
            k = _turned(row + head * DK, k_norm, table, token, d, eps, DK, N_ROT, NEOX, K_NORM)
            k_start = head_start(page_bytes, page, k_offset, head - HEADS, TOKENS, ROW_K)
            store_row(k_values, k_scales, k_start, slot, k, d, KIND_K, SIZE_K, TOKENS, DK, DKP)
        else:
            mine = head - HEADS - KV_HEADS
            e = tl.arange(0, DVP)
            values = row + (HEADS + KV_HEADS) * DK + mine * DV
            v = tl.load(values + e, mask=e < DV, other=0.0)
            v_start = head_start(page_bytes, page, v_offset, mine, TOKENS, ROW_V)
            store_row(v_values, v_scales, v_start, slot, v, e, KIND_V, SIZE_V, TOKENS, DV, DVP)


@triton.jit
def rotate(
    values, scales, pages, deltas, table, offsets, page_bytes, KV_HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr, N_ROT: tl.constexpr,
    NEOX: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Turns one token's key on, in place."""
    which, slot = tl.program_id(0) // TOKENS, tl.program_id(0) % TOKENS
    layer, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    at = tl.program_id(0)
    if tl.load(deltas + at) != 0:
        page = tl.load(pages + which).to(tl.int64)
        start = head_start(page_bytes, page, tl.load(offsets + layer), head, TOKENS, ROW)
        d = tl.arange(0, DP)
        turns = d < N_ROT
        other, pair, sign = partner(d, N_ROT, NEOX)
        y = load_rows(values, scales, start, slot, d, d < D, KIND, SIZE, TOKENS, D)
        z = load_rows(values, scales, start, slot, other, turns, KIND, SIZE, TOKENS, D)
        cos = tl.load(table + at * N_ROT + pair, mask=turns, other=1.0)
        sin = tl.load(table + at * N_ROT + N_ROT // 2 + pair, mask=turns, other=0.0)
        turned = y.to(tl.float32) * cos + z.to(tl.float32) * sign * sin
        tl.debug_barrier()  # every value is read before one is written
        store_row(values, scales, start, slot, turned, d, KIND, SIZE, TOKENS, D, DP)


@triton.jit
def _move_bytes(memory, source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(memory + target + at, tl.load(memory + source + at, mask=at < SIZE), mask=at < SIZE)


@triton.jit
def move(
    memory, from_pages, from_slots, to_pages, to_slots, offsets, page_bytes,
    KV_HEADS: tl.constexpr, TOKENS: tl.constexpr, ROW: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one token's row of a head; its first LEVELS bytes, then those of its scales."""
    i = tl.program_id(0)
    layer, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    offset = tl.load(offsets + layer)
    a, b = tl.load(from_slots + i), tl.load(to_slots + i)
    page = tl.load(from_pages + i).to(tl.int64)
    source = head_start(page_bytes, page, offset, head, TOKENS, ROW)
    page = tl.load(to_pages + i).to(tl.int64)
    target = head_start(page_bytes, page, offset, head, TOKENS, ROW)
    _move_bytes(memory, source + a * LEVELS, target + b * LEVELS, LEVELS, BLOCK)
    rest: tl.constexpr = ROW - LEVELS
    if rest > 0:
        source += TOKENS * LEVELS + a * rest
        target += TOKENS * LEVELS + b * rest
        _move_bytes(memory, source, target, rest, BLOCK)


@triton.jit
def copy_pages(memory, sources, targets, page_words, BLOCK: tl.constexpr):
    """Copies a piece of a page."""
    i = tl.program_id(0)
    source = tl.load(sources + i).to(tl.int64) * page_words
    target = tl.load(targets + i).to(tl.int64) * page_words
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < page_words
    tl.store(memory + target + at, tl.load(memory + source + at, mask=inside), mask=inside)
