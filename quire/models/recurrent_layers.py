"""Mixers that keep a state of one size, however long the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.devices.device import GroupKernels
from quire.errors import ModelError
from quire.memory.groups.state_layout import RecurrentSpec
from quire.models.ends import Ends, GatedEnds, Mixing, Product
from quire.models.loader import MIXER, Kit, Loader, Rows
from quire.models.page_kernels import recurrent_group, recurrent_kernels
from quire.models.sizes import Sizes
from quire.ops import Array, Recurrent
from quire.ops.batch import GroupPages


class _Recurring(Mixing):
    """What recurrent mixers have in common; order is all they know of positions: no rope."""

    group: str
    """As a class its kind, then with the device where there are several."""
    rope = None
    recurrent: Recurrent

    def __init__(self, kit: Kit, c: Sizes, layer: int) -> None:
        self.layer = layer
        self.group = kit.group(self.group)
        self.ops = kit.ops
        self.norm: Rows = (f"blk.{layer}.attn_norm.weight", c.width)

    def declare(self, mixers: Sequence[_Recurring]) -> tuple[RecurrentSpec, GroupKernels]:
        """The group of these layers, and the folding of their logs."""
        layers = {mixer.layer: mixer.recurrent for mixer in mixers}
        return recurrent_group(self.ops, self.group, layers), recurrent_kernels(self.ops, layers)

    def recall(self, y: Array, memory: GroupPages, rope: Array | None) -> Array:
        """What the states make of y, which goes into them or their logs."""
        state, log = memory.offsets[self.layer]
        return self.ops.recur(y, self.recurrent, memory.pages, state, log)


class ShortConv(_Recurring):
    """out(C · conv(B · x)), with B, C and x from one matrix.

    It remembers the last few inputs of each channel, one less than it is wide.
    """

    group = "conv"

    def __init__(self, kit: Kit, c: Sizes, layer: int, taps: int) -> None:
        kit = kit.at(MIXER, layer)
        super().__init__(kit, c, layer)
        load, at = kit.load, f"blk.{layer}.shortconv."
        enter = _product(load, f"{at}in_proj", c.width, 3 * c.width)
        bias = f"{at}conv.bias"
        self.recurrent = kit.ops.short_conv(
            load.array(f"{at}conv.weight", (c.width, taps)),
            load.array(bias, (c.width,)) if load.has(bias) else None,
        )
        out = _product(load, f"{at}out_proj", c.width, c.width)
        self.ends = Ends(kit, c.eps, self.norm, enter, out)


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
        load, at = kit.load, f"blk.{layer}."
        columns = shape.inner + shape.channels + shape.n_heads
        enter = _product(load, f"{at}ssm_in", c.width, columns)
        out = _product(load, f"{at}ssm_out", shape.inner, c.width)
        self.ends = SsdEnds(kit, c.eps, self.norm, enter, out, shape, f"{at}ssm_norm.weight")
        self.recurrent = _ssd(kit, at, shape)


class SsdEnds(Ends):
    """[z | x B C | dt] of norm(x), and a norm gated by z before the last product."""

    def __init__(
        self, kit: Kit, eps: float, norm: Rows, enter: Product, out: Product, shape: SsdShape,
        name: str,
    ) -> None:  # fmt: skip
        super().__init__(kit, eps, norm, enter, out)
        self._made = eps, norm, enter, out, shape, name
        self._inner, self._row = shape.inner, shape.norm_shape[-1]
        self._inputs = shape.channels + shape.n_heads
        self._gated_norm = kit.ops.vector(kit.load.array(name, shape.norm_shape).ravel())

    def enter(self, x: Array) -> tuple[Array, Array | None]:
        """All but z, and z."""
        ops = self.ops
        mixed = ops.linear(x, self._enter, self._norm, self._eps, bias=self._enter_bias)
        gate = ops.columns(mixed, 0, self._inner)
        return ops.columns(mixed, self._inner, self._inputs), gate

    def leave(self, x: Array, y: Array, kept: Array | None) -> None:
        """x += out(norm(y · silu(z)))."""
        assert kept is not None
        y = self.ops.gated_norm(y, kept, self._gated_norm, self._eps, self._row, True)
        self.ops.linear(y, self._out, bias=self._out_bias, into=x)


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
        qkvba, z = kind.inputs(load, at, shape)
        enter, gate = Product(c.width, tuple(qkvba)), Product(c.width, tuple(z))
        out = Product(shape.values, ((f"{at}ssm_out.weight", c.width),))
        gated_norm: Rows = (f"{at}ssm_norm.weight", shape.dv)
        self.ends = DeltaEnds(kit, c.eps, self.norm, enter, out, gate, gated_norm)
        self.recurrent = _delta_net(kit, at, kind)


class DeltaEnds(GatedEnds):
    """With z as the gate of a norm of each head."""

    def __init__(
        self, kit: Kit, eps: float, norm: Rows, enter: Product, out: Product, gate: Product,
        gated_norm: Rows,
    ) -> None:  # fmt: skip
        super().__init__(kit, eps, norm, enter, out, gate)
        self._made = eps, norm, enter, out, gate, gated_norm
        self._gated_norm, self._row = kit.load.vector(gated_norm), gated_norm[1]

    def leave(self, x: Array, y: Array, kept: Array | None) -> None:
        """x += out(norm(y) · silu(z))."""
        assert kept is not None
        y = self.ops.gated_norm(y, kept, self._gated_norm, self._eps, self._row, False)
        self.ops.linear(y, self._out, into=x)


def _delta_net(kit: Kit, at: str, kind: DeltaKind) -> Recurrent:
    load, s = kit.load, kind.shape
    conv = load.array(f"{at}ssm_conv1d.weight", (s.channels, s.taps))
    ssm_a = load.array(f"{at}ssm_a", (s.n_v,))
    dt_bias = load.array(f"{at}ssm_dt.bias", (s.n_v,))
    if not np.all(ssm_a <= 0):
        raise ModelError(f"{kind.path}: {at}ssm_a must be rates of decay, which are never positive")
    return kit.ops.delta_net(s.n_k, s.n_v, s.dk, s.dv, conv, None, ssm_a, dt_bias, kind.tiled)


def _product(load: Loader, name: str, cols: int, rows: int) -> Product:
    """A matrix, with a bias where the file has one."""
    bias: tuple[Rows, ...] = ((f"{name}.bias", rows),) if load.has(f"{name}.bias") else ()
    return Product(cols, ((f"{name}.weight", rows),), bias)
