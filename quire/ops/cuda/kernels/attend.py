"""Attention over pages.

Slots are taken in blocks, and blocks in splits, both cut at absolute positions. Each split starts
afresh, and splits are merged in order: in one program, or by `merge_splits` when they run in
parallel. Blocks that a row does not see change none of its bits, so neither batch, chunk nor the
number of programs matters.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.cuda.kernels.heads import head_start, load_rows, pages_at, store_token, turned


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
def _block(
    x, position, base, table, block, slots, start, shift, slot_positions, page_bytes, k_offset,
    v_offset, head, scale, softcap, window, most, mass, part,
    KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TYPE_K: tl.constexpr, TYPE_V: tl.constexpr, KIND_K: tl.constexpr, KIND_V: tl.constexpr,
    SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr,
    MULTIPLY: tl.constexpr, CAPPED: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """One more block of a span's slots: what follows `most`, `mass` and `part`."""
    d, e = tl.arange(0, DKP), tl.arange(0, DVP)
    ones = tl.full([BN, 16], 1.0, MULTIPLY)
    scales = pages_at(base, tl.float16)
    k_values, v_values = pages_at(base, TYPE_K), pages_at(base, TYPE_V)
    slot = block - shift + tl.arange(0, BN)
    seen = (slot >= 0) & (slot < slots)
    at = start + slot
    if HOLES:
        at = tl.load(slot_positions + slot, mask=seen, other=-1)
        seen = seen & (at >= 0)
    page = tl.load(table + slot // TOKENS, mask=seen, other=0).to(tl.int64)
    inside = slot % TOKENS
    starts = head_start(page_bytes, page, k_offset, head, TOKENS, ROW_K)
    k = load_rows(
        k_values, scales, starts[:, None], inside[:, None], d[None, :],
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
        v_values, scales, starts[:, None], inside[:, None], e[None, :],
        seen[:, None] & (e < DV)[None, :], KIND_V, SIZE_V, TOKENS, DV,
    ).to(MULTIPLY)  # fmt: skip
    # Tensor cores add in one order whatever the tile, which a sum over a row would not.
    mass = tl.dot(p, ones, mass * fade[:, None], input_precision="ieee")
    part = tl.dot(p, v, part * fade[:, None], input_precision="ieee")
    return top, mass, part


@triton.jit
def _span(
    x, position, base, table, first_slot, last_slot, slots, start, shift, slot_positions,
    page_bytes, k_offset, v_offset, head, scale, softcap, window,
    KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TYPE_K: tl.constexpr, TYPE_V: tl.constexpr, KIND_K: tl.constexpr, KIND_V: tl.constexpr,
    SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr,
    MULTIPLY: tl.constexpr, CAPPED: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """One span of slots: the largest score of each query, the mass below it, and their sum of v."""
    most = tl.full([BM], float("-inf"), tl.float32)
    mass = tl.zeros([BM, 16], tl.float32)
    part = tl.zeros([BM, DVP], tl.float32)
    for block in range(first_slot, last_slot, BN):
        most, mass, part = _block(
            x, position, base, table, block, slots, start, shift, slot_positions, page_bytes,
            k_offset, v_offset, head, scale, softcap, window, most, mass, part, KV_HEADS, DK, DV,
            DKP, DVP, TOKENS, BM, BN, TYPE_K, TYPE_V, KIND_K, KIND_V, SIZE_K, SIZE_V, ROW_K, ROW_V,
            MULTIPLY, CAPPED, HOLES,
        )  # fmt: skip
    return most, tl.max(mass, 1), part


@triton.jit(do_not_specialize=["n", "table_cols", "position_cols", "window", "span"])
def attend(
    q, out, parts, tops, masses, base, tables, first, length,
    positions, slot_positions, tile_row, tile_count, tile_seq, n, table_cols, position_cols,
    page_bytes, k_offset, v_offset, scale, softcap, window, span,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPAN: tl.constexpr, TYPE_K: tl.constexpr, TYPE_V: tl.constexpr,
    KIND_K: tl.constexpr, KIND_V: tl.constexpr,
    SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr,
    MULTIPLY: tl.constexpr, CAPPED: tl.constexpr, HOLES: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The queries of a tile, of the heads that share a KV head; with SPLIT one span of slots, from
    `span` on."""
    tile, head = tl.program_id(0), tl.program_id(1)
    if AHEAD:  # it was launched before what it reads was written (programmatic dependent launch)
        gdc_wait()
        gdc_launch_dependents()
    if head * 2 >= KV_HEADS:  # later tiles see more: where two programs meet, one is short
        tile = tl.num_programs(0) - 1 - tile
    group: tl.constexpr = HEADS // KV_HEADS
    row, count = tl.load(tile_row + tile), tl.load(tile_count + tile)
    if count == 0:
        return  # it only fills a graph
    seq = tl.load(tile_seq + tile).to(tl.int64)
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
    first_slot, last_slot = (low + shift) // BN * BN, high + shift
    if SPLIT:
        mine = (span + tl.program_id(2)) * SPAN
        first_slot, last_slot = tl.maximum(first_slot, mine), tl.minimum(last_slot, mine + SPAN)
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, DVP], tl.float32)
    most = tl.full([BM], float("-inf"), tl.float32)
    mass = tl.zeros([BM, 16], tl.float32)
    part = tl.zeros([BM, DVP], tl.float32)
    # One loop over the blocks of all spans, so that loads run ahead from one to the next.
    for block in range(first_slot, last_slot, BN):
        most, mass, part = _block(
            x, position, base, tables + seq * table_cols, block, slots, start, shift,
            slot_positions + seq * position_cols, page_bytes, k_offset, v_offset, head, scale,
            softcap, window, most, mass, part, KV_HEADS, DK, DV, DKP, DVP, TOKENS, BM, BN, TYPE_K,
            TYPE_V, KIND_K, KIND_V, SIZE_K, SIZE_V, ROW_K, ROW_V, MULTIPLY, CAPPED, HOLES,
        )  # fmt: skip
        if (block + BN) % SPAN == 0:
            best, total, result = merge(best, total, result, most, tl.max(mass, 1), part)
            most = tl.full([BM], float("-inf"), tl.float32)
            mass = tl.zeros([BM, 16], tl.float32)
            part = tl.zeros([BM, DVP], tl.float32)
    # What is left of the last span; merging nothing changes no bit.
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


@triton.jit(do_not_specialize=["n", "table_cols", "window", "per"])
def decode(
    qkv, out, parts, tops, masses, arrived, base, tables, first, length, slots, positions, q_norm,
    k_norm, rope, n, table_cols, page_bytes, k_offset, v_offset, stride, eps, scale, softcap,
    window, per,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPAN: tl.constexpr, TYPE_K: tl.constexpr, TYPE_V: tl.constexpr,
    KIND_K: tl.constexpr, KIND_V: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr,
    ROW_K: tl.constexpr, ROW_V: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, MULTIPLY: tl.constexpr, CAPPED: tl.constexpr,
    STORE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One token of each sequence, from q, k and v to the output: `per` spans of slots of a KV head.

    Who has the span that the new token is in stores it first. Spans are merged in order: by who
    has them all, or by who comes last, and `arrived` is 0 again then.
    """
    seq, head, mine = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    where = tl.load(slots + seq).to(tl.int64)
    n_slots, start = tl.load(length + seq), tl.load(first + seq)
    place = tl.load(positions + seq)
    shift = start % SPAN
    low = 0
    if window > 0:
        low = tl.maximum(place - window + 1 - start, 0)
    high = n_slots + shift
    span_from, span_to = (low + shift) // SPAN, (high + SPAN - 1) // SPAN
    my_from, my_to = tl.maximum(span_from, mine * per), tl.minimum(span_to, (mine + 1) * per)
    if (where < 0) | (my_from >= my_to):
        return
    group: tl.constexpr = HEADS // KV_HEADS
    row = qkv + seq * stride
    rope += seq * N_ROT
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    m, d, e = tl.arange(0, BM), tl.arange(0, DKP), tl.arange(0, DVP)
    valid = m < group
    heads = row + ((head * group + m) * DK)[:, None]
    x = turned(heads, valid[:, None], q_norm, rope, d, eps, DK, N_ROT, NEOX, Q_NORM).to(MULTIPLY)
    if STORE and my_to == span_to:
        store_token(
            row, base, where, head, k_norm, rope, page_bytes, k_offset, v_offset, eps, HEADS,
            KV_HEADS, DK, DV, DKP, DVP, TOKENS, N_ROT, NEOX, K_NORM, TYPE_K, TYPE_V, KIND_K, KIND_V,
            SIZE_K, SIZE_V, ROW_K, ROW_V, True, True,
        )  # fmt: skip
        tl.debug_barrier()
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, DVP], tl.float32)
    query = seq * HEADS + head * group + m
    stored = valid[:, None] & (e < DV)[None, :]
    programs = (span_to + per - 1) // per - span_from // per
    for span in range(my_from, my_to):
        begin = tl.maximum(span * SPAN, (low + shift) // BN * BN)
        most, mass, part = _span(
            x, tl.zeros([BM], tl.int32) + place, base, tables + seq * table_cols, begin,
            tl.minimum((span + 1) * SPAN, high), n_slots, start, shift, tables, page_bytes,
            k_offset, v_offset, head, scale, softcap, window, KV_HEADS, DK, DV, DKP, DVP, TOKENS,
            BM, BN, TYPE_K, TYPE_V, KIND_K, KIND_V, SIZE_K, SIZE_V, ROW_K, ROW_V, MULTIPLY, CAPPED,
            False,
        )  # fmt: skip
        if programs == 1:
            best, total, result = merge(best, total, result, most, mass, part)
        else:
            at = span * n * HEADS + query
            tl.store(tops + at, most, mask=valid)
            tl.store(masses + at, mass, mask=valid)
            tl.store(parts + at[:, None] * DV + e[None, :], part, mask=stored)
    last = programs == 1
    if programs > 1:
        tl.debug_barrier()
        last = tl.atomic_add(arrived + seq * KV_HEADS + head, 1, sem="acq_rel") == programs - 1
    if last:
        if programs > 1:
            tl.store(arrived + seq * KV_HEADS + head, 0)
            for span in range(span_from, span_to):
                at = span * n * HEADS + query
                most = tl.load(tops + at, mask=valid, other=float("-inf"), cache_modifier=".cg")
                mass = tl.load(masses + at, mask=valid, other=0.0, cache_modifier=".cg")
                part = tl.load(
                    parts + at[:, None] * DV + e[None, :], mask=stored, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                best, total, result = merge(best, total, result, most, mass, part)
        result = tl.where(total[:, None] == 0.0, 0.0, result / total[:, None])
        tl.store(out + query[:, None] * DV + e[None, :], result, mask=stored)


@triton.jit(do_not_specialize=["n_queries", "n_spans"])
def merge_splits(
    out, parts, tops, masses, n_queries, n_spans, DV: tl.constexpr, DVP: tl.constexpr,
    BM: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Joins the spans of some queries, in order: what follows is in the place of the first, unless
    they are the last."""
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
    if LAST:
        result = tl.where(total[:, None] == 0.0, 0.0, result / total[:, None])
        tl.store(out + query[:, None] * DV + e[None, :], result, mask=stored)
    else:
        tl.store(tops + query, best, mask=valid)
        tl.store(masses + query, total, mask=valid)
        tl.store(parts + query[:, None] * DV + e[None, :], result, mask=stored)
