"""What Qwen3-Next and Qwen3.5 share: three layers with a gated delta net, then one with attention.

A delta net keeps a state of one size, however long the context; attention keeps every token. The
output of both is gated, and a layer ends in a gated network or in experts with a shared one:

    delta       q k v b a, z = in(norm(x))    out(norm(recur(q k v b a)) · silu(z))
    attention   q k v, gate = in(norm(x))     out(attend(q k v) · sigmoid(gate))

An architecture's own file says how its tensors make up these inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.memory.build import GroupKernels
from quire.memory.layout import GroupSpec
from quire.memory.state_layout import RecurrentSpec
from quire.models.dense import DenseConfig, GatedNetwork, Network
from quire.models.experts import ExpertsConfig, SharedExpertNetwork
from quire.models.loader import Loader, Rows
from quire.models.page_kernels import attention_kernels, recurrent_group, recurrent_kernels
from quire.ops import Array, Heads, Ops
from quire.ops.batch import Batch, GroupPages
from quire.weights.file import WeightFile

ATTENTION, DELTA = "attention", "delta"
INTERVAL = 4
"""Every so many layers there is one with attention, where a file does not say otherwise."""
MAX_HEADS, MAX_DIM, MAX_TAPS, MAX_COLUMNS = 4096, 4096, 16, 2**20
_NORM = "post_attention_norm"  # what these files call the norm before the network


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

    @classmethod
    def read(cls, file: WeightFile, arch: str) -> DeltaShape:
        """The sizes a file gives, each within reason."""

        def count(key: str, most: int) -> int:
            return file.get_int(f"{arch}.ssm.{key}", minimum=1, maximum=most)

        n_k, n_v = count("group_count", MAX_HEADS), count("time_step_rank", MAX_HEADS)
        inner, dk = count("inner_size", MAX_COLUMNS), count("state_size", MAX_DIM)
        if inner % n_v or n_v % n_k or n_k * dk > MAX_COLUMNS or inner // n_v > MAX_DIM:
            raise ModelError(
                f"{file.path}: {arch}.ssm has {inner} columns in {n_v} value heads over {n_k} key "
                f"heads of {dk}; each of the first three must divide the one before"
            )
        return cls(n_k, n_v, dk, inner // n_v, count("conv_kernel", MAX_TAPS))


DeltaInputs = Callable[[Loader, str, DeltaShape], tuple[list[Rows], list[Rows]]]
"""The tensors that make [q | k | v | b | a] and z, in the layer whose names begin so."""


@dataclass(frozen=True)
class DeltaKind:
    """What all delta nets of a file have in common."""

    file: WeightFile
    shape: DeltaShape
    inputs: DeltaInputs
    tiled: bool
    """Whether value head h reads key head h % n_k, and not one that it shares with its next."""


class GatedAttention:
    """A layer's attention; its queries and their gates are one tensor, head by head."""

    group = ATTENTION

    def __init__(
        self, ops: Ops, c: DenseConfig, load: Loader, at: str, place: int, type_k: str, type_v: str
    ) -> None:
        self._ops, self._eps, self._place = ops, c.eps, place
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        rows = np.arange(2 * q).reshape(c.n_heads, 2, c.head_dim)
        query, gate = ((f"{at}attn_q.weight", 2 * q, rows[:, i].ravel()) for i in (0, 1))
        k_v = (f"{at}attn_k.weight", kv), (f"{at}attn_v.weight", kv)
        self._norm = load.vector((f"{at}attn_norm.weight", c.width))
        self._qkv = load.matrix(c.width, query, *k_v)
        self._gate = load.matrix(c.width, gate)
        self._out = load.matrix(q, (f"{at}attn_output.weight", c.width))
        q_norm, k_norm = (load.vector((f"{at}attn_{x}_norm.weight", c.head_dim)) for x in "qk")
        shape = Heads(c.n_heads, c.n_kv_heads, c.head_dim, c.head_dim, c.head_dim**-0.5)
        self.heads = ops.heads(shape, type_k, type_v, q_norm, k_norm, c.eps)

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""
        return sum(m.nbytes for m in (self._qkv, self._gate, self._out))

    def add_to(self, x: Array, memory: GroupPages, rope: Array) -> None:
        """x += attention(norm(x))."""
        ops = self._ops
        qkv = ops.linear(x, self._qkv, self._norm, self._eps)
        gate = ops.linear(x, self._gate, self._norm, self._eps)
        y = ops.attention(qkv, self.heads, memory.pages, rope, *memory.offsets[self._place])
        ops.linear(ops.gate_sigmoid(y, gate), self._out, into=x)


class DeltaNet:
    """A layer's gated delta net."""

    group = DELTA

    def __init__(
        self, ops: Ops, c: DenseConfig, kind: DeltaKind, load: Loader, at: str, place: int
    ) -> None:
        shape = kind.shape
        self._ops, self._eps, self._place, self._dv = ops, c.eps, place, shape.dv
        qkvba, z = kind.inputs(load, at, shape)
        self._norm = load.vector((f"{at}attn_norm.weight", c.width))
        self._in = load.matrix(c.width, *qkvba)
        self._gate = load.matrix(c.width, *z)
        self._out = load.matrix(shape.values, (f"{at}ssm_out.weight", c.width))
        self._gated_norm = load.vector((f"{at}ssm_norm.weight", shape.dv))
        conv = load.array(f"{at}ssm_conv1d.weight", (shape.channels, shape.taps))
        ssm_a = load.array(f"{at}ssm_a", (shape.n_v,))
        dt_bias = load.array(f"{at}ssm_dt.bias", (shape.n_v,))
        if not np.all(ssm_a <= 0):
            raise ModelError(
                f"{kind.file.path}: {at}ssm_a must be rates of decay, which are never positive"
            )
        self.layer = ops.delta_net(
            shape.n_k, shape.n_v, shape.dk, shape.dv, conv, None, ssm_a, dt_bias, kind.tiled
        )

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""
        return sum(m.nbytes for m in (self._in, self._gate, self._out))

    def add_to(self, x: Array, memory: GroupPages, rope: Array) -> None:
        """x += delta_net(norm(x)); order is all it knows of positions, so it takes no rope."""
        ops = self._ops
        qkvba = ops.linear(x, self._in, self._norm, self._eps)
        z = ops.linear(x, self._gate, self._norm, self._eps)
        y = ops.recur(qkvba, self.layer, memory.pages, *memory.offsets[self._place])
        y = ops.gated_norm(y, z, self._gated_norm, self._eps, self._dv, gate_first=False)
        ops.linear(y, self._out, into=x)


class DeltaHybridModel:
    """A hybrid of gated delta nets and gated attention on one device."""

    def __init__(
        self, file: WeightFile, arch: str, load: Loader, ops: Ops, type_k: str, type_v: str,
        inputs: DeltaInputs, tiled: bool,
    ) -> None:  # fmt: skip
        self.ops = ops
        self.config = c = read_config(file, arch)
        self.n_layers = c.n_layers
        self.n_vocab = c.n_vocab
        self.n_ctx_train = c.n_ctx_train
        self._rope = ops.rope(c.rope)
        self.embedding = load.matrix(c.width, ("token_embd.weight", c.n_vocab))
        network = _networks(file, arch, c, load, ops)
        kind = DeltaKind(file, DeltaShape.read(file, arch), inputs, tiled)
        recurrent = recurrent_layers(file, arch, c.n_layers)
        self._attention: dict[int, GatedAttention] = {}
        self._delta: dict[int, DeltaNet] = {}
        self.layers: list[tuple[DeltaNet | GatedAttention, Network]] = []
        for i in range(c.n_layers):
            at, place = f"blk.{i}.", len(self._delta if recurrent[i] else self._attention)
            if recurrent[i]:
                self._delta[i] = DeltaNet(ops, c, kind, load, at, place)
            else:
                self._attention[i] = GatedAttention(ops, c, load, at, place, type_k, type_v)
            self.layers.append((self._delta.get(i) or self._attention[i], network(at)))
        self.final_norm = load.vector(("output_norm.weight", c.width))
        self.output = self.embedding
        if load.has("output.weight"):
            self.output = load.matrix(c.width, ("output.weight", c.n_vocab))

    @property
    def groups(self) -> tuple[GroupSpec | RecurrentSpec, ...]:
        """One of each kind that there are layers of."""
        c, groups = self.config, list[GroupSpec | RecurrentSpec]()
        if self._attention:
            kv = c.n_kv_heads, c.head_dim, c.head_dim
            groups.append(GroupSpec(ATTENTION, "attention", tuple(self._attention), *kv))
        if self._delta:
            groups.append(recurrent_group(DELTA, {i: m.layer for i, m in self._delta.items()}))
        return tuple(groups)

    @property
    def kernels(self) -> dict[str, GroupKernels]:
        """What the device can do with pages, by group."""
        out = {m.group: attention_kernels(self.ops, m.heads, self._rope)
               for m in self._attention.values()}  # fmt: skip
        delta = {i: m.layer for i, m in self._delta.items()}
        return out | ({DELTA: recurrent_kernels(self.ops, delta)} if delta else {})

    @property
    def weight_bytes(self) -> int:
        """Bytes that all matrices hold."""
        parts = [part for layer in self.layers for part in layer]
        ends = [self.embedding] + ([self.output] if self.output is not self.embedding else [])
        return sum(part.nbytes for part in [*parts, *ends])

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""
        return self.ops.embed(self.embedding, batch.tokens)

    def run(self, x: Array, batch: Batch, start: int, stop: int) -> None:
        """Layers start … stop-1, in place on x."""
        rope = self.ops.rope_table(self._rope, batch.positions)
        for mixer, network in self.layers[start:stop]:
            mixer.add_to(x, batch.groups[mixer.group], rope)
            network.add_to(x)

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers."""
        return self.ops.linear_fine(x, self.output, self.final_norm, self.config.eps)


def read_config(file: WeightFile, arch: str) -> DenseConfig:
    """The sizes of all but the delta nets.

    A file's last blocks may be there to guess tokens ahead (nextn): they are not run.
    """
    experts = file.get_int(f"{arch}.expert_count", default=0, minimum=0)
    ffn = "expert_feed_forward_length" if experts else "feed_forward_length"
    c = DenseConfig.read(file, arch, neox=True, ffn=ffn)
    if c.n_heads * c.head_dim > MAX_COLUMNS:
        raise ModelError(
            f"{file.path}: {c.n_heads} heads of {c.head_dim} dimensions are more than the "
            f"{MAX_COLUMNS} columns that any known model has"
        )
    ahead = file.get_int(
        f"{arch}.nextn_predict_layers", default=0, minimum=0, maximum=c.n_layers - 1
    )
    return replace(c, n_layers=c.n_layers - ahead)


def recurrent_layers(file: WeightFile, arch: str, n_layers: int) -> NDArray[np.bool_]:
    """Which layers are delta nets: by a flag for each, or all but every so many."""
    key = f"{arch}.attention.recurrent_layers"
    flags = file.get_array(key, default=None)
    if flags is None:
        key = f"{arch}.full_attention_interval"
        interval = file.get_int(key, default=INTERVAL, minimum=1, maximum=2**31 - 1)
        return all_but_every(interval, n_layers)
    if not isinstance(flags, np.ndarray) or len(flags) < n_layers:
        raise ModelError(f"{file.path}: {key} must have a flag for each of {n_layers} layers")
    return np.asarray(flags[:n_layers], np.bool_)


def all_but_every(interval: int, n_layers: int) -> NDArray[np.bool_]:
    """Delta nets in all layers but the last of each interval."""
    return np.asarray(np.arange(1, n_layers + 1) % interval != 0)


def _networks(
    file: WeightFile, arch: str, c: DenseConfig, load: Loader, ops: Ops
) -> Callable[[str], Network]:
    """What makes a layer's network, by how its names begin."""
    if not file.get_int(f"{arch}.expert_count", default=0, minimum=0):
        return lambda at: GatedNetwork(ops, c, load, at, _NORM)
    experts = ExpertsConfig.read(file, arch)
    key = f"{arch}.expert_shared_feed_forward_length"
    shared = file.get_int(key, minimum=1, maximum=MAX_COLUMNS)
    sizes = c.width, c.ffn_width, c.eps
    return lambda at: SharedExpertNetwork(ops, experts, load, at, *sizes, shared, _NORM)
