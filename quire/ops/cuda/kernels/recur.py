"""Recurrent layers: a state page, a log behind it, then new tokens.

A state is the sum of what its tokens added, each decayed since: with c the sum of the log-decays
behind a state S, the token t behind it sees

    S_t = exp(c_t) S + Σ exp(c_t - c_i) u_i k_iᵀ                                          i ≤ t
    u_t = β_t (v_t - exp(c_t) S k_t - Σ exp(c_t - c_i) (k_i · k_t) u_i)   i < t   (delta rule)
    u_t = Δ_t x_t                                                                 (Mamba-2)
    y_t = exp(c_t) S q_t + Σ exp(c_t - c_i) (k_i · q_t) u_i

so it reads S once, and of the tokens between only k, u and c. These are in the log, behind a
token's raw inputs: [raw | k | u | c]. Folding a log is the first line. What a token gives depends
on which tokens are between it and the state, so states are where positions say, and one body of
code, `_advance`, serves one token, drafts and prompts alike.

A state page holds the convolution's tail [width - 1, channels], then the state [heads, dv, dk].
Pools are given by address. A sequence without a page to write to is padding: it writes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def floats_at(base, page, page_words, offset):
    """Floats of a page, from an offset on; pools start at multiples of 16 bytes."""
    start = tl.multiple_of(base.to(tl.pointer_type(tl.float32)), 16)
    return start + (page.to(tl.int64) * page_words + offset)


@triton.jit
def raw_input(
    row, i, back, c, inside, x, cols, channels, entries, n_entries, log_stride, tail, known,
    WIDTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Raw inputs c of the token `back` before new token i: new, in the log, or in the tail."""
    old = n_entries + i - back
    # As blocks: the interpreter cannot mask with a block and a scalar.
    ahead, olds = i - back + c * 0, old + c * 0
    new = inside & (ahead >= 0)
    in_log = inside & (ahead < 0) & (olds >= 0)
    in_tail = inside & (ahead < 0) & (olds < 0) & (known + c * 0 > 0)
    value = tl.load(x + (row - back).to(tl.int64) * cols + c, mask=new, other=0.0)
    if GATED:  # a short convolution takes B · x
        at = (row - back).to(tl.int64) * cols + 2 * channels
        value *= tl.load(x + at + c, mask=new, other=0.0)
    value += tl.load(entries + old.to(tl.int64) * log_stride + c, mask=in_log, other=0.0)
    return value + tl.load(tail + (WIDTH - 1 + old) * channels + c, mask=in_tail, other=0.0)


@triton.jit
def mix(
    x, mixed, weight, bias, states, logs, seq_first, seq_state_in, seq_log_in, seq_log_length,
    seq_state_out, seq_state_end, row_seq, row_page, row_slot, state_at, log_at, state_words,
    log_words, log_stride, cols, channels, start_col, end_col, head_cols, normed_cols, key_start,
    key_end,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What a token's recurrence takes: silu of the convolution, brought to length 1 up to
    `normed_cols`; or, GATED, all that a short convolution does. Keeps raw inputs and keys in the
    log, and the tail of a state that is written.
    """
    row = tl.program_id(0)
    seq, page = tl.load(row_seq + row), tl.load(row_page + row)
    state_out = tl.load(seq_state_out + seq)
    first = start_col + tl.program_id(1) * head_cols
    c = first + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < head_cols) & (c < end_col)
    if (page >= 0) | (state_out >= 0):
        i = row - tl.load(seq_first + seq)
        state_in, n_entries = tl.load(seq_state_in + seq), tl.load(seq_log_length + seq)
        entries = floats_at(logs, tl.load(seq_log_in + seq), log_words, log_at)
        tail = floats_at(states, state_in, state_words, state_at)
        known = tl.where(state_in >= 0, 1, 0)
        y = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(WIDTH):
            value = raw_input(
                row, i, WIDTH - 1 - j, c, inside, x, cols, channels, entries, n_entries,
                log_stride, tail, known, WIDTH, GATED,
            )  # fmt: skip
            y += value * tl.load(weight + c * WIDTH + j, mask=inside, other=0.0)
        if BIAS:
            y += tl.load(bias + c, mask=inside, other=0.0)
        if GATED:
            y *= tl.load(x + row.to(tl.int64) * cols + channels + c, mask=inside, other=0.0)
        else:
            y = y / (1.0 + tl.exp(-y))
            if first < normed_cols:
                y = y * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(y * y, 0) + 1e-6))
        tl.store(mixed + row.to(tl.int64) * channels + c, y, mask=inside)
        if page >= 0:
            entry = floats_at(logs, page, log_words, log_at + tl.load(row_slot + row) * log_stride)
            tl.store(entry + c, value, mask=inside)
            keys = inside & (c >= key_start) & (c < key_end)
            tl.store(entry + cols + (c - key_start), y, mask=keys)
        end = tl.load(seq_state_end + seq)
        if (state_out >= 0) & (i == tl.maximum(end, 1) - 1):
            kept = floats_at(states, state_out, state_words, state_at)
            for j in tl.static_range(WIDTH - 1):
                value = raw_input(
                    row, i, i - end + WIDTH - 1 - j, c, inside, x, cols, channels, entries,
                    n_entries, log_stride, tail, known, WIDTH, GATED,
                )  # fmt: skip
                tl.store(kept + j * channels + c, value, mask=inside)
    elif GATED:
        zero = tl.zeros([BLOCK], tl.float32)
        tl.store(mixed + row.to(tl.int64) * channels + c, zero, mask=inside)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def state_tile(states, page, state_words, at, inside):
    """A tile of a state; that of no page is zero."""
    known = inside & (page + tl.zeros_like(inside).to(tl.int32) >= 0)
    return tl.load(floats_at(states, page, state_words, 0) + at, mask=known, other=0.0)


@triton.jit
def log_tiles(
    logs, page, log_words, log_at, log_stride, n, cols, shared, head, d, columns,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    """Keys, u and c of a log's entries; zeros behind its end."""
    t = tl.arange(0, LOG)
    entry = floats_at(logs, page, log_words, log_at) + (t * log_stride + cols)
    old = t < n
    at_key = entry[:, None] + (shared * DK + d[None, :])
    keys = tl.load(at_key, mask=old[:, None] & (d < DK)[None, :], other=0.0)
    at_u = entry[:, None] + (K_HEADS * DK + head * DV + columns[None, :])
    u = tl.load(at_u, mask=old[:, None] & (columns < DV)[None, :], other=0.0)
    c = tl.load(entry + (K_HEADS * DK + HEADS * DV + head), mask=old, other=0.0)
    return keys, u, c


@triton.jit
def folded(state, keys, u, c, n, LOG: tl.constexpr):
    """A state and the n tokens behind it, as a state."""
    t = tl.arange(0, LOG)
    last = tl.sum(tl.where(t == n - 1, c, 0.0), 0)
    share = tl.where(t < n, tl.exp(last - c), 0.0)
    added = tl.trans(u * share[:, None])
    return tl.dot(added, keys, acc=state * tl.exp(last), input_precision="ieee")


@triton.jit
def _advance(
    state, keys, u, c, c_last, n, k, q, v, gate, rate, a, dt_bias, skip, dt_low, dt_high,
    LOG: tl.constexpr, DELTA: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Token n behind a state: its output, and keys, u and c with its own."""
    t = tl.arange(0, LOG)
    dt = _softplus(gate + dt_bias)
    if not DELTA:
        dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
    now = c_last + a * dt
    c = tl.where(t == n, now, c)
    keys = tl.where((t == n)[:, None], k[None, :], keys)
    share = tl.where(t <= n, tl.exp(now - c), 0.0)
    decay = tl.exp(now)
    if DELTA:
        seen = tl.sum(keys * k[None, :], 1) * share
        past = tl.sum(u * tl.where(t < n, seen, 0.0)[:, None], 0)
        own = tl.sum(state * k[None, :], 1)
        mine = 1.0 / (1.0 + tl.exp(-rate)) * (v - (decay * own + past))
    else:
        mine = dt * v
    u = tl.where((t == n)[:, None], mine[None, :], u)
    seen = tl.sum(keys * q[None, :], 1) * share
    y = decay * tl.sum(state * q[None, :], 1) + tl.sum(u * seen[:, None], 0)
    y = y * SCALE if DELTA else y + skip * v
    return y, mine, keys, u, c, now


@triton.jit
def recur(
    x, mixed, out, a_log, dt_bias, skip, states, logs, seq_first, seq_count, seq_state_in,
    seq_log_in, seq_log_length, seq_state_out, seq_state_end, seq_room, row_page, row_slot,
    state_at, log_at, state_words, log_words, log_stride, cols, channels, dt_low, dt_high,
    log_tokens,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, TILED: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr, LOG: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """A sequence's new tokens in one head, for some columns of its values.

    The log is folded where it ends, and the state before token `seq_state_end` is stored.
    """
    splits: tl.constexpr = (DV + BV - 1) // BV
    seq, head = tl.program_id(1), tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    columns = split * BV + tl.arange(0, BV)
    d = tl.arange(0, DKP)
    shared = head % K_HEADS if TILED else head // (HEADS // K_HEADS)
    first, count = tl.load(seq_first + seq), tl.load(seq_count + seq)
    state_out = tl.load(seq_state_out + seq)
    inside = (columns < DV)[:, None] & (d < DK)[None, :]
    at = state_at + head * (DK * DV) + columns[:, None] * DK + d[None, :]
    if (tl.load(row_page + first) >= 0) | (state_out >= 0):
        a, bias = tl.load(a_log + head), tl.load(dt_bias + head)
        through = tl.load(skip + head)
        state = state_tile(states, tl.load(seq_state_in + seq), state_words, at, inside)
        n, room = tl.load(seq_log_length + seq), tl.load(seq_room + seq)
        end = tl.load(seq_state_end + seq)
        keys, u, c = log_tiles(
            logs, tl.load(seq_log_in + seq), log_words, log_at, log_stride, n, cols, shared, head,
            d, columns, HEADS, K_HEADS, DK, DV, LOG,
        )  # fmt: skip
        c_last = tl.sum(tl.where(tl.arange(0, LOG) == n - 1, c, 0.0), 0)
        for i in range(count):
            if (n == room) | (i == end):
                state = folded(state, keys, u, c, n, LOG)
                n, c_last, room = n * 0, c_last * 0.0, room * 0 + log_tokens
                if i == end:
                    kept = floats_at(states, state_out, state_words, 0)
                    tl.store(kept + at, state, mask=inside)
            row = (first + i).to(tl.int64)
            values, raw = mixed + row * channels, x + row * cols + channels
            if DELTA:
                q = tl.load(values + shared * DK + d, mask=d < DK, other=0.0)
                k = tl.load(values + (K_HEADS + shared) * DK + d, mask=d < DK, other=0.0)
                at_v = values + 2 * K_HEADS * DK + head * DV + columns
                rate, gate = tl.load(raw + head), tl.load(raw + HEADS + head)
            else:
                k = tl.load(values + HEADS * DV + shared * DK + d, mask=d < DK, other=0.0)
                at_q = values + HEADS * DV + (K_HEADS + shared) * DK + d
                q = tl.load(at_q, mask=d < DK, other=0.0)
                at_v = values + head * DV + columns
                gate = tl.load(raw + head)
                rate = gate
            v = tl.load(at_v, mask=columns < DV, other=0.0)
            y, mine, keys, u, c, c_last = _advance(
                state, keys, u, c, c_last, n, k, q, v, gate, rate, a, bias, through, dt_low,
                dt_high, LOG, DELTA, DK**-0.5,
            )  # fmt: skip
            n += 1
            tl.store(out + row * (HEADS * DV) + head * DV + columns, y, mask=columns < DV)
            page = tl.load(row_page + row)
            if page >= 0:
                slot = log_at + tl.load(row_slot + row) * log_stride
                entry = floats_at(logs, page, log_words, slot)
                own = entry + (cols + K_HEADS * DK + head * DV)
                tl.store(own + columns, mine, mask=columns < DV)
                if split == 0:
                    tl.store(entry + (cols + K_HEADS * DK + HEADS * DV + head), c_last)
                    if DELTA:
                        tl.store(entry + (channels + head), rate)
                        tl.store(entry + (channels + HEADS + head), gate)
                    else:
                        tl.store(entry + (channels + head), gate)
        if end == count:
            state = folded(state, keys, u, c, n, LOG)
            tl.store(floats_at(states, state_out, state_words, 0) + at, state, mask=inside)
    else:
        for i in range(count):
            own = out + (first + i).to(tl.int64) * (HEADS * DV) + head * DV
            tl.store(own + columns, tl.zeros([BV], tl.float32), mask=columns < DV)
