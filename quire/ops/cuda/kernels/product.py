"""Products of activations with weights, in an order of K that the weight alone decides.

K is cut into at most eight slices. Each is summed in order, then the slices one after the other:
in one program for many tokens, in parallel programs (`SPLIT`) and `join` for few. Tensor cores
add K in order whatever the tile is, so one token has the same bits among any others.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _levels(
    q, scales, minima, rows, row_inside, start, cols, row_bytes, groups, BR: tl.constexpr,
    N: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """Quantised weights of columns start … start+N-1 as values; of four bits, half a unit."""
    k = start + tl.arange(0, N)
    inside = row_inside[:, None] & (k < cols)[None, :]
    if BITS == 4:
        at = k // UNIT * (UNIT // 2) + k % (UNIT // 2)
        bytes = tl.load(q + rows[:, None] * row_bytes + at[None, :], mask=inside, other=0)
        level = (bytes >> 4).to(tl.float32) if HIGH else (bytes & 15).to(tl.float32)
    else:
        at = rows[:, None] * row_bytes + k[None, :]
        level = tl.load(q + at, mask=inside, other=0).to(tl.float32)
    n_groups: tl.constexpr = N // GROUP
    g = start // GROUP + tl.arange(0, n_groups)
    at = rows[:, None] * groups + g[None, :]
    inside = row_inside[:, None] & (g < groups)[None, :]
    value = tl.reshape(level, [BR, n_groups, GROUP])
    value *= tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    if MINIMUM:
        value += tl.load(minima + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(value, [BR, N]).to(MULTIPLY)


@triton.jit
def _step(
    total, x, x_rows, x_inside, q, scales, minima, rows, row_inside, start, cols, row_bytes, groups,
    BR: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """Adds the products of N columns."""
    k = start + tl.arange(0, N)
    k_inside = k < cols
    if BITS == 0:
        inside = row_inside[:, None] & k_inside[None, :]
        w = tl.load(q + rows[:, None] * row_bytes + k[None, :], mask=inside, other=0.0)
        w = w.to(MULTIPLY)
    else:
        w = _levels(
            q, scales, minima, rows, row_inside, start, cols, row_bytes, groups, BR, N, HIGH, BITS,
            UNIT, GROUP, MINIMUM, MULTIPLY,
        )  # fmt: skip
    at = x_rows[None, :] * cols + k[:, None]
    y = tl.load(x + at, mask=k_inside[:, None] & x_inside[None, :], other=0.0).to(MULTIPLY)
    return tl.dot(w, y, total, input_precision="ieee")


@triton.jit
def _slice(
    x, x_rows, x_inside, q, scales, minima, rows, row_inside, first, last, cols, row_bytes, groups,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    """The sum over columns first … last-1, in order: [rows, tokens]."""
    total = tl.zeros([BR, BT], tl.float32)
    for start in range(first, last, BK):
        if BITS == 4:
            half: tl.constexpr = BK // 2
            total = _step(
                total, x, x_rows, x_inside, q, scales, minima, rows, row_inside, start, cols,
                row_bytes, groups, BR, half, False, BITS, UNIT, GROUP, MINIMUM, MULTIPLY,
            )  # fmt: skip
            total = _step(
                total, x, x_rows, x_inside, q, scales, minima, rows, row_inside, start + half,
                cols, row_bytes, groups, BR, half, True, BITS, UNIT, GROUP, MINIMUM, MULTIPLY,
            )  # fmt: skip
        else:
            total = _step(
                total, x, x_rows, x_inside, q, scales, minima, rows, row_inside, start, cols,
                row_bytes, groups, BR, BK, False, BITS, UNIT, GROUP, MINIMUM, MULTIPLY,
            )  # fmt: skip
    return total


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
    x, q, scales, minima, out, bias, into, x_scales, n, n_rows, cols, row_bytes, groups, stride,
    slice_cols,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """w · x for a tile of weight rows and tokens; with SPLIT one slice of it, into `out` as is."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    tokens = tl.program_id(1) * BT + tl.arange(0, BT)
    row_inside, token_inside = rows < n_rows, tokens < n
    if SPLIT:
        part = tl.program_id(2)
        first = part * slice_cols
        total = _slice(
            x, tokens, token_inside, q, scales, minima, rows, row_inside, first,
            tl.minimum(first + slice_cols, cols), cols, row_bytes, groups, BR, BT, BK, BITS, UNIT,
            GROUP, MINIMUM, MULTIPLY,
        )  # fmt: skip
        at = (part * n + tokens).to(tl.int64)[None, :] * n_rows + rows[:, None]
        tl.store(out + at, total, mask=row_inside[:, None] & token_inside[None, :])
    else:
        total = tl.zeros([BR, BT], tl.float32)
        for first in range(0, cols, slice_cols):
            total += _slice(
                x, tokens, token_inside, q, scales, minima, rows, row_inside, first,
                tl.minimum(first + slice_cols, cols), cols, row_bytes, groups, BR, BT, BK, BITS,
                UNIT, GROUP, MINIMUM, MULTIPLY,
            )  # fmt: skip
        _finish(
            total, out, bias, into, x_scales, tokens, token_inside, rows, row_inside, stride,
            SCALED, BIAS, INTO,
        )  # fmt: skip


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


@triton.jit
def expand(
    q, scales, minima, out, n_rows, cols, row_bytes, groups, BR: tl.constexpr, BK: tl.constexpr,
    BITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """Quantised weights as the very float16 that products make of them."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    inside = rows < n_rows
    halves: tl.constexpr = 2 if BITS == 4 else 1
    size: tl.constexpr = BK // halves
    for half in tl.static_range(halves):
        start = tl.program_id(1) * BK + half * size
        value = _levels(
            q, scales, minima, rows, inside, start, cols, row_bytes, groups, BR, size, half == 1,
            BITS, UNIT, GROUP, MINIMUM, tl.float16,
        )  # fmt: skip
        k = start + tl.arange(0, size)
        at = rows[:, None] * cols + k[None, :]
        tl.store(out + at, value, mask=inside[:, None] & (k < cols)[None, :])


@triton.jit
def routed(
    x, q, scales, minima, out, x_scales, tile_expert, tile_pairs, divide, n_rows, cols, row_bytes,
    groups, stride, slice_cols,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The same for pairs of a token and an expert; a tile has pairs of one expert, or none.

    Pair i reads row i // divide of x and writes row i of out.
    """
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        pairs = tl.load(tile_pairs + tile * BT + tl.arange(0, BT))
        pair_inside = pairs >= 0
        x_rows = tl.maximum(pairs, 0) // divide
        mine = tl.program_id(0) * BR + tl.arange(0, BR)
        row_inside = mine < n_rows
        rows = expert * n_rows + mine
        total = tl.zeros([BR, BT], tl.float32)
        for first in range(0, cols, slice_cols):
            total += _slice(
                x, x_rows, pair_inside, q, scales, minima, rows, row_inside, first,
                tl.minimum(first + slice_cols, cols), cols, row_bytes, groups, BR, BT, BK, BITS,
                UNIT, GROUP, MINIMUM, MULTIPLY,
            )  # fmt: skip
        if SCALED:
            total *= tl.load(x_scales + x_rows, mask=pair_inside, other=0.0)[None, :]
        at = pairs.to(tl.int64)[None, :] * stride + mine[:, None]
        tl.store(out + at, total, mask=row_inside[:, None] & pair_inside[None, :])


@triton.jit
def choose(
    logits, chosen, shares, n_experts, n_used, scale, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """The likeliest experts of a token (of equals the lower number), and their shares."""
    token = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    x = tl.load(logits + token * n_experts + ids, mask=ids < n_experts, other=float("-inf"))
    p = tl.exp(x - tl.max(x, 0))
    p = p / tl.sum(p, 0)
    left = ids < n_experts
    total = 0.0
    for i in range(n_used):
        # What is not a number is chosen last, but chosen: it must show in its own row.
        rank = tl.where(left, tl.where(x == x, x, float("-inf")), float("-inf"))
        best = tl.min(tl.where(left & (rank == tl.max(rank, 0)), ids, BLOCK), 0)
        best = tl.minimum(best, n_experts - 1)
        share = tl.sum(tl.where(ids == best, p, 0.0), 0)
        total += share
        tl.store(chosen + token * n_used + i, best)
        tl.store(shares + token * n_used + i, share)
        left = left & (ids != best)
    if NORMALIZE:
        scale = scale / total
    tl.debug_barrier()
    for i in range(n_used):
        at = shares + token * n_used + i
        tl.store(at, tl.load(at) * scale)


@triton.jit
def mix(into, y, shares, n_used, cols, BLOCK: tl.constexpr):
    """Adds the outputs of a token's experts, likeliest first."""
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < cols
    total = tl.load(into + token.to(tl.int64) * cols + at, mask=inside)
    for i in range(n_used):
        pair = (token * n_used + i).to(tl.int64)
        total += tl.load(shares + pair) * tl.load(y + pair * cols + at, mask=inside)
    tl.store(into + token.to(tl.int64) * cols + at, total, mask=inside)
