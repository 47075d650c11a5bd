"""Products of activations with weights, in an order of K that the weight alone decides.

K is cut into at most eight slices. Each is summed in order, then the slices one after the other:
in one program for many tokens or rows, in parallel programs (`SPLIT`) and `join` for few. Tensor
cores add K in order whatever the tile is, so one token has the same bits among any others.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _levels(
    q, rows, k, inside, cols, BITS: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr
):  # fmt: skip
    """Quantised weights of rows and columns, one address each: as formats.py orders units."""
    groups: tl.constexpr = 64 // GROUP
    per: tl.constexpr = 1 + (1 if MINIMUM else 0)
    levels: tl.constexpr = 128 * BITS
    size: tl.constexpr = levels + 32 * groups * per
    unit = (rows // 16 * ((cols + 63) // 64) + k // 64) * size
    g, half = rows % 8, rows // 8 % 2
    step, high, t, one = k // 16 % 4, k // 8 % 2, k % 8 // 2, k % 2
    if BITS == 4:
        at = unit + (g * 4 + t) * 16 + step * 4 + one * 2 + high
        level = tl.load(q + at, mask=inside, other=0).to(tl.int32) >> (half * 4).to(tl.int32) & 15
    else:
        at = step // 2 * 512 + (g * 4 + t) * 16 + step % 2 * 8 + high * 4 + half * 2 + one
        level = tl.load(q + unit + at, mask=inside, other=0).to(tl.int32) - 128
    factors = (q + unit + levels).to(tl.pointer_type(tl.float16))
    factors += ((g * groups + k % 64 // GROUP) * 2 + half) * per
    value = level.to(tl.float32) * tl.load(factors, mask=inside, other=0.0).to(tl.float32)
    if MINIMUM:
        value += tl.load(factors + 1, mask=inside, other=0.0).to(tl.float32)
    return value.to(tl.float16)


@triton.jit
def embed(
    q, ids, out, first, n_rows, cols, scale, BITS: tl.constexpr, GROUP: tl.constexpr,
    MINIMUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row by its id, times scale, if it is one of first … first + n_rows - 1."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + i).to(tl.int64) - first
    if (row >= 0) & (row < n_rows):
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = k < cols
        if BITS == 0:
            value = tl.load(q + row * cols + k, mask=inside)
        else:
            rows = tl.zeros([BLOCK], tl.int64) + row
            value = _levels(q, rows, k, inside, cols, BITS, GROUP, MINIMUM)
        tl.store(out + i * cols + k, value.to(tl.float32) * scale, mask=inside)


@triton.jit
def sum_columns(
    x, x_rows, x_inside, rest_rows, q, rows, row_inside, first, last, cols, slice_cols,
    first_row, first_token,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr, FINE: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Sums over columns first … last-1, slice by slice: [rows, tokens]; FINE: and of the rest.

    One loop over all slices, so that loads run ahead from one to the next.
    """
    total, some = tl.zeros([BR, BT], tl.float32), tl.zeros([BR, BT], tl.float32)
    rest, some_rest = tl.zeros([BR, BT], tl.float32), tl.zeros([BR, BT], tl.float32)
    left = slice_cols
    for start in range(first, last, BK):
        k = start + tl.arange(0, BK)
        if EVEN:
            inside, y_inside = row_inside[:, None], x_inside[None, :]
        else:
            inside = row_inside[:, None] & (k < last)[None, :]
            y_inside = x_inside[None, :] & (k < last)[:, None]
        if TMA:
            w = q.load([first_row, start])
            y = x.load([first_token, start]).T
        else:
            if BITS == 0:
                w = tl.load(q + rows[:, None] * cols + k[None, :], mask=inside, other=0.0)
            else:
                w = _levels(q, rows[:, None], k[None, :], inside, cols, BITS, GROUP, MINIMUM)
            y = tl.load(x + x_rows[None, :] * cols + k[:, None], mask=y_inside, other=0.0)
        w = w.to(MULTIPLY)
        some = tl.dot(w, y.to(MULTIPLY), some, input_precision="ieee")
        if FINE:
            y = tl.load(x + rest_rows[None, :] * cols + k[:, None], mask=y_inside, other=0.0)
            some_rest = tl.dot(w, y.to(MULTIPLY), some_rest, input_precision="ieee")
        left -= BK
        if left == 0:
            left = slice_cols
            total += some
            some = tl.zeros([BR, BT], tl.float32)
            if FINE:
                rest += some_rest
                some_rest = tl.zeros([BR, BT], tl.float32)
    return total + some, rest + some_rest


@triton.jit
def _finish(
    total, out, bias, into, x_scales, tokens, token_inside, rows, row_inside, stride,
    SCALED: tl.constexpr, BIAS: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Undoes the scales of activations, adds what is to be added, stores [rows, tokens]."""
    inside = row_inside[:, None] & token_inside[None, :]
    if SCALED:
        total *= tl.load(x_scales + tokens, mask=token_inside, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + rows, mask=row_inside, other=0.0)[:, None]
    at = tokens.to(tl.int64)[None, :] * stride + rows[:, None]
    if INTO:
        total += tl.load(into + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)


@triton.jit
def product(
    x, q, out, bias, into, x_scales, n, n_rows, cols, stride, slice_cols,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr, SPLIT: tl.constexpr, FINE: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    INTO: tl.constexpr,
):  # fmt: skip
    """w · x for a tile of weight rows and tokens; with SPLIT one slice of it, into `out` as is."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    tokens = tl.program_id(1) * BT + tl.arange(0, BT)
    row_inside, token_inside = rows < n_rows, tokens < n
    part = tl.program_id(2)
    first = part * slice_cols
    total, rest = sum_columns(
        x, tokens, token_inside, tokens + n, q, rows, row_inside, first,
        tl.minimum(first + slice_cols, cols) if SPLIT else cols, cols, slice_cols,
        tl.program_id(0) * BR, tl.program_id(1) * BT, BR, BT, BK, BITS, GROUP, MINIMUM, MULTIPLY,
        FINE, EVEN, TMA,
    )  # fmt: skip
    if SPLIT:
        inside = row_inside[:, None] & token_inside[None, :]
        per: tl.constexpr = 2 if FINE else 1
        at = (part * n * per + tokens).to(tl.int64)[None, :] * n_rows + rows[:, None]
        tl.store(out + at, total, mask=inside)
        if FINE:
            at = (part * n * per + n + tokens).to(tl.int64)[None, :] * n_rows + rows[:, None]
            tl.store(out + at, rest, mask=inside)
    else:
        if FINE:
            total += rest
        _finish(
            total, out, bias, into, x_scales, tokens, token_inside, rows, row_inside, stride,
            SCALED, BIAS, INTO,
        )  # fmt: skip


@triton.jit
def _activated(gate, up, ACT: tl.constexpr):
    """act(gate) · up, with the very instructions of csrc."""
    inner = gate
    if ACT == 2:
        inner = 1.5957691216057308 * tl.fma(gate * gate * gate, 0.044715, gate)
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [inner * -1.4426950408889634], dtype=tl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return tl.div_rn(gate, 1.0 + power) * up


@triton.jit
def activate(both, out, cols, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """act(gate) · up of rows that have both."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < cols
    gate = tl.load(both + row * 2 * cols + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * cols + cols + at, mask=inside, other=0.0).to(tl.float32)
    value = _activated(gate, up, ACT).to(out.dtype.element_ty)
    tl.store(out + row * cols + at, value, mask=inside)


@triton.jit
def gated(
    x, q, out, x_scales, n, n_rows, cols, slice_cols,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr, SCALED: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """act(gate) · up for a tile of rows of both and of tokens; up's rows follow gate's."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    tokens = tl.program_id(1) * BT + tl.arange(0, BT)
    row_inside, token_inside = rows < n_rows, tokens < n
    gate, some_gate = tl.zeros([BR, BT], tl.float32), tl.zeros([BR, BT], tl.float32)
    up, some_up = tl.zeros([BR, BT], tl.float32), tl.zeros([BR, BT], tl.float32)
    left = slice_cols
    for start in range(0, cols, BK):
        k = start + tl.arange(0, BK)
        inside, y_inside = row_inside[:, None], token_inside[None, :]
        if not EVEN:
            inside = inside & (k < cols)[None, :]
            y_inside = y_inside & (k < cols)[:, None]
        if TMA:
            y = x.load([tl.program_id(1) * BT, start]).T
            w = q.load([tl.program_id(0) * BR, start])
            v = q.load([tl.program_id(0) * BR + n_rows, start])
        else:
            y = tl.load(x + tokens[None, :] * cols + k[:, None], mask=y_inside, other=0.0)
            w = tl.load(q + rows[:, None] * cols + k[None, :], mask=inside, other=0.0)
            v = tl.load(q + (rows + n_rows)[:, None] * cols + k[None, :], mask=inside, other=0.0)
        some_gate = tl.dot(w, y, some_gate)
        some_up = tl.dot(v, y, some_up)
        left -= BK
        if left == 0:
            left = slice_cols
            gate += some_gate
            up += some_up
            some_gate = tl.zeros([BR, BT], tl.float32)
            some_up = tl.zeros([BR, BT], tl.float32)
    gate += some_gate
    up += some_up
    if SCALED:
        undo = tl.load(x_scales + tokens, mask=token_inside, other=0.0)[None, :]
        gate *= undo
        up *= undo
    at = tokens.to(tl.int64)[None, :] * n_rows + rows[:, None]
    value = _activated(gate, up, ACT).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=row_inside[:, None] & token_inside[None, :])


@triton.jit
def join(
    parts, out, bias, into, x_scales, n, fine_n, n_rows, stride, n_slices, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, INTO: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Adds the slices of one token, one after the other; FINE: and of what rounding had lost."""
    token = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n_rows
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(n_slices):
        at = (part * fine_n + token).to(tl.int64) * n_rows + rows
        total += tl.load(parts + at, mask=inside, other=0.0)
    if FINE:
        rest = tl.zeros([BLOCK], tl.float32)
        for part in range(n_slices):
            at = (part * fine_n + n + token).to(tl.int64) * n_rows + rows
            rest += tl.load(parts + at, mask=inside, other=0.0)
        total += rest
    if SCALED:
        total *= tl.load(x_scales + token)
    if BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0)
    at = token.to(tl.int64) * stride + rows
    if INTO:
        total += tl.load(into + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)
