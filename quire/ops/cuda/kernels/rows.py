"""Kernels that take one row at a time: norms, gates, and the making of 16-bit activations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """x · sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """The tanh approximation of gelu, which is a sigmoid too."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def _mean_square(row, cols, BLOCK: tl.constexpr):
    """The mean of squares of a row: one tree for rows of one width."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < cols, other=0.0)
        total += x * x
    return tl.sum(total, 0) / cols


@triton.jit
def inverse_root(mean, eps):
    """What a norm multiplies with."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def add_norm(into, x, weight, cols, eps, BLOCK: tl.constexpr):
    """into += rms_norm(x) · weight."""
    start = tl.program_id(0).to(tl.int64) * cols
    inverse = inverse_root(_mean_square(x + start, cols, BLOCK), eps)
    for first in range(0, cols, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < cols
        y = tl.load(x + start + at, mask=inside) * inverse * tl.load(weight + at, mask=inside)
        y += tl.load(into + start + at, mask=inside)
        tl.store(into + start + at, y, mask=inside)


@triton.jit
def _gated(x, gate, at, inside, FIRST: tl.constexpr):
    y = tl.load(x + at, mask=inside, other=0.0)
    if FIRST:
        y *= silu(tl.load(gate + at, mask=inside, other=0.0))
    return y


@triton.jit
def gated_norm(
    x, gate, weight, out, cols, group, weight_step, eps, FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    """rms_norm of a group of columns, gated before or after."""
    start = tl.program_id(0).to(tl.int64) * cols + tl.program_id(1) * group
    weight += tl.program_id(1) * weight_step
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, group, BLOCK):
        at = first + tl.arange(0, BLOCK)
        y = _gated(x + start, gate + start, at, at < group, FIRST)
        total += y * y
    inverse = inverse_root(tl.sum(total, 0) / group, eps)
    for first in range(0, group, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < group
        y = _gated(x + start, gate + start, at, inside, FIRST)
        y = y * inverse * tl.load(weight + at, mask=inside, other=0.0)
        if not FIRST:
            y *= silu(tl.load(gate + start + at, mask=inside, other=0.0))
        tl.store(out + start + at, y, mask=inside)


@triton.jit
def _activation(x, weight, at, inside, cols, inverse, NORM: tl.constexpr, ACT: tl.constexpr):
    """What a product multiplies: x, its norm, or act(gate) · up."""
    y = tl.load(x + at, mask=inside, other=0.0)
    if NORM:
        y = y * inverse * tl.load(weight + at, mask=inside, other=0.0)
    if ACT == 1:
        y = silu(y) * tl.load(x + cols + at, mask=inside, other=0.0)
    if ACT == 2:
        y = gelu(y) * tl.load(x + cols + at, mask=inside, other=0.0)
    return y


@triton.jit
def prepare(
    x, weight, out, scales, n, cols, eps, NORM: tl.constexpr, ACT: tl.constexpr,
    SCALED: tl.constexpr, FINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of activations in the type of `out`.

    SCALED: times the power of two that brings the largest into [1024, 2048), so that no float16
    overflows; `scales` gets what undoes it. FINE: a second row holds what rounding has lost.
    """
    row = tl.program_id(0).to(tl.int64)
    if ACT == 0:
        x += row * cols
    else:
        x += row * 2 * cols
    inverse = 1.0
    if NORM:
        inverse = inverse_root(_mean_square(x, cols, BLOCK), eps)
    scale = 1.0
    if SCALED:
        most = tl.zeros([BLOCK], tl.float32)
        for first in range(0, cols, BLOCK):
            at = first + tl.arange(0, BLOCK)
            y = _activation(x, weight, at, at < cols, cols, inverse, NORM, ACT)
            most = tl.maximum(most, tl.abs(y))
        exponent = tl.max(most, 0).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 11), 254)
        scale = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(scales + row, ((exponent - 10) << 23).to(tl.float32, bitcast=True))
    for first in range(0, cols, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < cols
        y = _activation(x, weight, at, inside, cols, inverse, NORM, ACT) * scale
        rounded = y.to(out.dtype.element_ty)
        tl.store(out + row * cols + at, rounded, mask=inside)
        if FINE:
            rest = (y - rounded.to(tl.float32)).to(out.dtype.element_ty)
            tl.store(out + (row + n) * cols + at, rest, mask=inside)


@triton.jit(do_not_specialize=["n"])
def take(slots, turns, block, n, BLOCK: tl.constexpr):
    """Copies the slot whose turn it is from pinned memory of the host, which kernels reach."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = slots + tl.load(turns).to(tl.int64) * n
    tl.store(block + at, tl.load(slot + at, mask=at < n), mask=at < n)


@triton.jit(do_not_specialize=["n", "rows"])
def tell(report, slots, turns, n, rows, BLOCK: tl.constexpr):
    """Copies a report of n integers behind the ids of rows, in the slot whose turn it is."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = slots + tl.load(turns).to(tl.int64) * (rows + n) + rows
    tl.store(slot + at, tl.load(report + at, mask=at < n), mask=at < n)


@triton.jit(do_not_specialize=["n", "size"])
def give(ids, slots, turns, n, size, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copies ids to the slot whose turn it is; the next turn is the next one's."""
    at = tl.arange(0, BLOCK)
    turn = tl.load(turns)
    tl.store(slots + turn * size + at, tl.load(ids + at, mask=at < n), mask=at < n)
    tl.store(turns, (turn + 1) % DEPTH)


@triton.jit(do_not_specialize=["n"])
def follow(ids, sources, last, out, n, BLOCK: tl.constexpr):
    """Tokens of a step: those that it was given, or those that the step before chose for a row."""
    at = tl.arange(0, BLOCK)
    row = tl.load(sources + at, mask=at < n, other=-1)
    given = tl.load(ids + at, mask=at < n, other=0)
    chosen = tl.load(last + row, mask=row >= 0, other=0)
    tl.store(out + at, tl.where(row >= 0, chosen, given), mask=at < n)
