"""The group `RecurrentOps` of the table, and the folding of logs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.ops import Array, Float32, Int32, Recurrent, States, StateTables
from quire.ops.cuda.arrays import Arrays, values_of
from quire.ops.cuda.machine import Machine, need, need_apart, need_ids
from quire.ops.cuda.recurrent_layer import (
    CudaLayer,
    CudaStates,
    Places,
    StateShape,
    layer_of,
    layers_of,
    need_placed,
)
from quire.ops.cuda.recurrent_rows import fold, raw_inputs, run, state_columns, state_shape


class RecurrentLayers(Arrays):
    """The group `RecurrentOps` of the table."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._offsets: dict[tuple[int, ...], torch.Tensor] = {}

    def delta_net(
        self, n_k: int, n_v: int, dk: int, dv: int, conv: Float32, conv_bias: Float32 | None,
        ssm_a: Float32, dt_bias: Float32, tiled: bool = False,
    ) -> Recurrent:  # fmt: skip
        """A gated delta net."""
        need(n_k > 0 and n_v % n_k == 0, f"{n_v} heads do not divide into {n_k} groups")
        channels = 2 * n_k * dk + n_v * dv
        need(len(conv) == channels, f"a convolution of {len(conv)} channels")
        need(len(ssm_a) == n_v == len(dt_bias), f"{n_v} heads need as many gates")
        need((ssm_a <= 0).all(), "ssm_a is -exp(A_log) and so never positive")
        sizes = (channels + 2 * n_v, n_v * dv, n_v, n_k, dk, dv)
        return self._layer("delta", sizes, conv, conv_bias, ssm_a, dt_bias, dt_bias, tiled)

    def ssd(
        self, n_heads: int, n_groups: int, head_dim: int, state_dim: int, conv: Float32,
        conv_bias: Float32 | None, ssm_a: Float32, dt_bias: Float32, d: Float32,
        dt_limits: tuple[float, float] = (0.0, np.inf),
    ) -> Recurrent:  # fmt: skip
        """A Mamba-2 layer."""
        channels = n_heads * head_dim + 2 * n_groups * state_dim
        need(n_groups > 0 and n_heads % n_groups == 0, f"{n_heads} heads in {n_groups} groups")
        need(len(conv) == channels, f"a convolution of {len(conv)} channels, not {channels}")
        need(len(ssm_a) == n_heads == len(dt_bias) == len(d), f"{n_heads} heads need as many gates")
        need((ssm_a <= 0).all(), "ssm_a is -exp(A_log) and so never positive")
        sizes = channels + n_heads, n_heads * head_dim, n_heads, n_groups, state_dim, head_dim
        return self._layer(
            "ssd", sizes, conv, conv_bias, ssm_a, dt_bias, d, dt_limits=tuple(map(float, dt_limits))
        )

    def short_conv(self, conv: Float32, conv_bias: Float32 | None = None) -> Recurrent:
        """A gated short convolution."""
        need(conv.shape[1] >= 2, f"a convolution of width {conv.shape[1]} remembers nothing")
        one = np.zeros(1, np.float32)
        sizes = 3 * len(conv), len(conv), 0, 1, 1, 1
        return self._layer("conv", sizes, conv, conv_bias, one, one, one)

    def _layer(
        self, kind: str, sizes: tuple[int, int, int, int, int, int], conv: Float32,
        bias: Float32 | None, a: Float32, dt_bias: Float32, d: Float32, tiled: bool = False,
        dt_limits: tuple[float, ...] = (0.0, np.inf),
    ) -> CudaLayer:  # fmt: skip
        need(conv.shape[1] >= 2, f"a convolution of width {conv.shape[1]} remembers nothing")
        need(bias is None or len(bias) == len(conv), "one bias per channel")
        upload = self.machine.upload
        weight, *rest = (upload(each.astype(np.float32)) for each in (conv, a, dt_bias, d))
        own_bias = None if bias is None else upload(bias.astype(np.float32))
        return CudaLayer(
            kind, *sizes, len(conv), conv.shape[1], weight, own_bias, rest[0],
            rest[1], rest[2], tiled, (dt_limits[0], dt_limits[1]),
        )  # fmt: skip

    def states(self, view: StateTables, state_base: int, log_base: int, seq_rows: Int32) -> States:
        """One recurrent group's states and logs as the kernels of a step see them."""
        need_states(view, seq_rows)
        shape = state_shape(view, seq_rows)
        columns = self.machine.upload_all(state_columns(view, seq_rows, shape))
        return States(CudaStates(state_places(view, state_base, log_base), shape, columns))

    def recur(
        self, x: Array, layer: Recurrent, states: States, state_offset: int, log_offset: int
    ) -> Array:
        """Takes tokens into their logs or states, and returns the layer's outputs."""
        assert isinstance(states, CudaStates)
        mine, at = layer_of(layer), states.places
        shape = states.shape.tokens, mine.in_cols
        need(x.shape == shape, f"recur: x is {x.shape} where {shape} is needed")
        need_placed(
            mine, state_offset, at.state_bytes, log_offset, at.log_bytes, at.log_stride,
            at.log_tokens,
        )  # fmt: skip
        return self.new(run(self.machine, mine, states, state_offset, log_offset, values_of(x)))

    def fold(
        self, layers: Sequence[Recurrent], offsets: Sequence[tuple[int, int]],
        state_base: int, state_page_bytes: int, log_base: int, log_page_bytes: int, log_stride: int,
        state_in: Int32, log: Int32, n_entries: Int32, state_out: Int32,
    ) -> None:  # fmt: skip
        """Makes log pages part of state pages (-1: zeros), in other state pages, in all layers."""
        need(len(layers) == len(offsets), f"{len(layers)} layers, but offsets of {len(offsets)}")
        need_ids("fold", state_in, len(state_in), least=-1)
        need_ids("fold", log, len(state_in))
        need_ids("fold", state_out, len(state_in))
        need_apart("fold", state_in, state_out)
        need(len(n_entries) == len(state_in), "fold: one entry per fold")
        need((n_entries > 0).all(), "fold: there are no entries to fold")
        most = int(n_entries.max(initial=1))
        mine = layers_of(layers)
        for layer, (state_at, log_at) in zip(mine, offsets, strict=True):
            sizes = state_at, state_page_bytes, log_at, log_page_bytes, log_stride
            need_placed(layer, *sizes, most)
        if len(state_in) and mine:
            columns = self.machine.upload_all([state_in, log, n_entries, state_out])
            sizes = state_base, state_page_bytes, log_base, log_page_bytes, log_stride
            fold(self.machine, mine[0], Places(*sizes, most), self._uploaded(offsets), columns)

    def state_parts(self, layer: Recurrent) -> tuple[int, int, int, int, int, int]:
        """What a layer's state and its entries in logs are made of."""
        mine = layer_of(layer)
        derived = mine.log_bytes // 4 - mine.raw_cols
        return mine.tail_words, mine.heads, mine.dk, mine.dv, mine.raw_cols, derived

    def derive(
        self, layers: Sequence[Recurrent], offsets: Sequence[tuple[int, int]],
        state_base: int, state_page_bytes: int, log_base: int, log_page_bytes: int, log_stride: int,
        state_in: Int32, log: Int32, n_entries: Int32,
    ) -> None:  # fmt: skip
        """Completes entries of logs: their raw inputs are computed as new tokens."""
        sizes = state_base, state_page_bytes, log_base, log_page_bytes, log_stride
        places, n = Places(*sizes, int(n_entries.max(initial=1))), len(log)
        rows = np.repeat(np.arange(n, dtype=np.int32), n_entries)
        none, zero = np.full(n, -1, np.int32), np.zeros(n, np.int32)
        ahead = np.arange(len(rows)) - (np.cumsum(n_entries) - n_entries)[rows]
        first = np.cumsum(n_entries) - n_entries
        told = (first, n_entries, state_in, none, zero, none, none, n_entries, rows, log[rows],
                ahead, ahead)  # fmt: skip
        columns = self.machine.upload_all([column.astype(np.int32) for column in told])
        states = CudaStates(places, StateShape(len(rows), n, False), columns)
        for layer, (state_at, log_at) in zip(layers_of(layers), offsets, strict=True):
            if layer.kind != "conv":
                x = raw_inputs(self.machine, layer, states, log_at)
                run(self.machine, layer, states, state_at, log_at, x)

    def _uploaded(self, offsets: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Floats at which states start, then logs, by layer: the same in every fold of a group."""
        key = tuple(at // 4 for part in zip(*offsets, strict=True) for at in part)
        if key not in self._offsets:
            self._offsets[key] = self.machine.upload(np.array(key, np.int64))
        return self._offsets[key]


def state_places(view: StateTables, state_base: int, log_base: int) -> Places:
    """Where a view's pages lie."""
    sizes = view.state_page_bytes, log_base, view.log_page_bytes, view.log_stride
    return Places(state_base, *sizes, view.layout.log_tokens)


def need_states(view: StateTables, seq_rows: Int32) -> None:
    """Refuses tables that say neither append nor scan, or would overwrite what they read."""
    n, log_tokens = len(view.state_in), view.layout.log_tokens
    columns = (view.state_out, view.log_in, view.log_length, view.log_out, view.tail,
               view.log_kept, view.room)  # fmt: skip
    need(all(len(each) == n for each in columns), "one entry per sequence")
    need(((seq_rows >= 0) & (seq_rows < n)).all(), "a token of no sequence")
    counts = np.bincount(seq_rows, minlength=n)
    need((counts > 0).all(), "a sequence without tokens")
    need(np.count_nonzero(np.diff(seq_rows)) == n - 1, "the tokens of a sequence lie apart")
    ids = (view.state_in, view.state_out, view.log_in, view.log_out, view.log_kept)
    need(all((each >= -1).all() for each in ids), "a page below -1")
    length, tail, kept = view.log_length, view.tail, view.log_kept
    need(((length >= 0) & (length <= view.room)).all(), "more entries than a log holds")
    need(((view.room > 0) & (view.room <= log_tokens)).all(), "a log without an end")
    need(((length == 0) | (view.log_in >= 0)).all(), "entries in no log")
    same = (view.log_in < 0) | (view.log_in == np.where(kept >= 0, kept, view.log_out))
    append = (view.log_out >= 0) & (tail == 0) & (length + counts <= view.room) & (kept < 0) & same
    padding = (np.stack(ids) == -1).all(0) & (tail == 0)
    head = counts - tail  # tokens before the state that is written
    scans = (view.state_out != view.state_in) & (tail >= 0) & (tail <= log_tokens)
    scans &= (head > 0) | ((kept >= 0) & (head == 0))
    scans &= (tail > 0) == (view.log_out >= 0)
    scans &= (view.log_out < 0) | (view.log_out != view.log_in)
    scans &= (kept < 0) | (same & (kept != view.log_out) & (length + head <= view.room))
    good = np.where(view.state_out >= 0, scans, append | padding)
    need(good.all(), "a sequence that can neither append nor scan so")
