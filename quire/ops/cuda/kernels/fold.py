"""Logs of recurrent layers as parts of their states, and what logs hold as inputs again."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.cuda.kernels.recur import floats_at, folded, log_tiles, raw_input, state_tile


@triton.jit
def fold(
    states, logs, offsets, state_in, log, n_entries, state_out, n_layers, state_words, log_words,
    log_stride, tail_words, cols,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, TILED: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Logs become parts of states, in all layers: `offsets` has each one's state, then its log."""
    splits: tl.constexpr = (DV + BV - 1) // BV
    head, fold, layer = tl.program_id(0) // splits, tl.program_id(1), tl.program_id(2)
    columns = tl.program_id(0) % splits * BV + tl.arange(0, BV)
    d = tl.arange(0, DKP)
    shared = head % K_HEADS if TILED else head // (HEADS // K_HEADS)
    inside = (columns < DV)[:, None] & (d < DK)[None, :]
    start = tl.multiple_of(tl.load(offsets + layer), 16) + tail_words
    log_at = tl.multiple_of(tl.load(offsets + n_layers + layer), 4)
    at = start + head * (DK * DV) + columns[:, None] * DK + d[None, :]
    n = tl.load(n_entries + fold)
    state = state_tile(states, tl.load(state_in + fold), state_words, at, inside)
    keys, u, c = log_tiles(
        logs, tl.load(log + fold), log_words, log_at, log_stride, n, cols, shared, head, d,
        columns, HEADS, K_HEADS, DK, DV, LOG,
    )  # fmt: skip
    state = folded(state, keys, u, c, n, LOG)
    tl.store(floats_at(states, tl.load(state_out + fold), state_words, 0) + at, state, mask=inside)


@triton.jit
def fold_tail(
    states, logs, offsets, state_in, log, n_entries, state_out, n_layers, state_words, log_words,
    log_stride, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution's tail behind a folded log, in all layers."""
    fold, layer = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state_at, log_at = tl.load(offsets + layer), tl.load(offsets + n_layers + layer)
    source, n = tl.load(state_in + fold), tl.load(n_entries + fold)
    entries = floats_at(logs, tl.load(log + fold), log_words, log_at)
    tail = floats_at(states, source, state_words, state_at)
    kept = floats_at(states, tl.load(state_out + fold), state_words, state_at)
    known = tl.where(source >= 0, 1, 0)
    for j in tl.static_range(WIDTH - 1):
        value = raw_input(
            n * 0, n * 0, WIDTH - 1 - j, c, c < channels, entries, 0, channels, entries, n,
            log_stride, tail, known, WIDTH, False,
        )  # fmt: skip
        tl.store(kept + j * channels + c, value, mask=c < channels)


@triton.jit
def raw_inputs(
    x, logs, row_page, row_slot, log_at, log_words, log_stride, cols, BLOCK: tl.constexpr
):
    """Raw inputs of tokens, from where they are in logs."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = log_at + tl.load(row_slot + row) * log_stride
    entry = floats_at(logs, tl.load(row_page + row), log_words, slot)
    value = tl.load(entry + c, mask=c < cols, other=0.0)
    tl.store(x + row.to(tl.int64) * cols + c, value, mask=c < cols)
