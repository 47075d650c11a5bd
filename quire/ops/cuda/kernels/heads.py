"""Keys and values in pages: a token's row of a head, stored, loaded, turned and moved.

A part of a page holds, head by head, the rows of its tokens: values of the type, or levels of all
tokens and behind them the scales of all tokens, one for 32 values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.cuda.kernels.rows import inverse_root

F32 = tl.constexpr(0)
Q8_0 = tl.constexpr(1)
Q4_0 = tl.constexpr(2)
"""Kinds of rows; 0 stands for every type that is stored as it is."""


@triton.jit
def pages_at(base, TYPE: tl.constexpr):
    """A pool's pages as values of a type; page 0 lies at address `base`, with memory or without."""
    return tl.multiple_of(base.to(tl.pointer_type(TYPE)), 16)


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
def _mean_square(y, D: tl.constexpr):
    """The mean of squares of rows, with the same bits in whatever order a kernel adds them.

    So it is added in integers, as parts of the largest value's square.
    """
    most = tl.max(tl.abs(y), 1)
    exponent = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 30), 250)
    scale = ((274 - exponent) << 23).to(tl.float32, bitcast=True)  # |y| · scale < 2^21
    x = y * scale[:, None]
    total = tl.sum((x * x).to(tl.int64), 1).to(tl.float32)
    inverse = ((exponent - 20) << 23).to(tl.float32, bitcast=True)
    return total * inverse * inverse / D


@triton.jit
def turned(
    x, inside, weight, table, d, eps, D: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Rows of heads of one token, normed and rotated: x [rows, 1] says where they start."""
    here = inside & (d < D)[None, :]
    y = tl.load(x + d[None, :], mask=here, other=0.0)
    inverse = 1.0
    if NORM:
        inverse = inverse_root(_mean_square(y, D), eps)[:, None]
        y = y * inverse * tl.load(weight + d, mask=d < D, other=0.0)[None, :]
    if N_ROT > 0:
        turns = d < N_ROT
        other, pair, sign = partner(d, N_ROT, NEOX)
        z = tl.load(x + other[None, :], mask=here & turns[None, :], other=0.0)
        if NORM:
            z = z * inverse * tl.load(weight + other, mask=turns, other=0.0)[None, :]
        cos = tl.load(table + pair, mask=turns, other=1.0)
        sin = tl.load(table + N_ROT // 2 + pair, mask=turns, other=0.0) * sign
        # Left to the compiler, one kernel would round here where another does not.
        y = tl.fma(y, tl.broadcast_to(cos[None, :], y.shape), z * sin[None, :])
    return y


@triton.jit
def _one(x, d, weight, table, eps, D: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
         NORM: tl.constexpr):  # fmt: skip
    """One row, normed and rotated: [1, dimensions]."""
    return turned(
        x + tl.zeros([1, 1], tl.int32), tl.full([1, 1], 1, tl.int1), weight, table, d, eps, D,
        N_ROT, NEOX, NORM,
    )  # fmt: skip


@triton.jit
def store_token(
    row, base, where, head, k_norm, table, page_bytes, k_offset, v_offset, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr, N_ROT: tl.constexpr,
    NEOX: tl.constexpr, K_NORM: tl.constexpr, TYPE_K: tl.constexpr, TYPE_V: tl.constexpr,
    KIND_K: tl.constexpr, KIND_V: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr,
    ROW_K: tl.constexpr, ROW_V: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """A token's key, value or both of one KV head go into their page; `row` is its q, k and v."""
    page, slot = where // TOKENS, where % TOKENS
    scales = pages_at(base, tl.float16)
    if KEY:
        d = tl.arange(0, DKP)
        k = _one(row + (HEADS + head) * DK, d, k_norm, table, eps, DK, N_ROT, NEOX, K_NORM)
        start = head_start(page_bytes, page, k_offset, head, TOKENS, ROW_K)
        store_row(
            pages_at(base, TYPE_K), scales, start, slot, tl.reshape(k, [DKP]), d, KIND_K, SIZE_K,
            TOKENS, DK, DKP,
        )  # fmt: skip
    if VALUE:
        e = tl.arange(0, DVP)
        v = tl.load(row + (HEADS + KV_HEADS) * DK + head * DV + e, mask=e < DV, other=0.0)
        start = head_start(page_bytes, page, v_offset, head, TOKENS, ROW_V)
        store_row(
            pages_at(base, TYPE_V), scales, start, slot, v, e, KIND_V, SIZE_V, TOKENS, DV, DVP
        )


@triton.jit
def _store_tile(
    x, values, start, slot, rows, inside, d, SIZE: tl.constexpr, TOKENS: tl.constexpr,
    ROW: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Stores a token's rows of all heads, of a type that is stored as it is."""
    at = (start + rows * (TOKENS * ROW)) // SIZE + slot * D
    tl.store(values + at[:, None] + d[None, :], x.to(values.dtype.element_ty), mask=inside)


@triton.jit
def enter(
    qkv, q_out, base, slots, q_norm, k_norm, table, page_bytes, k_offset, v_offset, stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr, N_ROT: tl.constexpr,
    NEOX: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, TYPE_K: tl.constexpr,
    TYPE_V: tl.constexpr, KIND_K: tl.constexpr, KIND_V: tl.constexpr, SIZE_K: tl.constexpr,
    SIZE_V: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr, BQ: tl.constexpr,
    BKV: tl.constexpr, Q_PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: q is normed, turned and kept; k and v go into their page.

    The first Q_PARTS programs of a token take BQ heads of q each, the next one k, the last v.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    row = qkv + token * stride
    table += token * N_ROT
    d, e = tl.arange(0, DKP), tl.arange(0, DVP)
    if part < Q_PARTS:
        heads = part * BQ + tl.arange(0, BQ)
        here = (heads < HEADS)[:, None] & (d < DK)[None, :]
        q = turned(
            row + (heads * DK)[:, None], here, q_norm, table, d, eps, DK, N_ROT, NEOX, Q_NORM
        )
        at = (token * HEADS + heads) * DK
        tl.store(q_out + at[:, None] + d[None, :], q.to(q_out.dtype.element_ty), mask=here)
        return
    where = tl.load(slots + token).to(tl.int64)
    if where < 0:
        return
    page, slot = where // TOKENS, where % TOKENS
    heads = tl.arange(0, BKV)
    if part == Q_PARTS:
        if KIND_K == 0:
            inside = (heads < KV_HEADS)[:, None] & (d < DK)[None, :]
            keys = row + ((HEADS + heads) * DK)[:, None]
            k = turned(keys, inside, k_norm, table, d, eps, DK, N_ROT, NEOX, K_NORM)
            start = head_start(page_bytes, page, k_offset, 0, TOKENS, ROW_K)
            _store_tile(
                k, pages_at(base, TYPE_K), start, slot, heads, inside, d, SIZE_K, TOKENS, ROW_K, DK
            )
        else:
            for head in range(KV_HEADS):
                store_token(
                    row, base, where, head, k_norm, table, page_bytes, k_offset, v_offset, eps,
                    HEADS, KV_HEADS, DK, DV, DKP, DVP, TOKENS, N_ROT, NEOX, K_NORM, TYPE_K, TYPE_V,
                    KIND_K, KIND_V, SIZE_K, SIZE_V, ROW_K, ROW_V, True, False,
                )  # fmt: skip
    else:
        if KIND_V == 0:
            valued = (heads < KV_HEADS)[:, None] & (e < DV)[None, :]
            values = row + (HEADS + KV_HEADS) * DK + (heads * DV)[:, None] + e[None, :]
            start = head_start(page_bytes, page, v_offset, 0, TOKENS, ROW_V)
            _store_tile(
                tl.load(values, mask=valued, other=0.0), pages_at(base, TYPE_V), start, slot, heads,
                valued, e, SIZE_V, TOKENS, ROW_V, DV,
            )  # fmt: skip
        else:
            for head in range(KV_HEADS):
                store_token(
                    row, base, where, head, k_norm, table, page_bytes, k_offset, v_offset, eps,
                    HEADS, KV_HEADS, DK, DV, DKP, DVP, TOKENS, N_ROT, NEOX, K_NORM, TYPE_K, TYPE_V,
                    KIND_K, KIND_V, SIZE_K, SIZE_V, ROW_K, ROW_V, False, True,
                )  # fmt: skip


@triton.jit
def turns(positions, freqs, out, mscale, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Cosines and sines of one position."""
    at = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    angle = tl.load(positions + at).to(tl.float64) * tl.load(freqs + pair, mask=inside, other=0.0)
    out += at.to(tl.int64) * 2 * HALF + pair
    tl.store(out, (tl.cos(angle) * mscale).to(tl.float32), mask=inside)
    tl.store(out + HALF, (tl.sin(angle) * mscale).to(tl.float32), mask=inside)


@triton.jit
def rotate(
    base, pages, deltas, table, offsets, page_bytes, KV_HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr, N_ROT: tl.constexpr,
    NEOX: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Turns one token's key on, in place."""
    values, scales = pages_at(base, TYPE), pages_at(base, tl.float16)
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
    base, from_pages, from_slots, to_pages, to_slots, offsets, page_bytes,
    KV_HEADS: tl.constexpr, TOKENS: tl.constexpr, ROW: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one token's row of a head; its first LEVELS bytes, then those of its scales."""
    memory = pages_at(base, tl.uint8)
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
def copy_pages(base, sources, targets, page_words, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Copies a piece of a page."""
    memory = pages_at(base, TYPE)
    i = tl.program_id(0)
    source = tl.load(sources + i).to(tl.int64) * page_words
    target = tl.load(targets + i).to(tl.int64) * page_words
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < page_words
    tl.store(memory + target + at, tl.load(memory + source + at, mask=inside), mask=inside)
