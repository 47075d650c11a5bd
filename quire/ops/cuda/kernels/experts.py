"""Products with the experts that a router chose, the choice, and the mix of what they make."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.cuda.kernels.product import sum_columns


@triton.jit
def routed(
    x, q, out, x_scales, tile_expert, tile_pairs, divide, first_row, n_rows, cols, stride,
    slice_cols,
    BR: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    MINIMUM: tl.constexpr, MULTIPLY: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """w · x for pairs of a token and an expert; a tile has pairs of one expert, or none.

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
        rows = first_row + expert * n_rows + mine
        total, _ = sum_columns(
            x, x_rows, pair_inside, x_rows, q, rows, row_inside, 0, cols, cols, slice_cols, 0, 0,
            BR, BT, BK, BITS, GROUP, MINIMUM, MULTIPLY, False, EVEN, False,
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
