"""Mixers that keep a state of one size, however long the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.devices.device import GroupKernels
from quire.errors import ModelError
from quire.memory.groups.state_layout import RecurrentSpec
from quire.models.layers import total_bytes
from quire.models.loader import MIXER, Kit, Loader, Rows
from quire.models.page_kernels import recurrent_group, recurrent_kernels
from quire.models.sizes import Sizes
from quire.ops import Array, Matrix, Recurrent
from quire.ops.batch import GroupPages


class _Recurring:
    """What recurrent mixers have in common; order is all they know of positions: no rope."""

    group: str
    """As a class its kind, then with the device where there are several."""
    rope = None
    recurrent: Recurrent

    def __init__(self, kit: Kit, c: Sizes, layer: int) -> None:
        self.layer = layer
        self.group = kit.group(self.group)
        self.ops, self._eps = kit.ops, c.eps
        self._norm = kit.load.vector((f"blk.{layer}.attn_norm.weight", c.width))

    def declare(self, mixers: Sequence[_Recurring]) -> tuple[RecurrentSpec, GroupKernels]:
        """The group of these layers, and the folding of their logs."""
        layers = {mixer.layer: mixer.recurrent for mixer in mixers}
        return recurrent_group(self.ops, self.group, layers), recurrent_kernels(self.ops, layers)


class ShortConv(_Recurring):
    """out(C · conv(B · x)), with B, C and x from one matrix.

    It remembers the last few inputs of each channel, one less than it is wide.
    """

    group = "conv"

    def __init__(self, kit: Kit, c: Sizes, layer: int, taps: int) -> None:
        kit = kit.at(MIXER, layer)
        super().__init__(kit, c, layer)
        load, at = kit.load, f"blk.{layer}.shortconv."
        self._enter, self._enter_bias = _linear(load, f"{at}in_proj", c.width, 3 * c.width)
        bias = f"{at}conv.bias"
        self.recurrent = kit.ops.short_conv(
            load.array(f"{at}conv.weight", (c.width, taps)),
            load.array(bias, (c.width,)) if load.has(bias) else None,
        )
        self._out, self._out_bias = _linear(load, f"{at}out_proj", c.width, c.width)
        self.nbytes = total_bytes((self._enter, self._out))

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> None:
        """x += convolution(norm(x))."""
        ops = self.ops
        state, log = memory.offsets[self.layer]
        inputs = ops.linear(x, self._enter, self._norm, self._eps, bias=self._enter_bias)
        mixed = ops.recur(inputs, self.recurrent, memory.pages, state, log)
        ops.linear(mixed, self._out, bias=self._out_bias, into=x)


@dataclass(frozen=True)
class SsdShape:
    """The sizes of a Mamba-2 layer."""

    inner: int
    n_heads: int
    n_groups: int
    state_dim: int
    taps: int
    dt_limits: tuple[float, float]
    norm_shape: tuple[int, ...]
    """Of the gated norm's weights; each row of columns is normed by itself."""

    @property
    def channels(self) -> int:
        """What the convolution sees: x, B and C."""
        return self.inner + 2 * self.n_groups * self.state_dim


class Ssd(_Recurring):
    """in(norm(x)) → [z | x B C | dt], the recurrence over all but z, a norm gated by z, out."""

    group = "recurrent"

    def __init__(self, kit: Kit, c: Sizes, layer: int, shape: SsdShape) -> None:
        kit = kit.at(MIXER, layer)
        super().__init__(kit, c, layer)
        self._inner, self._row = shape.inner, shape.norm_shape[-1]
        self._inputs = shape.channels + shape.n_heads
        load, at = kit.load, f"blk.{layer}."
        columns = shape.inner + self._inputs
        self._enter, self._enter_bias = _linear(load, f"{at}ssm_in", c.width, columns)
        self.gated_norm = kit.ops.vector(
            load.array(f"{at}ssm_norm.weight", shape.norm_shape).ravel()
        )
        self.recurrent = _ssd(kit, at, shape)
        self._out, self._out_bias = _linear(load, f"{at}ssm_out", shape.inner, c.width)
        self.nbytes = total_bytes((self._enter, self._out))

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> None:
        """x += recurrence(norm(x))."""
        ops, inner = self.ops, self._inner
        state, log = memory.offsets[self.layer]
        mixed = ops.linear(x, self._enter, self._norm, self._eps, bias=self._enter_bias)
        gate, inputs = ops.columns(mixed, 0, inner), ops.columns(mixed, inner, self._inputs)
        heads = ops.recur(inputs, self.recurrent, memory.pages, state, log)
        heads = ops.gated_norm(heads, gate, self.gated_norm, self._eps, self._row, True)
        ops.linear(heads, self._out, bias=self._out_bias, into=x)


def _ssd(kit: Kit, at: str, shape: SsdShape) -> Recurrent:
    load, conv_bias = kit.load, f"{at}ssm_conv1d.bias"
    return kit.ops.ssd(
        shape.n_heads, shape.n_groups, shape.inner // shape.n_heads, shape.state_dim,
        load.array(f"{at}ssm_conv1d.weight", (shape.channels, shape.taps)),
        load.array(conv_bias, (shape.channels,)) if load.has(conv_bias) else None,
        load.array(f"{at}ssm_a", (shape.n_heads, 1)).ravel(),
        load.array(f"{at}ssm_dt.bias", (shape.n_heads,)),
        load.array(f"{at}ssm_d", (shape.n_heads, 1)).ravel(),
        shape.dt_limits,
    )  # fmt: skip


@dataclass(frozen=True)
class DeltaShape:
    """The sizes of a gated delta net: heads of keys and values, and the taps of its convolution."""

    n_k: int
    n_v: int
    dk: int
    dv: int
    taps: int

    @property
    def keys(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.n_k * self.dk

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.n_v * self.dv

    @property
    def channels(self) -> int:
        """Columns that are convolved: q, k and v."""
        return 2 * self.keys + self.values


DeltaInputs = Callable[[Loader, str, DeltaShape], tuple[list[Rows], list[Rows]]]
"""The tensors that make [q | k | v | b | a] and z, in the layer whose names begin so."""


@dataclass(frozen=True)
class DeltaKind:
    """What all delta nets of a file have in common."""

    path: Path
    shape: DeltaShape
    inputs: DeltaInputs
    tiled: bool
    """Whether value head h reads key head h % n_k, and not one that it shares with its next."""


class DeltaNet(_Recurring):
    """q k v b a, z = in(norm(x)) → out(norm(recur(q k v b a)) · silu(z))."""

    group = "delta"

    def __init__(self, kit: Kit, c: Sizes, layer: int, kind: DeltaKind) -> None:
        kit = kit.at(MIXER, layer)
        super().__init__(kit, c, layer)
        load, at, shape = kit.load, f"blk.{layer}.", kind.shape
        self._row = shape.dv
        qkvba, z = kind.inputs(load, at, shape)
        self._enter = load.matrix(c.width, *qkvba)
        self._gate = load.matrix(c.width, *z)
        self._out = load.matrix(shape.values, (f"{at}ssm_out.weight", c.width))
        self._gated_norm = load.vector((f"{at}ssm_norm.weight", shape.dv))
        self.recurrent = _delta_net(kit, at, kind)
        self.nbytes = total_bytes((self._enter, self._gate, self._out))

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> None:
        """x += delta_net(norm(x))."""
        ops = self.ops
        state, log = memory.offsets[self.layer]
        qkvba = ops.linear(x, self._enter, self._norm, self._eps)
        z = ops.linear(x, self._gate, self._norm, self._eps)
        y = ops.recur(qkvba, self.recurrent, memory.pages, state, log)
        y = ops.gated_norm(y, z, self._gated_norm, self._eps, self._row, False)
        ops.linear(y, self._out, into=x)


def _delta_net(kit: Kit, at: str, kind: DeltaKind) -> Recurrent:
    load, s = kit.load, kind.shape
    conv = load.array(f"{at}ssm_conv1d.weight", (s.channels, s.taps))
    ssm_a = load.array(f"{at}ssm_a", (s.n_v,))
    dt_bias = load.array(f"{at}ssm_dt.bias", (s.n_v,))
    if not np.all(ssm_a <= 0):
        raise ModelError(f"{kind.path}: {at}ssm_a must be rates of decay, which are never positive")
    return kit.ops.delta_net(s.n_k, s.n_v, s.dk, s.dv, conv, None, ssm_a, dt_bias, kind.tiled)


def _linear(load: Loader, name: str, cols: int, rows: int) -> tuple[Matrix, Array | None]:
    """A matrix, and its bias where there is one."""
    bias = load.vector((f"{name}.bias", rows)) if load.has(f"{name}.bias") else None
    return load.matrix(cols, (f"{name}.weight", rows)), bias
