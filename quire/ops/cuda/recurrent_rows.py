"""What a step tells kernels of states and logs, and which kernels it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from quire.ops import Int32, StateTables
from quire.ops.cuda import recur_native
from quire.ops.cuda.kernels import fold as fold_kernels
from quire.ops.cuda.kernels import recur as kernels
from quire.ops.cuda.machine import Machine, power_of_two
from quire.ops.cuda.recurrent_layer import CudaLayer, CudaStates, Places, StateShape

_KEPT = 512  # channels of a tail that a program folds


def state_shape(view: StateTables, seq_rows: Int32) -> StateShape:
    """The shape of a step as it is."""
    n = len(view.state_in)
    return StateShape(len(seq_rows), n, len(seq_rows) == n and bool((view.state_out < 0).all()))


def state_columns(view: StateTables, seq_rows: Int32, shape: StateShape) -> list[Int32]:
    """What kernels are told of a step: eight numbers for each sequence, four for each token."""
    n, tokens = len(view.state_in), np.arange(len(seq_rows), dtype=np.int32)
    count = np.bincount(seq_rows, minlength=n)
    starts = np.concatenate([[True], np.diff(seq_rows) != 0])
    first = np.zeros(n, np.int32)
    first[seq_rows[starts]] = tokens[starts]
    scans = view.state_out >= 0
    end = np.where(scans, count - view.tail, -1)
    ahead = tokens - first[seq_rows]
    behind = scans[seq_rows] & (ahead >= end[seq_rows])  # in the log that follows a new state
    page = np.where(scans, view.log_kept, view.log_out)[seq_rows]
    page = np.where(behind, view.log_out[seq_rows], page)
    slot = ahead + np.where(behind, -end[seq_rows], view.log_length[seq_rows])
    entry = _entries(view, seq_rows, ahead, end)
    columns = (
        first, count, view.state_in, view.log_in, view.log_length, view.state_out, end, view.room,
        seq_rows, page, slot, entry,
    )  # fmt: skip
    # One sequence of padding has all tokens of padding, others have none.
    spare = shape.tokens - len(tokens)
    assert shape.seqs > n or not spare, "padding needs a sequence"
    fill = (len(tokens), 0, -1, -1, 0, -1, -1, 1, n, -1, 0, 0)
    each = zip(columns, shape.sizes, fill, strict=True)
    made = [_filled(np.asarray(column), size, value) for column, size, value in each]
    made[0][n:], made[1][n : n + 1] = min(len(tokens), shape.tokens - 1), spare
    return made


def _entries(view: StateTables, seq_rows: Int32, ahead: Int32, end: Int32) -> Int32:
    """For each token, how many tokens are between it and its state."""
    length, every = view.log_length[seq_rows], view.layout.log_tokens
    until, ends = view.room[seq_rows] - length, end[seq_rows]
    entry = np.where(ahead < until, length + ahead, (ahead - until) % every)
    return np.where((ends >= 0) & (ahead >= ends), (ahead - ends) % every, entry)


def _filled(column: Int32, size: int, value: int) -> Int32:
    """A column, and a value up to its size."""
    made = np.full(size, value, np.int32)
    made[: len(column)] = column
    return made


def run(
    machine: Machine, layer: CudaLayer, states: CudaStates, state_at: int, log_at: int,
    x: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Takes new tokens through a layer: outputs, states, logs and tails."""
    if recur_native.takes(machine, layer, states.places.log_tokens):
        return recur_native.recur(machine, layer, states, state_at, log_at, x)
    mixed = _mixed(machine, layer, states, state_at, log_at, x)
    if layer.kind == "conv":
        return mixed
    out = machine.empty(states.shape.tokens, layer.out_cols)
    first, count, state_in, log_in, length, state_out, end, room, _, page, slot, _ = states.columns
    at = states.places
    kernels.recur[(layer.programs, states.shape.seqs)](
        x, mixed, out, layer.a, layer.dt_bias, layer.d, *at.bases, first, count, state_in, log_in,
        length, state_out, end, room, page, slot, state_at // 4 + layer.tail_words, log_at // 4,
        *at.words, layer.in_cols, layer.channels, *layer.dt_limits, at.log_tokens, **layer.shape,
        LOG=power_of_two(at.log_tokens, 16), DELTA=layer.kind == "delta", num_warps=4,
    )  # fmt: skip
    return out


def _mixed(
    machine: Machine, layer: CudaLayer, states: CudaStates, state_at: int, log_at: int,
    x: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """What the recurrence takes, or all that a short convolution does."""
    first, _, state_in, log_in, length, state_out, end, _, seq, page, slot, _ = states.columns
    mixed = machine.empty(states.shape.tokens, layer.channels)
    gated = layer.kind == "conv"
    keys = layer.k_heads * layer.dk
    key_start = keys if layer.kind == "delta" else layer.heads * layer.dv
    for start, stop, size in _blocks(layer):
        kernels.mix[(states.shape.tokens, triton.cdiv(stop - start, size))](
            x, mixed, layer.weight, layer.weight if layer.bias is None else layer.bias,
            *states.places.bases, first, state_in, log_in, length, state_out, end, seq, page, slot,
            state_at // 4, log_at // 4, *states.places.words, layer.in_cols, layer.channels, start,
            stop, size, 2 * keys if layer.kind == "delta" else 0, key_start,
            0 if gated else key_start + keys, WIDTH=layer.width, BLOCK=power_of_two(size, 32),
            BIAS=layer.bias is not None, GATED=gated, num_warps=1,
        )  # fmt: skip
    return mixed


def raw_inputs(machine: Machine, layer: CudaLayer, states: CudaStates, log_at: int) -> torch.Tensor:
    """Raw inputs of tokens that are in logs already, where they will be written again."""
    x = machine.empty(states.shape.tokens, layer.in_cols)
    _, words, stride = states.places.words
    fold_kernels.raw_inputs[(states.shape.tokens, triton.cdiv(layer.in_cols, _KEPT))](
        x, states.places.log_base, *states.columns[9:11], log_at // 4, words, stride, layer.in_cols,
        BLOCK=_KEPT,
    )  # fmt: skip
    return x


def _blocks(layer: CudaLayer) -> list[tuple[int, int, int]]:
    """Channels from, to, and how many at a time: those that are brought to length 1 by heads."""
    keys = 2 * layer.k_heads * layer.dk
    if layer.kind != "delta" or layer.dk == layer.dv:
        return [(0, layer.channels, layer.dk if layer.kind == "delta" else 128)]
    return [(0, keys, layer.dk), (keys, layer.channels, layer.dv)]


def fold(
    machine: Machine, layer: CudaLayer, places: Places, offsets: torch.Tensor,
    columns: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Folds logs into states in all layers, which are shaped like this one.

    `offsets` has the floats at which each layer's state starts, then each layer's log; `columns`
    are pages of states, of logs, numbers of entries, and pages of states to write.
    """
    folds, layers = len(columns[0]), len(offsets) // 2
    words = places.words
    if recur_native.takes(machine, layer, places.log_tokens):
        recur_native.fold(machine, layer, places, offsets, columns)
    elif layer.kind != "conv":
        fold_kernels.fold[(layer.programs, folds, layers)](
            *places.bases, offsets, *columns, layers, *words, layer.tail_words, layer.in_cols,
            **layer.shape, LOG=power_of_two(places.log_tokens, 16), num_warps=4,
        )  # fmt: skip
    fold_kernels.fold_tail[(triton.cdiv(layer.channels, _KEPT), folds, layers)](
        *places.bases, offsets, *columns, layers, *words, layer.channels, WIDTH=layer.width,
        BLOCK=_KEPT, num_warps=4,
    )  # fmt: skip
