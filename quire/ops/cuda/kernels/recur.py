"""Recurrent layers: a state page, a log of raw inputs behind it, then new tokens.

All of a sequence's tokens since its state are *rows*, in order: the entries of its log, then the
new tokens. Every kernel runs over rows, for one layer in a step and for all layers in a fold, so
that replaying a token gives the very bits of computing it.

A state page holds the convolution's tail [width - 1, channels], then the state [heads, dv, dk].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _floats(addresses, layer):
    """A layer's values, by the table of their addresses."""
    return tl.load(addresses + layer).to(tl.pointer_type(tl.float32))


@triton.jit
def _raw(
    row, start, c, inside, x, row_page, row_index, states, state_in, logs, state_at, log_at,
    state_words, log_words, log_stride, cols, channels,
    WIDTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Raw inputs c of a row, which may lie before `start`: then they are in the tail."""
    page = tl.load(row_page + tl.maximum(row, start)).to(tl.int64)
    index = tl.load(row_index + tl.maximum(row, start)).to(tl.int64)
    # As blocks: the interpreter cannot mask with a block and a scalar.
    rows, pages = row + c * 0, page + c * 0
    new, old = (rows >= start) & (pages < 0), (rows >= start) & (pages >= 0)
    value = tl.load(x + index * cols + c, mask=inside & new, other=0.0)
    if GATED:  # a short convolution takes B · x
        value *= tl.load(x + index * cols + 2 * channels + c, mask=inside & new, other=0.0)
    entry = logs + page * log_words + log_at + index * log_stride
    value += tl.load(entry + c, mask=inside & old, other=0.0)
    at = state_in * state_words + state_at + (WIDTH - 1 + row - start) * channels
    value += tl.load(states + at + c, mask=inside & (rows < start) & (state_in + c * 0 >= 0),
                     other=0.0)  # fmt: skip
    return value


@triton.jit
def _convolved(
    row, start, c, inside, weight, bias, x, row_page, row_index, states, state_in, logs, state_at,
    log_at, state_words, log_words, log_stride, cols, channels, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The convolution of a row in channels c."""
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        value = _raw(
            row - (WIDTH - 1) + j, start, c, inside, x, row_page, row_index, states, state_in,
            logs, state_at, log_at, state_words, log_words, log_stride, cols, channels, WIDTH,
            GATED,
        )  # fmt: skip
        total += value * tl.load(weight + c * WIDTH + j, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + c, mask=inside, other=0.0)
    return total


@triton.jit
def convolve(
    x, mixed, weights, biases, state_offsets, log_offsets, states, logs, row_page, row_index,
    row_seq, seq_start, seq_state_in, n_rows, state_words, log_words, log_stride, cols, channels,
    start_col, end_col, keys, head_cols,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """silu of the convolution; queries and keys of a delta net are brought to length 1 as well."""
    row, layer = tl.program_id(0), tl.program_id(2)
    seq = tl.load(row_seq + row)
    start = tl.load(seq_start + seq)
    first = start_col + tl.program_id(1) * head_cols
    c = first + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < head_cols) & (c < end_col)
    y = _convolved(
        row, start, c, inside, _floats(weights, layer), _floats(biases, layer), x, row_page,
        row_index, states, tl.load(seq_state_in + seq).to(tl.int64), logs,
        tl.load(state_offsets + layer), tl.load(log_offsets + layer), state_words, log_words,
        log_stride, cols, channels, BLOCK, WIDTH, False, BIAS,
    )  # fmt: skip
    y = y / (1.0 + tl.exp(-y))
    if DELTA and first < keys:
        y = y * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(y * y, 0) + 1e-6))
    at = (layer * n_rows + row).to(tl.int64) * channels + c
    tl.store(mixed + at, y, mask=inside)


@triton.jit
def _gate(
    row, column, x, row_page, row_index, logs, log_at, log_words, log_stride, cols,
):  # fmt: skip
    """One raw input of a row that is in the log or new."""
    page = tl.load(row_page + row).to(tl.int64)
    index = tl.load(row_index + row).to(tl.int64)
    if page < 0:
        value = tl.load(x + index * cols + column)
    else:
        value = tl.load(logs + page * log_words + log_at + index * log_stride + column)
    return value


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def scan(
    x, mixed, out, a_addresses, dt_addresses, d_addresses, state_offsets, log_offsets, states,
    logs, row_page, row_index, seq_start, seq_new, seq_end, seq_state_end, seq_state_in,
    seq_state_out, n_rows, state_words, log_words, log_stride, tail_words, cols, channels, dt_low,
    dt_high,
    HEADS: tl.constexpr, SHARE: tl.constexpr, TILED: tl.constexpr, K_HEADS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Runs a head of a layer over a sequence's rows, for some columns of its values.

    Rows from `seq_new` on have outputs; the state before row `seq_state_end` is stored.
    """
    seq, head, layer = tl.program_id(0), tl.program_id(1) % HEADS, tl.program_id(2)
    columns = tl.program_id(1) // HEADS * BV + tl.arange(0, BV)
    d = tl.arange(0, DKP)
    inside = (columns < DV)[:, None] & (d < DK)[None, :]
    state_in = tl.load(seq_state_in + seq).to(tl.int64)
    state_out = tl.load(seq_state_out + seq).to(tl.int64)
    base = tl.load(state_offsets + layer) + tail_words + head * (DK * DV)
    at = base + columns[:, None] * DK + d[None, :]
    known = inside & (state_in + d * 0 >= 0)[None, :]
    state = tl.load(states + state_in * state_words + at, mask=known, other=0.0)
    log_at = tl.load(log_offsets + layer)
    a = tl.load(_floats(a_addresses, layer) + head)
    dt_bias = tl.load(_floats(dt_addresses, layer) + head)
    skip = tl.load(_floats(d_addresses, layer) + head)
    shared = head % K_HEADS if TILED else head // SHARE
    start, first, end = tl.load(seq_start + seq), tl.load(seq_new + seq), tl.load(seq_end + seq)
    state_end = tl.load(seq_state_end + seq)
    for row in range(start, end):
        values = mixed + (layer * n_rows + row).to(tl.int64) * channels
        if DELTA:
            q = tl.load(values + shared * DK + d, mask=d < DK, other=0.0)
            k = tl.load(values + (K_HEADS + shared) * DK + d, mask=d < DK, other=0.0)
            own = values + 2 * K_HEADS * DK + head * DV
            v = tl.load(own + columns, mask=columns < DV, other=0.0)
            b = _gate(
                row, channels + head, x, row_page, row_index, logs, log_at, log_words, log_stride,
                cols,
            )  # fmt: skip
            g = _gate(
                row, channels + HEADS + head, x, row_page, row_index, logs, log_at, log_words,
                log_stride, cols,
            )  # fmt: skip
            beta = 1.0 / (1.0 + tl.exp(-b))
            state = state * tl.exp(a * _softplus(g + dt_bias))
            error = v - tl.sum(state * k[None, :], 1)
            state = tl.fma(
                tl.broadcast_to((beta * error)[:, None], state.shape),
                tl.broadcast_to(k[None, :], state.shape), state,
            )  # fmt: skip
            y = tl.sum(state * q[None, :], 1) * (DK**-0.5)
        else:
            v = tl.load(values + head * DV + columns, mask=columns < DV, other=0.0)
            group_at = values + HEADS * DV + shared * DK
            k = tl.load(group_at + d, mask=d < DK, other=0.0)
            q = tl.load(group_at + K_HEADS * DK + d, mask=d < DK, other=0.0)
            g = _gate(
                row, channels + head, x, row_page, row_index, logs, log_at, log_words, log_stride,
                cols,
            )  # fmt: skip
            dt = tl.minimum(tl.maximum(_softplus(g + dt_bias), dt_low), dt_high)
            state = state * tl.exp(dt * a)
            state = tl.fma(
                tl.broadcast_to((dt * v)[:, None], state.shape),
                tl.broadcast_to(k[None, :], state.shape), state,
            )  # fmt: skip
            y = tl.sum(state * q[None, :], 1) + skip * v
        if row >= first:
            index = tl.load(row_index + row).to(tl.int64)
            tl.store(out + index * (HEADS * DV) + head * DV + columns, y, mask=columns < DV)
        if row + 1 == state_end:
            tl.store(states + state_out * state_words + at, state, mask=inside)


@triton.jit
def short_convolve(
    x, out, weights, biases, state_offsets, log_offsets, states, logs, row_page, row_index,
    row_seq, seq_start, seq_state_in, state_words, log_words, log_stride, cols, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """C · conv(B · x) of a new row."""
    row = tl.program_id(0)
    if tl.load(row_page + row) < 0:
        seq = tl.load(row_seq + row)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = c < channels
        y = _convolved(
            row, tl.load(seq_start + seq), c, inside, _floats(weights, 0), _floats(biases, 0), x,
            row_page, row_index, states, tl.load(seq_state_in + seq).to(tl.int64), logs,
            tl.load(state_offsets), tl.load(log_offsets), state_words, log_words, log_stride, cols,
            channels, BLOCK, WIDTH, True, BIAS,
        )  # fmt: skip
        index = tl.load(row_index + row).to(tl.int64)
        y *= tl.load(x + index * cols + channels + c, mask=inside, other=0.0)
        tl.store(out + index * channels + c, y, mask=inside)


@triton.jit
def keep(
    x, state_offsets, log_offsets, states, logs, row_page, row_index, row_seq, row_log, row_entry,
    seq_start, seq_state_end, seq_state_in, seq_state_out, n_rows, n_seqs, state_words, log_words,
    log_stride, cols, channels, entry_cols,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Writes what is remembered besides states: entries of logs, then tails of convolutions.

    The first n_rows programs have a row each, the others a tail's row of a sequence.
    """
    who, layer = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state_at, log_at = tl.load(state_offsets + layer), tl.load(log_offsets + layer)
    if who < n_rows:
        page = tl.load(row_log + who).to(tl.int64)
        if page >= 0:
            index = tl.load(row_index + who).to(tl.int64)
            inside = c < entry_cols
            value = tl.load(x + index * cols + c, mask=inside, other=0.0)
            if GATED:
                value *= tl.load(x + index * cols + 2 * channels + c, mask=inside, other=0.0)
            entry = tl.load(row_entry + who).to(tl.int64)
            at = page * log_words + log_at + entry * log_stride
            tl.store(logs + at + c, value, mask=inside)
    else:
        seq, i = (who - n_rows) // (WIDTH - 1), (who - n_rows) % (WIDTH - 1)
        page = tl.load(seq_state_out + seq).to(tl.int64)
        if page >= 0:
            inside = c < channels
            row = tl.load(seq_state_end + seq) - (WIDTH - 1) + i
            value = _raw(
                row, tl.load(seq_start + seq), c, inside, x, row_page, row_index, states,
                tl.load(seq_state_in + seq).to(tl.int64), logs, state_at, log_at, state_words,
                log_words, log_stride, cols, channels, WIDTH, GATED,
            )  # fmt: skip
            at = page * state_words + state_at + i * channels
            tl.store(states + at + c, value, mask=inside)
