"""The parts that layers are made of: attention, plain or gated, and the gated network.

A layer is a *mixer*, which looks at other tokens through memory, then a *network*, which looks at
one token alone. Each norms what it reads and adds what it makes: `add_to(x, …)`. A mixer belongs
to a group of memory and finds its place there by its number in the model. `recurrent_layers` has
the mixers that keep a state, `experts` the networks of several experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quire.devices.device import GroupKernels
from quire.memory.groups.layout import GroupSpec
from quire.memory.groups.state_layout import RecurrentSpec
from quire.models.loader import MIXER, NETWORK, Kit, Rows
from quire.models.page_kernels import attention_kernels
from quire.models.sizes import DenseSizes
from quire.models.windows import FULL, WINDOW
from quire.ops import SILU_MUL, Array, Heads, Matrix, Ops, Rope
from quire.ops.batch import GroupPages

if TYPE_CHECKING:
    from quire.models.streaming import Streaming


class Mixer(Protocol):
    """What a layer does first: it looks at other tokens."""

    layer: int
    """Its number in the model."""
    group: str
    """The group of memory it belongs to."""
    rope: Any
    """The handle of its rotary embedding; None without one."""
    ops: Ops
    """Of the device it is on."""
    nbytes: int
    """Bytes that its matrices hold."""

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> None:
        """x += mixer(norm(x)); `rope` is the table of this step's positions."""

    def declare(self, mixers: Sequence[Any]) -> tuple[GroupSpec | RecurrentSpec, GroupKernels]:
        """The group that these make up, this one among them, and what can be done to its pages."""


class Network(Protocol):
    """What a layer does next: it looks at each token alone."""

    ops: Ops
    """Of the device that it takes x on."""
    part_bytes: Mapping[str, int]
    """Bytes that its matrices hold, by kind of part."""
    ops_within: Sequence[Ops]
    """Of the devices that x passes, in this order."""

    def add_to(self, x: Array) -> Array:
        """x + network(norm(x)), in x where it can be."""

    def again(self, kit: Kit) -> Network:
        """The same made with another kit, on its device."""

    def streamed(self, streaming: Streaming) -> Network:
        """The same, but for what of it may be run on a GPU now and then."""


def total_bytes(matrices: Iterable[Matrix]) -> int:
    """Bytes that matrices hold together."""
    return sum(int(matrix.nbytes) for matrix in matrices)


class _Attending:
    """What both kinds of attention have in common: heads over the pages of their group.

    A layer with `reads` stores no keys and values: it looks at those of that layer.
    """

    def __init__(
        self, kit: Kit, c: DenseSizes, layer: int, rope: Rope, *, qk_norm: bool,
        window: int = 0, scale: float | None = None, softcap: float = 0.0, reads: int | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.rope, self.reads = layer, kit.rope(rope), reads
        self.group = kit.group(WINDOW if window else FULL)
        self.ops, self._eps = kit.ops, c.eps
        sizes = c.n_heads, c.n_kv_heads, c.head_dim, c.head_dim
        scale = c.head_dim**-0.5 if scale is None else scale
        self._shape = Heads(*sizes, scale, window, softcap)
        at = f"blk.{layer}."

        def norm(name: str, size: int) -> Array:
            return kit.load.vector((f"{at}{name}.weight", size))

        q_norm = norm("attn_q_norm", c.head_dim) if qk_norm else None
        k_norm = norm("attn_k_norm", c.head_dim) if qk_norm and reads is None else None
        self._heads = kit.heads(self._shape, q_norm, k_norm, c.eps)
        self._norm = norm("attn_norm", c.width)
        columns = c.n_heads * c.head_dim
        self._out = kit.load.matrix(columns, (f"{at}attn_output.weight", c.width))

    def declare(self, mixers: Sequence[_Attending]) -> tuple[GroupSpec, GroupKernels]:
        """The group of these layers, and the turning and moving of what they store."""
        shape = self._shape
        spec = GroupSpec(
            self.group,
            "window" if shape.window else "attention",
            tuple(mixer.layer for mixer in mixers if mixer.reads is None),
            shape.n_kv_heads,
            shape.head_dim_k,
            shape.head_dim_v,
            window=shape.window or None,
            reuse={mixer.layer: mixer.reads for mixer in mixers if mixer.reads is not None},
        )
        return spec, attention_kernels(self.ops, self._heads, self.rope)


class Attention(_Attending):
    """Attention; q, k and v are one matrix.

    `scale` is that of the scores, if not the usual one; `post_norm` names what norms the output.
    """

    def __init__(
        self, kit: Kit, c: DenseSizes, layer: int, rope: Rope, *, window: int = 0,
        bias: bool = False, qk_norm: bool = False, scale: float | None = None,
        softcap: float = 0.0, post_norm: str = "", reads: int | None = None,
    ) -> None:  # fmt: skip
        kit = kit.at(MIXER, layer)
        super().__init__(
            kit, c, layer, rope, qk_norm=qk_norm, window=window, scale=scale, softcap=softcap,
            reads=reads,
        )  # fmt: skip
        load, at = kit.load, f"blk.{layer}."
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        parts = [("attn_q", q)] + ([("attn_k", kv), ("attn_v", kv)] if reads is None else [])
        self._qkv = load.matrix(c.width, *((f"{at}{name}.weight", rows) for name, rows in parts))
        biases: list[Rows] = [(f"{at}{name}.bias", rows) for name, rows in parts]
        self._bias = load.vector(*biases) if bias else None
        self._post_norm = load.vector((f"{at}{post_norm}.weight", c.width)) if post_norm else None
        self.nbytes = total_bytes((self._qkv, self._out))

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> None:
        """x += attention(norm(x))."""
        ops = self.ops
        k, v = memory.offsets[self.layer]
        y = ops.linear(x, self._qkv, self._norm, self._eps, bias=self._bias)
        if self.reads is None:
            y = ops.attention(y, self._heads, memory.pages, rope, k, v)
        else:
            y = ops.attention(y, self._heads, memory.pages, rope, k, v, store=False)
        if self._post_norm is None:
            ops.linear(y, self._out, into=x)
        else:
            ops.add_norm(x, ops.linear(y, self._out), self._post_norm, self._eps)


class GatedAttention(_Attending):
    """Attention whose output is gated; queries and their gates are one tensor, head by head.

    q k v, gate = in(norm(x))     out(attend(q k v) · sigmoid(gate))
    """

    def __init__(self, kit: Kit, c: DenseSizes, layer: int, rope: Rope) -> None:
        kit = kit.at(MIXER, layer)
        super().__init__(kit, c, layer, rope, qk_norm=True)
        load, at = kit.load, f"blk.{layer}."
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        rows = np.arange(2 * q).reshape(c.n_heads, 2, c.head_dim)
        query, gate = ((f"{at}attn_q.weight", 2 * q, rows[:, i].ravel()) for i in (0, 1))
        k_v = (f"{at}attn_k.weight", kv), (f"{at}attn_v.weight", kv)
        self._qkv = load.matrix(c.width, query, *k_v)
        self._gate = load.matrix(c.width, gate)
        self.nbytes = total_bytes((self._qkv, self._gate, self._out))

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> None:
        """x += attention(norm(x))."""
        ops = self.ops
        k, v = memory.offsets[self.layer]
        qkv = ops.linear(x, self._qkv, self._norm, self._eps)
        gate = ops.linear(x, self._gate, self._norm, self._eps)
        y = ops.attention(qkv, self._heads, memory.pages, rope, k, v)
        ops.linear(ops.gate_sigmoid(y, gate), self._out, into=x)


class GatedNetwork:
    """down(act(gate(x)) * up(x)); gate and up are one matrix.

    `norm` and `post_norm` name what norms the input and, where there is such a tensor, the output.
    """

    def __init__(
        self, kit: Kit, c: DenseSizes, layer: int, *, norm: str = "ffn_norm",
        act: int = SILU_MUL, post_norm: str = "",
    ) -> None:  # fmt: skip
        self._made: dict[str, Any] = {
            "c": c, "layer": layer, "norm": norm, "act": act, "post_norm": post_norm
        }  # fmt: skip
        kit = kit.at(NETWORK, layer)
        self.ops = kit.ops
        self.ops_within: Sequence[Ops] = (kit.ops,)
        self._eps, self._act = c.eps, act
        load, at, ffn = kit.load, f"blk.{layer}.", c.ffn_width
        self._norm = load.vector((f"{at}{norm}.weight", c.width))
        gate_up = ((f"{at}ffn_gate.weight", ffn), (f"{at}ffn_up.weight", ffn))
        self._gate_up = load.matrix(c.width, *gate_up)
        self._down = load.matrix(ffn, (f"{at}ffn_down.weight", c.width))
        self._post_norm = load.vector((f"{at}{post_norm}.weight", c.width)) if post_norm else None
        self.part_bytes: Mapping[str, int] = {NETWORK: total_bytes((self._gate_up, self._down))}

    def add_to(self, x: Array) -> Array:
        """x += network(norm(x))."""
        ops = self.ops
        weights = self._gate_up, self._down, self._norm
        if self._post_norm is None:
            ops.network(x, *weights, self._eps, self._act, into=x)
        else:
            y = ops.network(x, *weights, self._eps, self._act)
            ops.add_norm(x, y, self._post_norm, self._eps)
        return x

    def again(self, kit: Kit) -> Network:
        """The same made with another kit."""
        return GatedNetwork(kit, **self._made)

    def streamed(self, streaming: Streaming) -> Network:
        """The whole may be run on a GPU."""
        return streaming.wrap(self)
