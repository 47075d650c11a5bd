"""The group `RecurrentOps` of the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.ops import Array, Float32, Int32, Recurrent, States, StateTables
from quire.ops.cuda.arrays import Arrays, values_of
from quire.ops.cuda.machine import Machine, need
from quire.ops.cuda.recurrent_rows import CudaLayer, Rows, layer_of, need_placed, run


@dataclass(frozen=True)
class CudaStates:
    """One group's states and logs in one step."""

    view: StateTables
    rows: Rows


class RecurrentLayers(Arrays):
    """The group `RecurrentOps` of the table."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._places: dict[tuple[int, int, int], tuple[CudaLayer, torch.Tensor]] = {}

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
            self.machine, kind, *sizes, len(conv), conv.shape[1], weight, own_bias, rest[0],
            rest[1], rest[2], tiled, (dt_limits[0], dt_limits[1]),
        )  # fmt: skip

    def states(self, view: StateTables, state_base: int, log_base: int, seq_rows: Int32) -> States:
        """One recurrent group's states and logs as the kernels of a step see them."""
        need_states(view, seq_rows)
        fresh = np.bincount(seq_rows, minlength=len(view.state_in)).astype(np.int32)
        # Rows follow the sequences' order in the batch, which need not be that of their numbers.
        order = seq_rows[np.concatenate([[True], np.diff(seq_rows) != 0])]
        places = state_base, view.state_page_bytes, log_base, view.log_page_bytes, view.log_stride
        columns = (view.log_length, fresh, view.log_in, view.state_in, view.state_out, view.tail,
                   view.log_out)  # fmt: skip
        rows = Rows.make(self.machine, places, *(column[order] for column in columns))
        return States(CudaStates(view, rows))

    def recur(
        self, x: Array, layer: Recurrent, states: States, state_offset: int, log_offset: int
    ) -> Array:
        """Takes tokens into their logs or states, and returns the layer's outputs."""
        assert isinstance(states, CudaStates)
        mine, view, rows = layer_of(layer), states.view, states.rows
        shape = rows.n_new, mine.in_cols
        need(x.shape == shape, f"recur: x is {x.shape} where {shape} is needed")
        need_placed(
            mine, state_offset, view.state_page_bytes, log_offset, view.log_page_bytes,
            view.log_stride, view.layout.log_tokens,
        )  # fmt: skip
        offsets = self._place(mine, state_offset, log_offset)
        out = self.machine.empty(rows.n_new, mine.out_cols)
        run([mine], offsets[:5], offsets[5:], rows, values_of(x), out)
        return self.new(out)

    def _place(self, layer: CudaLayer, state_offset: int, log_offset: int) -> torch.Tensor:
        """Addresses of a layer's weights, and where its state and log lie: kept for every step."""
        key = id(layer), state_offset, log_offset
        if key not in self._places:
            column = [*layer.addresses, state_offset // 4, log_offset // 4]
            uploaded = self.machine.upload(np.array(column, np.int64).reshape(-1, 1))
            self._places[key] = layer, uploaded  # the layer lives as long as its number is used
        return self._places[key][1]


def need_states(view: StateTables, seq_rows: Int32) -> None:
    """Refuses tables that say neither append nor scan, or would overwrite what they read."""
    n, log_tokens = len(view.state_in), view.layout.log_tokens
    columns = (view.state_out, view.log_in, view.log_length, view.log_out, view.tail)
    need(all(len(each) == n for each in columns), "one entry per sequence")
    need(((seq_rows >= 0) & (seq_rows < n)).all(), "a token of no sequence")
    counts = np.bincount(seq_rows, minlength=n)
    need((counts > 0).all(), "a sequence without tokens")
    need(np.count_nonzero(np.diff(seq_rows)) == n - 1, "the tokens of a sequence lie apart")
    ids = (view.state_in, view.state_out, view.log_in, view.log_out)
    need(all((each >= -1).all() for each in ids), "a page below -1")
    length, tail, scan = view.log_length, view.tail, view.state_out >= 0
    need(((length >= 0) & (length <= log_tokens)).all(), "more entries than a log holds")
    need(((length == 0) | (view.log_in >= 0)).all(), "entries in no log")
    append = (view.log_out >= 0) & (tail == 0) & (length + counts <= log_tokens)
    append &= (view.log_in < 0) | (view.log_in == view.log_out)
    scans = (view.state_out != view.state_in) & (tail >= 0) & (tail < counts)
    scans &= (tail <= log_tokens) & ((tail > 0) == (view.log_out >= 0))
    scans &= (view.log_out < 0) | (view.log_out != view.log_in)
    need(np.where(scan, scans, append).all(), "a sequence that can neither append nor scan so")
