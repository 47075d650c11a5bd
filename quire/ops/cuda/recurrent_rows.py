"""Recurrent layers on the GPU, and where the states and logs of a step lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton

from quire.ops import Int32, Recurrent, StateTables
from quire.ops.cuda import recur_native
from quire.ops.cuda.kernels import fold as fold_kernels
from quire.ops.cuda.kernels import recur as kernels
from quire.ops.cuda.machine import Machine, need, power_of_two

_LINE = 16  # floats: what follows a tail starts at a multiple of 64 bytes
_COLUMNS = 32  # columns of values that a program has: bits depend on it
_KEPT = 512  # channels of a tail that a program folds


@dataclass(frozen=True, eq=False)
class CudaLayer:
    """A recurrent layer and the sizes it declares."""

    kind: str
    """delta, ssd or conv."""
    in_cols: int
    out_cols: int
    heads: int
    k_heads: int
    """Heads or groups of keys."""
    dk: int
    dv: int
    channels: int
    width: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    tiled: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def tail_words(self) -> int:
        """Floats of the convolution's tail, and what fills its last line."""
        return -(-(self.width - 1) * self.channels // _LINE) * _LINE

    @property
    def state_bytes(self) -> int:
        """Bytes of its state in a state page."""
        state = self.heads * self.dk * self.dv
        return 4 * (self.tail_words + -(-state // _LINE) * _LINE)

    @property
    def raw_cols(self) -> int:
        """Floats of a token's raw inputs in a log."""
        return self.channels if self.kind == "conv" else self.in_cols

    @property
    def log_bytes(self) -> int:
        """Bytes of one token in a log page: raw inputs, then its key, its u and its decays."""
        if self.kind == "conv":
            return 4 * self.channels
        return 4 * (self.in_cols + self.k_heads * self.dk + self.heads * self.dv + self.heads)

    @property
    def shape(self) -> dict[str, int | bool]:
        """What kernels are compiled for."""
        return {
            "HEADS": self.heads, "K_HEADS": self.k_heads, "TILED": self.tiled, "DK": self.dk,
            "DV": self.dv, "DKP": power_of_two(self.dk, 32), "BV": _COLUMNS,
        }  # fmt: skip

    @property
    def programs(self) -> int:
        """How many programs share its heads."""
        return self.heads * -(-self.dv // _COLUMNS)


def layer_of(layer: Recurrent) -> CudaLayer:
    """A layer that this device made."""
    if not isinstance(layer, CudaLayer):
        raise TypeError(f"{type(layer).__name__} is not a layer of the GPU")
    return layer


def layers_of(layers: Sequence[Recurrent]) -> list[CudaLayer]:
    """Layers that this device made, all of one shape."""
    found = [layer_of(layer) for layer in layers]
    sizes = {(f.kind, f.heads, f.k_heads, f.dk, f.dv, f.channels, f.width) for f in found}
    need(len(sizes) <= 1, "layers of several shapes")
    return found


def need_placed(
    layer: CudaLayer, state_at: int, state_page: int, log_at: int, log_page: int, stride: int,
    entries: int,
) -> None:  # fmt: skip
    """Refuses offsets at which a layer's state or log would not lie inside a page."""
    inside = 0 <= state_at <= state_page - layer.state_bytes and state_at % 64 == 0
    need(inside, f"recurrent layer: its state at {state_at} of a page of {state_page}")
    need(stride >= layer.log_bytes, f"recurrent layer: entries are {stride} bytes apart")
    inside = 0 <= log_at <= log_page - entries * stride and log_at % 16 == 0
    need(inside, f"recurrent layer: its log at {log_at} of a page of {log_page}")
    whole = state_page % 16 == 0 and log_page % 16 == 0 and stride % 16 == 0
    need(whole, "recurrent layer: pages and entries must be multiples of 16 bytes")


@dataclass(frozen=True)
class Places:
    """Where pages lie, and how large they are."""

    state_base: int
    state_bytes: int
    log_base: int
    log_bytes: int
    log_stride: int
    log_tokens: int

    @property
    def bases(self) -> tuple[int, int]:
        """Addresses of both pools."""
        return self.state_base, self.log_base

    @property
    def words(self) -> tuple[int, int, int]:
        """Floats of a state page, of a log page, and from one entry to the next."""
        return self.state_bytes // 4, self.log_bytes // 4, self.log_stride // 4


class StateShape(NamedTuple):
    """How large a step is: padding included, so that a captured one serves several."""

    tokens: int
    seqs: int
    """More than there are where there are more tokens: padding is a sequence too."""
    single: bool
    """Whether each sequence has one token, which goes into its log."""

    @property
    def sizes(self) -> list[int]:
        """Of the columns that kernels are told."""
        return [self.seqs] * 8 + [self.tokens] * 4


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


@dataclass(frozen=True)
class CudaStates:
    """One group's states and logs in one step, over `state_columns` on the device."""

    places: Places
    shape: StateShape
    columns: Sequence[torch.Tensor]


def run(
    machine: Machine, layer: CudaLayer, states: CudaStates, state_at: int, log_at: int,
    x: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Takes new tokens through a layer: outputs, states, logs and tails."""
    first, count, state_in, log_in, length, state_out, end, room, *tokens = states.columns
    seq, page, slot, _ = tokens
    words = states.places.words
    mixed = machine.empty(states.shape.tokens, layer.channels)
    gated = layer.kind == "conv"
    keys = layer.k_heads * layer.dk
    key_start = keys if layer.kind == "delta" else layer.heads * layer.dv
    log_tokens, bases = states.places.log_tokens, states.places.bases
    native = recur_native.takes(machine, layer, log_tokens)
    for start, stop, size in _blocks(layer):
        kernels.mix[(states.shape.tokens, triton.cdiv(stop - start, size))](
            x, mixed, layer.weight, layer.weight if layer.bias is None else layer.bias,
            *states.places.bases, first, state_in, log_in, length, state_out, end, seq, page, slot,
            state_at // 4, log_at // 4, *words, layer.in_cols, layer.channels, start, stop, size,
            2 * keys if layer.kind == "delta" else 0, key_start, 0 if gated else key_start + keys,
            WIDTH=layer.width, BLOCK=power_of_two(size, 32), BIAS=layer.bias is not None,
            GATED=gated, EARLY=native and machine.launches_ahead and not gated,
            num_warps=1,
        )  # fmt: skip
    if gated:
        return mixed
    out = machine.empty(states.shape.tokens, layer.out_cols)
    if native:
        tensors = x, mixed, out, layer.a, layer.dt_bias, layer.d
        places = state_at // 4 + layer.tail_words, log_at // 4
        recur_native.recur(
            machine, layer, tensors, bases, states.columns, places, words, log_tokens,
            layer.dt_limits, states.shape.single,
        )  # fmt: skip
        return out
    kernels.recur[(layer.programs, states.shape.seqs)](
        x, mixed, out, layer.a, layer.dt_bias, layer.d, *bases, first, count,
        state_in, log_in, length, state_out, end, room, page, slot,
        state_at // 4 + layer.tail_words, log_at // 4, *words, layer.in_cols, layer.channels,
        *layer.dt_limits, log_tokens, **layer.shape, LOG=power_of_two(log_tokens, 16),
        DELTA=layer.kind == "delta", num_warps=4,
    )  # fmt: skip
    return out


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
    if layer.kind != "conv" and recur_native.takes(machine, layer, places.log_tokens):
        recur_native.fold(machine, layer, places.bases, offsets, columns, words, layer.tail_words)
    elif layer.kind != "conv":
        fold_kernels.fold[(layer.programs, folds, layers)](
            *places.bases, offsets, *columns, layers, *words, layer.tail_words, layer.in_cols,
            **layer.shape, LOG=power_of_two(places.log_tokens, 16), num_warps=4,
        )  # fmt: skip
    fold_kernels.fold_tail[(triton.cdiv(layer.channels, _KEPT), folds, layers)](
        *places.bases, offsets, *columns, layers, *words, layer.channels, WIDTH=layer.width,
        BLOCK=_KEPT, num_warps=4,
    )  # fmt: skip
