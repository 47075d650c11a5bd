"""Recurrent layers on the GPU, and the rows of tokens that kernels run them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import triton

from quire.ops import Int32, Recurrent
from quire.ops.cuda.kernels import recur as kernels
from quire.ops.cuda.machine import Machine, from_lowest, need, power_of_two

_LINE = 16  # floats: what follows a tail starts at a multiple of 64 bytes


@dataclass(frozen=True, eq=False)
class CudaLayer:
    """A recurrent layer and the sizes it declares."""

    machine: Machine
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
    def entry_cols(self) -> int:
        """Floats of a token in a log."""
        return self.channels if self.kind == "conv" else self.in_cols

    @property
    def log_bytes(self) -> int:
        """Bytes of one token in a log page."""
        return 4 * self.entry_cols

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where weight, bias, a, dt_bias and d lie."""
        bias = self.weight if self.bias is None else self.bias
        found = (self.weight, bias, self.a, self.dt_bias, self.d)
        return tuple(int(each.data_ptr()) for each in found)


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
    inside = 0 <= log_at <= log_page - entries * stride and log_at % 4 == 0
    need(inside, f"recurrent layer: its log at {log_at} of a page of {log_page}")
    whole = state_page % 4 == 0 and log_page % 4 == 0 and stride % 4 == 0
    need(whole, "recurrent layer: pages and entries must be whole floats")


@dataclass
class Rows:
    """Tokens since the states of some sequences, in order, and where all of it lies."""

    machine: Machine
    state_base: int
    state_words: int
    log_base: int
    log_words: int
    log_stride: int
    n_rows: int
    n_seqs: int
    n_new: int
    page: torch.Tensor
    """[rows] log page of an entry, -1 for a new token."""
    index: torch.Tensor
    """[rows] number of the entry, or row of the new token."""
    seq: torch.Tensor
    log: torch.Tensor
    """[rows] log page that a new token goes into, or -1."""
    entry: torch.Tensor
    start: torch.Tensor
    """[sequences] first row, first new one, end, and the row whose state is stored."""
    new: torch.Tensor
    end: torch.Tensor
    state_end: torch.Tensor
    state_in: torch.Tensor
    state_out: torch.Tensor

    @classmethod
    def make(
        cls, machine: Machine, places: tuple[int, int, int, int, int], old: Int32, fresh: Int32,
        log_in: Int32, state_in: Int32, state_out: Int32, tail: Int32, log_out: Int32,
    ) -> Rows:  # fmt: skip
        """From entries and new tokens of each sequence, and the pages they are in and go to."""
        state_base, state_bytes, log_base, log_bytes, stride = places
        state_base, (state_in, state_out) = from_lowest(
            state_base, state_bytes, state_in, state_out
        )
        log_base, (log_in, log_out) = from_lowest(log_base, log_bytes, log_in, log_out)
        counts = old + fresh
        ends = np.cumsum(counts)
        starts = ends - counts
        seq = np.repeat(np.arange(len(counts)), counts)
        at = np.arange(int(counts.sum())) - starts[seq]
        is_new = at >= old[seq]
        new_row = at - old[seq]
        page = np.where(is_new, -1, log_in[seq])
        index = np.where(is_new, new_row + (np.cumsum(fresh) - fresh)[seq], at)
        scans = state_out >= 0
        kept_from = np.where(scans, fresh - tail, 0)
        kept = is_new & (new_row >= kept_from[seq]) & (log_out[seq] >= 0)
        entry = new_row - kept_from[seq] + np.where(scans, 0, old)[seq]
        columns = [
            page, index, seq, np.where(kept, log_out[seq], -1), entry, starts, starts + old, ends,
            np.where(scans, ends - tail, -1), state_in, state_out,
        ]  # fmt: skip
        uploaded = machine.upload_all([column.astype(np.int32) for column in columns])
        words = state_base, state_bytes // 4, log_base, log_bytes // 4, stride // 4
        sizes = len(seq), len(counts), int(fresh.sum())
        return cls(machine, *words, *sizes, *uploaded)

    @property
    def states(self) -> torch.Tensor:
        """State pages as kernels address them."""
        return self._pointer(self.state_base)

    @property
    def logs(self) -> torch.Tensor:
        """Log pages as kernels address them."""
        return self._pointer(self.log_base)

    def _pointer(self, address: int) -> torch.Tensor:
        """Where there are no pages, something that nobody reads."""
        return self.machine.pointer(address, torch.float32) if address else self._nothing

    @cached_property
    def _nothing(self) -> torch.Tensor:
        return self.machine.empty(1)


def _offsets(machine: Machine, offsets: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Floats at which states and logs of layers start: [2, layers]."""
    return machine.upload((np.array(offsets, np.int64).T // 4).copy())


def _table(machine: Machine, layers: Sequence[CudaLayer]) -> torch.Tensor:
    """Addresses of weights: [5, layers]."""
    return machine.upload(np.array([layer.addresses for layer in layers], np.int64).T.copy())


def run(
    layers: Sequence[CudaLayer], addresses: torch.Tensor, offsets: torch.Tensor, rows: Rows,
    x: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """Takes rows through layers of one shape: outputs, states, logs and tails."""
    one = layers[0]
    state_at, log_at = offsets
    strides = rows.state_words, rows.log_words, rows.log_stride
    where = state_at, log_at, rows.states, rows.logs, rows.page, rows.index
    if one.kind == "conv":
        block = 256
        if rows.n_new:
            kernels.short_convolve[(rows.n_rows, triton.cdiv(one.channels, block))](
                x, out, *addresses[:2], *where, rows.seq, rows.start, rows.state_in, *strides,
                one.in_cols, one.channels, WIDTH=one.width, BLOCK=block,
                BIAS=one.bias is not None, num_warps=2,
            )  # fmt: skip
    else:
        _recur(layers, addresses, offsets, rows, x, out)
    block = 512
    cols = max(one.entry_cols, one.channels)
    n_tails = rows.n_seqs * (one.width - 1)
    kernels.keep[(rows.n_rows + n_tails, triton.cdiv(cols, block), len(layers))](
        x, *where, rows.seq, rows.log, rows.entry, rows.start, rows.state_end, rows.state_in,
        rows.state_out, rows.n_rows, rows.n_seqs, *strides, one.in_cols, one.channels,
        one.entry_cols, WIDTH=one.width, BLOCK=block, GATED=one.kind == "conv",
    )  # fmt: skip


def _recur(
    layers: Sequence[CudaLayer], addresses: torch.Tensor, offsets: torch.Tensor, rows: Rows,
    x: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """The convolution of a delta net or of Mamba-2, then its recurrence."""
    one = layers[0]
    delta = one.kind == "delta"
    state_at, log_at = offsets
    strides = rows.state_words, rows.log_words, rows.log_stride
    where = state_at, log_at, rows.states, rows.logs, rows.page, rows.index
    keys = 2 * one.k_heads * one.dk
    mixed = rows.machine.empty(len(layers), rows.n_rows, one.channels)
    # Heads of keys and of values are as wide as each other, or channels are cut by their own.
    width = one.dk if delta and one.dk == one.dv else 0
    parts = [(0, one.channels, width or 128)]
    if delta and not width:
        parts = [(0, keys, one.dk), (keys, one.channels, one.dv)]
    for first, last, size in parts:
        kernels.convolve[(rows.n_rows, triton.cdiv(last - first, size), len(layers))](
            x, mixed, *addresses[:2], *where, rows.seq, rows.start, rows.state_in, rows.n_rows,
            *strides, one.in_cols, one.channels, first, last, keys, size, WIDTH=one.width,
            BLOCK=power_of_two(size, 32), BIAS=one.bias is not None, DELTA=delta, num_warps=1,
        )  # fmt: skip
    columns = 16
    grid = rows.n_seqs, one.heads * triton.cdiv(one.dv, columns), len(layers)
    kernels.scan[grid](
        x, mixed, out, *addresses[2:], *where, rows.start, rows.new, rows.end, rows.state_end,
        rows.state_in, rows.state_out, rows.n_rows, *strides, one.tail_words, one.in_cols,
        one.channels, *one.dt_limits, HEADS=one.heads, SHARE=one.heads // one.k_heads,
        TILED=one.tiled, K_HEADS=one.k_heads, DK=one.dk, DV=one.dv, DKP=power_of_two(one.dk, 32),
        BV=columns, DELTA=delta, num_warps=4,
    )  # fmt: skip


def fold(
    machine: Machine, layers: list[CudaLayer], offsets: Sequence[tuple[int, int]],
    places: tuple[int, int, int, int, int], state_in: Int32, log: Int32, n_entries: Int32,
    state_out: Int32,
) -> None:  # fmt: skip
    """Replays logs into states, in all layers at once."""
    none = np.zeros_like(log)
    rows = Rows.make(machine, places, n_entries, none, log, state_in, state_out, none, none - 1)
    x = machine.empty(1, layers[0].in_cols)
    run(layers, _table(machine, layers), _offsets(machine, offsets), rows, x, x)
