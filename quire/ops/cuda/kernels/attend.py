"""Attention over pages.

Slots are taken in blocks, and blocks in splits, both cut at absolute positions. Each split starts
afresh, and splits are merged in order: in one program, or by `merge_splits` when they run in
parallel. Blocks that a row does not see change none of its bits, so neither batch, chunk nor the
number of programs matters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.cuda.kernels.heads import head_start, load_rows


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def merge(best, total, out, most, mass, part):
    """What is known of a row, and one more split of it."""
    top = tl.maximum(best, most)
    safe = tl.where(top == float("-inf"), 0.0, top)
    before, now = tl.exp(best - safe), tl.exp(most - safe)
    total = tl.fma(total, before, mass * now)
    out = tl.fma(out, tl.broadcast_to(before[:, None], out.shape), part * now[:, None])
    return top, total, out


@triton.jit
def attend(
    q, out, parts, tops, masses, k_values, k_scales, v_values, v_scales, tables, first, length,
    positions, slot_positions, tile_row, tile_count, tile_seq, n, table_cols, position_cols,
    page_bytes, k_offset, v_offset, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPAN: tl.constexpr, KIND_K: tl.constexpr, KIND_V: tl.constexpr,
    SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr,
    MULTIPLY: tl.constexpr, CAPPED: tl.constexpr, HOLES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The queries of a tile, of the heads that share a KV head; with SPLIT one span of slots."""
    tile, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    seq = tl.load(tile_seq + tile).to(tl.int64)
    row, count = tl.load(tile_row + tile), tl.load(tile_count + tile)
    m = tl.arange(0, BM)
    valid = m < count * group
    token = (row + tl.minimum(m // group, count - 1)).to(tl.int64)
    query = token * HEADS + head * group + m % group
    d, e = tl.arange(0, DKP), tl.arange(0, DVP)
    x = tl.load(q + query[:, None] * DK + d[None, :], mask=valid[:, None] & (d < DK)[None, :],
                other=0.0).to(MULTIPLY)  # fmt: skip
    position = tl.load(positions + token)
    start, slots = tl.load(first + seq), tl.load(length + seq)
    shift = start % SPAN  # so that spans are cut at absolute positions
    low, high = 0, slots
    if not HOLES:
        high = tl.minimum(slots, tl.max(position, 0) - start + 1)
        if window > 0:
            low = tl.maximum(tl.min(position, 0) - window + 1 - start, 0)
    span_from, span_to = (low + shift) // SPAN, (high + shift + SPAN - 1) // SPAN
    if SPLIT:
        mine = tl.program_id(2)
        span_from, span_to = tl.maximum(span_from, mine), tl.minimum(span_to, mine + 1)
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, DVP], tl.float32)
    ones = tl.full([BN, 16], 1.0, MULTIPLY)
    for span in range(span_from, span_to):
        most = tl.full([BM], float("-inf"), tl.float32)
        mass = tl.zeros([BM, 16], tl.float32)
        part = tl.zeros([BM, DVP], tl.float32)
        begin = tl.maximum(span * SPAN, (low + shift) // BN * BN)
        end = tl.minimum((span + 1) * SPAN, high + shift)
        for block in range(begin, end, BN):
            slot = block - shift + tl.arange(0, BN)
            seen = (slot >= 0) & (slot < slots)
            at = start + slot
            if HOLES:
                at = tl.load(slot_positions + seq * position_cols + slot, mask=seen, other=-1)
                seen = seen & (at >= 0)
            page = tl.load(tables + seq * table_cols + slot // TOKENS, mask=seen, other=0)
            page = page.to(tl.int64)
            inside = slot % TOKENS
            starts = head_start(page_bytes, page, k_offset, head, TOKENS, ROW_K)
            k = load_rows(
                k_values, k_scales, starts[:, None], inside[:, None], d[None, :],
                seen[:, None] & (d < DK)[None, :], KIND_K, SIZE_K, TOKENS, DK,
            ).to(MULTIPLY)  # fmt: skip
            score = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                score = softcap * _tanh(score / softcap)
            visible = seen[None, :] & (at[None, :] <= position[:, None])
            if window > 0:
                visible = visible & (at[None, :] > position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
            top = tl.maximum(most, tl.max(score, 1))
            safe = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp(score - safe[:, None]).to(MULTIPLY)
            fade = tl.exp(most - safe)
            starts = head_start(page_bytes, page, v_offset, head, TOKENS, ROW_V)
            v = load_rows(
                v_values, v_scales, starts[:, None], inside[:, None], e[None, :],
                seen[:, None] & (e < DV)[None, :], KIND_V, SIZE_V, TOKENS, DV,
            ).to(MULTIPLY)  # fmt: skip
            # Tensor cores add in one order whatever the tile, which a sum over a row would not.
            mass = tl.dot(p, ones, mass * fade[:, None], input_precision="ieee")
            part = tl.dot(p, v, part * fade[:, None], input_precision="ieee")
            most = top
        best, total, result = merge(best, total, result, most, tl.max(mass, 1), part)
    stored = valid[:, None] & (e < DV)[None, :]
    if SPLIT:
        at = tl.program_id(2).to(tl.int64) * n * HEADS + query
        tl.store(tops + at, best, mask=valid)
        tl.store(masses + at, total, mask=valid)
        tl.store(parts + at[:, None] * DV + e[None, :], result, mask=stored)
    else:
        result = tl.where(total[:, None] == 0.0, 0.0, result / total[:, None])
        tl.store(out + query[:, None] * DV + e[None, :], result, mask=stored)


@triton.jit
def merge_splits(
    out, parts, tops, masses, n_queries, n_spans, DV: tl.constexpr, DVP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Joins the spans of some queries, in order."""
    query = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    e = tl.arange(0, DVP)
    valid = query < n_queries
    stored = valid[:, None] & (e < DV)[None, :]
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, DVP], tl.float32)
    for span in range(n_spans):
        at = span * n_queries + query
        most = tl.load(tops + at, mask=valid, other=float("-inf"))
        mass = tl.load(masses + at, mask=valid, other=0.0)
        part = tl.load(parts + at[:, None] * DV + e[None, :], mask=stored, other=0.0)
        best, total, result = merge(best, total, result, most, mass, part)
    result = tl.where(total[:, None] == 0.0, 0.0, result / total[:, None])
    tl.store(out + query[:, None] * DV + e[None, :], result, mask=stored)
