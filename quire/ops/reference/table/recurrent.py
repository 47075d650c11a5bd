"""Recurrent layers over states and logs that lie at an address."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.ops import Array, Float32, Int32, Recurrent, States, StateTables
from quire.ops.reference.kv import Bytes
from quire.ops.reference.recurrent import Convolution, DeltaNet, Remembered, ShortConv, Ssd
from quire.ops.reference.table.arrays import Arrays, values_of
from quire.ops.reference.table.memory import need, page_rows


class HostLayer:
    """A recurrent layer and the sizes it declares."""

    def __init__(self, layer: DeltaNet | Ssd | ShortConv) -> None:
        self.layer = layer
        self.in_cols, self.out_cols = layer.in_cols, layer.out_cols
        self.state_bytes = layer.start().page().nbytes
        self.log_bytes = layer.entries(np.zeros((1, layer.in_cols), np.float32)).nbytes

    def load(self, page: Bytes | None) -> Remembered:
        """What its part of a state page remembers; without one, nothing yet."""
        start = self.layer.start()
        return start if page is None else Remembered.of_page(page[: self.state_bytes], start)

    def run(self, x: Float32, before: Remembered) -> tuple[Float32, Remembered]:
        """Outputs of new tokens, and what is remembered after them.

        After each token that is as a page keeps it: then it changes no bit where one was written.
        """
        out = np.empty((len(x), self.out_cols), np.float32)
        for t in range(len(x)):
            row, after = self.layer.run(x[t : t + 1], before)
            out[t], before = row[0], after.kept()
        return out, before

    def replay(self, entries: Float32, before: Remembered) -> Remembered:
        """What is remembered after the tokens of a log, one after the other too."""
        for t in range(len(entries)):
            before = self.layer.replay(entries[t : t + 1], before).kept()
        return before

    def entries(self, log: Bytes, stride: int, first: int, count: int) -> Float32:
        """Entries of its part of a log page, to be read or written."""
        rows = log[first * stride : (first + count) * stride].reshape(count, stride)
        return rows[:, : self.log_bytes].view(np.float32)


def layer_of(layer: Recurrent) -> HostLayer:
    """A layer that this device made."""
    if not isinstance(layer, HostLayer):
        raise TypeError(f"{type(layer).__name__} is not a layer of the reference")
    return layer


def need_placed(
    layer: HostLayer, state_at: int, state_page: int, log_at: int, log_page: int, stride: int,
    entries: int,
) -> None:  # fmt: skip
    """Refuses offsets at which a layer's state or log would not lie inside a page."""
    inside = 0 <= state_at <= state_page - layer.state_bytes and state_at % 64 == 0
    need(inside, f"recurrent layer: its state at {state_at} of a page of {state_page}")
    need(stride >= layer.log_bytes, f"recurrent layer: entries are {stride} bytes apart")
    inside = 0 <= log_at <= log_page - entries * stride and log_at % 4 == 0
    need(inside, f"recurrent layer: its log at {log_at} of a page of {log_page}")


@dataclass(frozen=True)
class HostStates:
    """One group's states and logs in one step."""

    view: StateTables
    states: Bytes
    logs: Bytes
    seq_rows: Int32


class RecurrentLayers(Arrays):
    """The group `RecurrentOps` of the table."""

    def delta_net(
        self, n_k: int, n_v: int, dk: int, dv: int, conv: Float32, conv_bias: Float32 | None,
        ssm_a: Float32, dt_bias: Float32, tiled: bool = False,
    ) -> Recurrent:  # fmt: skip
        """A gated delta net."""
        mixed = Convolution(conv, conv_bias)
        need(n_k > 0 and n_v % n_k == 0, f"{n_v} heads do not divide into {n_k} groups")
        need(len(conv) == 2 * n_k * dk + n_v * dv, f"a convolution of {len(conv)} channels")
        need(len(ssm_a) == n_v == len(dt_bias), f"{n_v} heads need as many gates")
        need((ssm_a <= 0).all(), "ssm_a is -exp(A_log) and so never positive")
        return HostLayer(DeltaNet(n_k, n_v, dk, dv, mixed, ssm_a, dt_bias, tiled))

    def ssd(
        self, n_heads: int, n_groups: int, head_dim: int, state_dim: int, conv: Float32,
        conv_bias: Float32 | None, ssm_a: Float32, dt_bias: Float32, d: Float32,
        dt_limits: tuple[float, float] = (0.0, np.inf),
    ) -> Recurrent:  # fmt: skip
        """A Mamba-2 layer."""
        mixed = Convolution(conv, conv_bias)
        channels = n_heads * head_dim + 2 * n_groups * state_dim
        need(n_groups > 0 and n_heads % n_groups == 0, f"{n_heads} heads in {n_groups} groups")
        need(len(conv) == channels, f"a convolution of {len(conv)} channels, not {channels}")
        need(len(ssm_a) == n_heads == len(dt_bias) == len(d), f"{n_heads} heads need as many gates")
        need((ssm_a <= 0).all(), "ssm_a is -exp(A_log) and so never positive")
        return HostLayer(
            Ssd(n_heads, n_groups, head_dim, state_dim, mixed, ssm_a, dt_bias, d, dt_limits)
        )

    def short_conv(self, conv: Float32, conv_bias: Float32 | None = None) -> Recurrent:
        """A gated short convolution."""
        need(conv.shape[1] >= 2, f"a convolution of width {conv.shape[1]} remembers nothing")
        return HostLayer(ShortConv(Convolution(conv, conv_bias)))

    def states(self, view: StateTables, state_base: int, log_base: int, seq_rows: Int32) -> States:
        """One recurrent group's states and logs as the kernels of a step see them."""
        need_states(view, seq_rows)
        last_state = max(view.state_in.max(initial=0), view.state_out.max(initial=0))
        logs_used = view.log_in, view.log_out, view.log_kept
        last_log = max(each.max(initial=0) for each in logs_used)
        states = page_rows(state_base, view.state_page_bytes, int(last_state) + 1)
        logs = page_rows(log_base, view.log_page_bytes, int(last_log) + 1)
        return States(HostStates(view, states, logs, seq_rows))

    def recur(
        self, x: Array, layer: Recurrent, states: States, state_offset: int, log_offset: int
    ) -> Array:
        """Takes tokens into their logs or states, and returns the layer's outputs."""
        assert isinstance(states, HostStates)
        host, view, rows = layer_of(layer), states.view, values_of(x)
        shape = len(states.seq_rows), host.in_cols
        need(rows.shape == shape, f"recur: x is {rows.shape} where {shape} is needed")
        need_placed(
            host, state_offset, view.state_page_bytes, log_offset, view.log_page_bytes,
            view.log_stride, view.layout.log_tokens,
        )  # fmt: skip
        out = np.empty((len(rows), host.out_cols), np.float32)
        for seq in range(len(view.state_in)):
            mine = states.seq_rows == seq
            out[mine] = _take(rows[mine], host, states, seq, state_offset, log_offset)
        return self.new(out)


def _take(
    x: Float32, host: HostLayer, states: HostStates, seq: int, state_at: int, log_at: int
) -> Float32:
    """One sequence's new tokens, into its log or its state."""
    view, layer = states.view, host.layer
    state_in, state_out = int(view.state_in[seq]), int(view.state_out[seq])
    log_in, log_out = int(view.log_in[seq]), int(view.log_out[seq])
    length, tail = int(view.log_length[seq]), int(view.tail[seq])
    before = host.load(states.states[state_in, state_at:] if state_in >= 0 else None)
    if length:
        log = states.logs[log_in, log_at:]
        before = host.replay(host.entries(log, view.log_stride, 0, length), before)
    head = len(x) - tail
    out, after = host.run(x[:head], before)
    if state_out >= 0:
        states.states[state_out, state_at : state_at + host.state_bytes] = after.page()
        out = np.concatenate([out, host.run(x[head:], after)[0]]) if tail else out
    kept, first = (x[head:], 0) if state_out >= 0 else (x, length)
    for page, into, rows in ((log_out, first, kept), (int(view.log_kept[seq]), length, x[:head])):
        if page >= 0 and len(rows):
            log = states.logs[page, log_at:]
            host.entries(log, view.log_stride, into, len(rows))[:] = layer.entries(rows)
    return out


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
