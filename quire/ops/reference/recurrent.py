"""What recurrent layers and their gates mean, in plain NumPy: token by token, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.reference.kv import Bytes
from quire.ops.reference.matrices import Floats

Doubles = NDArray[np.float64]

LANES = 16
"""Columns of a state that lie side by side in a state page."""


def sigmoid(x: Doubles) -> Doubles:
    """1 / (1 + e^-x)."""
    return np.asarray(1 / (1 + np.exp(-x)))


def softplus(x: Doubles) -> Doubles:
    """log(1 + e^x)."""
    return np.logaddexp(x, 0)


def l2_norm(x: Doubles) -> Doubles:
    """x over its length, by head."""
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6))


@dataclass(frozen=True)
class Remembered:
    """What one layer remembers of a sequence."""

    tail: Doubles
    """[width - 1, channels] raw inputs of the last tokens."""
    state: Doubles
    """[value heads, dk, dv]; of no heads for a short convolution."""

    @classmethod
    def of_page(cls, page: Bytes, start: Remembered) -> Remembered:
        """What the bytes of a state page say, in the shape of a start."""
        heads, dk, dv = start.state.shape
        blocks = -(-dv // LANES)
        at = -(-start.tail.size // LANES) * LANES
        values = page.view(np.float32).astype(np.float64)
        tail = values[: start.tail.size].reshape(start.tail.shape)
        lanes = values[at:].reshape(heads, blocks, dk, LANES).transpose(0, 2, 1, 3)
        return cls(tail, lanes.reshape(heads, dk, blocks * LANES)[..., :dv])

    def kept(self) -> Remembered:
        """This as a state page would keep it."""
        return Remembered(self.tail, self.state.astype(np.float32).astype(np.float64))

    def page(self) -> Bytes:
        """The bytes of this in a state page."""
        heads, dk, dv = self.state.shape
        blocks = -(-dv // LANES)
        tail = np.zeros(-(-self.tail.size // LANES) * LANES, np.float32)
        tail[: self.tail.size] = self.tail.ravel()
        lanes = np.zeros((heads, dk, blocks * LANES), np.float32)
        lanes[..., :dv] = self.state
        state = lanes.reshape(heads, dk, blocks, LANES).transpose(0, 2, 1, 3)
        return np.concatenate([tail, state.ravel()]).view(np.uint8)


@dataclass(frozen=True)
class Convolution:
    """A causal convolution, each channel by itself."""

    weight: Floats
    """[channels, width], the newest token last."""
    bias: Floats | None = None

    def run(self, x: Doubles, tail: Doubles) -> tuple[Doubles, Doubles]:
        """The convolution of x [tokens, channels] behind a tail, and the tail after it."""
        width = self.weight.shape[1]
        rows = np.concatenate([tail, x])
        out = sum(rows[j : j + len(x)] * self.weight[:, j] for j in range(width))
        return np.asarray(out + (0 if self.bias is None else self.bias)), rows[len(x) :]

    def start(self) -> Doubles:
        """The tail before the first token."""
        channels, width = self.weight.shape
        return np.zeros((width - 1, channels))


class _Scanned:
    """A layer whose log keeps its input rows as they are."""

    def entries(self, x: Floats) -> Floats:
        """What a log keeps of tokens."""
        return x

    def replay(self, entries: Floats, before: Remembered) -> Remembered:
        """What is remembered after the tokens of a log."""
        return self.run(entries, before)[1]

    def run(self, x: Floats, before: Remembered) -> tuple[Doubles, Remembered]:
        """Outputs of new tokens, and what is remembered after them."""
        raise NotImplementedError


@dataclass(frozen=True)
class DeltaNet(_Scanned):
    """A gated delta net; rows are [q | k | v | b | a]."""

    n_k: int
    n_v: int
    dk: int
    dv: int
    conv: Convolution
    ssm_a: Floats
    dt_bias: Floats
    tiled: bool = False

    def start(self) -> Remembered:
        """Before the first token."""
        return Remembered(self.conv.start(), np.zeros((self.n_v, self.dk, self.dv)))

    def run(self, x: Floats, before: Remembered) -> tuple[Doubles, Remembered]:
        """Outputs of new tokens, and what is remembered after them."""
        keys, channels = self.n_k * self.dk, len(self.conv.weight)
        rows = x.astype(np.float64)
        mixed, tail = self.conv.run(rows[:, :channels], before.tail)
        mixed = mixed * sigmoid(mixed)
        q, k = (
            self._heads(l2_norm(part.reshape(-1, self.n_k, self.dk)))
            for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
        )
        v = mixed[:, 2 * keys :].reshape(-1, self.n_v, self.dv)
        beta = sigmoid(rows[:, channels : channels + self.n_v])
        alpha = np.exp(self.ssm_a * softplus(rows[:, channels + self.n_v :] + self.dt_bias))
        state, out = before.state, np.empty_like(v)
        for t in range(len(x)):
            state = state * alpha[t, :, None, None]
            error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            state = state + np.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
            out[t] = np.einsum("hkv,hk->hv", state, q[t] * self.dk**-0.5)
        return out.reshape(len(x), -1), Remembered(tail, state)

    @property
    def in_cols(self) -> int:
        """Columns of an input row."""
        return len(self.conv.weight) + 2 * self.n_v

    @property
    def out_cols(self) -> int:
        """Columns of an output row."""
        return self.n_v * self.dv

    def _heads(self, x: Doubles) -> Doubles:
        """Key heads as the value heads read them."""
        times = self.n_v // self.n_k
        return np.tile(x, (1, times, 1)) if self.tiled else x.repeat(times, 1)


@dataclass(frozen=True)
class Ssd(_Scanned):
    """Mamba-2; rows are [x | B | C | dt]."""

    n_heads: int
    n_groups: int
    head_dim: int
    state_dim: int
    conv: Convolution
    ssm_a: Floats
    dt_bias: Floats
    d: Floats
    dt_limits: tuple[float, float] = (0.0, np.inf)

    def start(self) -> Remembered:
        """Before the first token."""
        return Remembered(
            self.conv.start(), np.zeros((self.n_heads, self.state_dim, self.head_dim))
        )

    def run(self, x: Floats, before: Remembered) -> tuple[Doubles, Remembered]:
        """Outputs of new tokens, and what is remembered after them."""
        cols, channels = self.n_heads * self.head_dim, len(self.conv.weight)
        rows = x.astype(np.float64)
        mixed, tail = self.conv.run(rows[:, :channels], before.tail)
        mixed = mixed * sigmoid(mixed)
        values = mixed[:, :cols].reshape(-1, self.n_heads, self.head_dim)
        groups = mixed[:, cols:].reshape(-1, 2, self.n_groups, self.state_dim)
        b, c = (part.repeat(self.n_heads // self.n_groups, 1) for part in groups.swapaxes(0, 1))
        dt = softplus(rows[:, channels:] + self.dt_bias).clip(*self.dt_limits)
        decay = np.exp(dt * self.ssm_a)
        state, out = before.state, np.empty_like(values)
        for t in range(len(x)):
            new = np.einsum("hn,hp->hnp", b[t], dt[t, :, None] * values[t])
            state = state * decay[t, :, None, None] + new
            out[t] = np.einsum("hnp,hn->hp", state, c[t]) + self.d[:, None] * values[t]
        return out.reshape(len(x), -1), Remembered(tail, state)

    @property
    def in_cols(self) -> int:
        """Columns of an input row."""
        return len(self.conv.weight) + self.n_heads

    @property
    def out_cols(self) -> int:
        """Columns of an output row."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True)
class ShortConv:
    """The short convolution of LFM2; rows are [B | C | x]."""

    conv: Convolution

    def start(self) -> Remembered:
        """Before the first token."""
        return Remembered(self.conv.start(), np.zeros((0, 1, 1)))

    def entries(self, x: Floats) -> Floats:
        """What a log keeps of tokens."""
        b, _, values = np.split(x, 3, 1)
        return b * values

    def replay(self, entries: Floats, before: Remembered) -> Remembered:
        """What is remembered after the tokens of a log."""
        return Remembered(self.conv.run(entries.astype(np.float64), before.tail)[1], before.state)

    def run(self, x: Floats, before: Remembered) -> tuple[Doubles, Remembered]:
        """Outputs of new tokens, and what is remembered after them."""
        c = np.split(x.astype(np.float64), 3, 1)[1]
        mixed, tail = self.conv.run(self.entries(x).astype(np.float64), before.tail)
        return c * mixed, Remembered(tail, before.state)

    @property
    def in_cols(self) -> int:
        """Columns of an input row."""
        return 3 * len(self.conv.weight)

    @property
    def out_cols(self) -> int:
        """Columns of an output row."""
        return len(self.conv.weight)


def gated_norm(
    x: Floats, gate: Floats, weight: Floats, eps: float, group: int, gate_first: bool
) -> Floats:
    """rms_norm over groups of columns, times weight, times silu(gate); or with the gate before."""
    y, g = x.astype(np.float64), gate.astype(np.float64)
    g = g * sigmoid(g)
    if gate_first:
        y = y * g
    parts = y.reshape(len(x), -1, group)
    parts = parts / np.sqrt((parts * parts).mean(-1, keepdims=True) + eps)
    y = (parts * weight.reshape(-1, group)).reshape(x.shape)
    return np.asarray(y if gate_first else y * g, np.float32)


def gate_sigmoid(x: Floats, gate: Floats) -> Floats:
    """x · sigmoid(gate)."""
    return np.asarray(x * sigmoid(gate.astype(np.float64)), np.float32)
