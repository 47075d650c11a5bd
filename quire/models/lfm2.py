"""LFM2: short gated convolutions in most layers, full attention in the others.

Every layer ends in a gated network. A convolution remembers the last few inputs of each channel,
one less than it is wide, so only attention needs more memory as a context grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.errors import ModelError
from quire.memory.build import GroupKernels
from quire.memory.layout import GroupSpec
from quire.memory.state_layout import RecurrentSpec
from quire.models import hf
from quire.models.dense import DenseConfig, GatedNetwork
from quire.models.loader import Loader
from quire.models.page_kernels import attention_kernels, recurrent_group, recurrent_kernels
from quire.ops import Array, Heads, Matrix, Ops, Recurrent
from quire.ops.batch import Batch, GroupPages
from quire.weights.file import WeightFile
from quire.weights.naming import SQUEEZE_CONV, HFConfig, Naming, one

ATTENTION, CONV = "attention", "conv"


class Mixer(Protocol):
    """What a layer does before its network."""

    group: str

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""

    def add_to(self, x: Array, memory: GroupPages, place: int, rope: Array) -> None:
        """x += mixer(norm(x)); `place` is the layer's number among those of its group."""


class Attention:
    """Full attention with normed q and k; q, k and v are one matrix."""

    group = ATTENTION

    def __init__(
        self, ops: Ops, c: DenseConfig, load: Loader, at: str, type_k: str, type_v: str
    ) -> None:
        self._ops, self._eps = ops, c.eps
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        parts = (("attn_q", q), ("attn_k", kv), ("attn_v", kv))
        self._norm = load.vector((f"{at}attn_norm.weight", c.width))
        self._qkv = load.matrix(c.width, *((f"{at}{name}.weight", rows) for name, rows in parts))
        q_norm = load.vector((f"{at}attn_q_norm.weight", c.head_dim))
        k_norm = load.vector((f"{at}attn_k_norm.weight", c.head_dim))
        shape = Heads(c.n_heads, c.n_kv_heads, c.head_dim, c.head_dim, c.head_dim**-0.5)
        self.heads = ops.heads(shape, type_k, type_v, q_norm, k_norm, c.eps)
        self._out = load.matrix(q, (f"{at}attn_output.weight", c.width))

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""
        return int(self._qkv.nbytes + self._out.nbytes)

    def add_to(self, x: Array, memory: GroupPages, place: int, rope: Array) -> None:
        """x += attention(norm(x))."""
        qkv = self._ops.linear(x, self._qkv, self._norm, self._eps)
        offsets = memory.offsets[place]
        heads = self._ops.attention(qkv, self.heads, memory.pages, rope, *offsets)
        self._ops.linear(heads, self._out, into=x)


class ShortConv:
    """out(C · conv(B · x)), with B, C and x from one matrix."""

    group = CONV

    def __init__(self, ops: Ops, c: DenseConfig, load: Loader, at: str, conv_width: int) -> None:
        self._ops, self._eps = ops, c.eps
        at_conv = f"{at}shortconv."
        self._norm = load.vector((f"{at}attn_norm.weight", c.width))
        self._enter, self._enter_bias = _linear(load, f"{at_conv}in_proj", c.width, 3 * c.width)
        bias = f"{at_conv}conv.bias"
        self.recurrent: Recurrent = ops.short_conv(
            load.array(f"{at_conv}conv.weight", (c.width, conv_width)),
            load.array(bias, (c.width,)) if load.has(bias) else None,
        )
        self._out, self._out_bias = _linear(load, f"{at_conv}out_proj", c.width, c.width)

    @property
    def nbytes(self) -> int:
        """Bytes that its matrices hold."""
        return int(self._enter.nbytes + self._out.nbytes)

    def add_to(self, x: Array, memory: GroupPages, place: int, rope: Array) -> None:
        """x += convolution(norm(x))."""
        inputs = self._ops.linear(x, self._enter, self._norm, self._eps, 0, self._enter_bias)
        mixed = self._ops.recur(inputs, self.recurrent, memory.pages, *memory.offsets[place])
        self._ops.linear(mixed, self._out, bias=self._out_bias, into=x)


def _linear(load: Loader, name: str, cols: int, rows: int) -> tuple[Matrix, Array | None]:
    """A matrix, and its bias where there is one."""
    bias = load.vector((f"{name}.bias", rows)) if load.has(f"{name}.bias") else None
    return load.matrix(cols, (f"{name}.weight", rows)), bias


@dataclass(frozen=True)
class Layer:
    """One layer; `place` is its number among the layers of its group."""

    place: int
    mixer: Mixer
    network: GatedNetwork


class Lfm2Model:
    """LFM2 on one device."""

    def __init__(self, file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> None:
        self.ops = ops
        kv_heads = _kv_heads(file)
        self.config = c = DenseConfig.read(file, "lfm2", neox=True, kv_heads=max(1, *kv_heads))
        self.n_layers = c.n_layers
        self.n_vocab = c.n_vocab
        self.n_ctx_train = c.n_ctx_train
        self._rope = ops.rope(c.rope)
        width = file.get_int("lfm2.shortconv.l_cache", minimum=1, maximum=1024)
        attention = {
            i: Attention(ops, c, load, f"blk.{i}.", type_k, type_v)
            for i, heads in enumerate(kv_heads)
            if heads
        }
        convs = {
            i: ShortConv(ops, c, load, f"blk.{i}.", width)
            for i, heads in enumerate(kv_heads)
            if not heads
        }
        self._declare(attention, convs)
        places = {i: place for kind in (attention, convs) for place, i in enumerate(kind)}
        mixers: dict[int, Mixer] = {**attention, **convs}
        self.layers = [
            Layer(places[i], mixers[i], GatedNetwork(ops, c, load, f"blk.{i}."))
            for i in range(c.n_layers)
        ]
        self.embedding = load.matrix(c.width, ("token_embd.weight", c.n_vocab))
        final = "output_norm.weight" if load.has("output_norm.weight") else _FINAL_NORM
        self.final_norm = load.vector((final, c.width))
        self.output = self.embedding
        if load.has("output.weight"):
            self.output = load.matrix(c.width, ("output.weight", c.n_vocab))

    def _declare(self, attention: dict[int, Attention], convs: dict[int, ShortConv]) -> None:
        """The groups, and what the device can do with their pages."""
        c = self.config
        groups: list[GroupSpec | RecurrentSpec] = []
        self.kernels: dict[str, GroupKernels] = {}
        if attention:
            layers, heads = tuple(attention), next(iter(attention.values())).heads
            sizes = c.n_kv_heads, c.head_dim, c.head_dim
            groups.append(GroupSpec(ATTENTION, "attention", layers, *sizes))
            self.kernels[ATTENTION] = attention_kernels(self.ops, heads, self._rope)
        if convs:
            recurrent = {i: conv.recurrent for i, conv in convs.items()}
            groups.append(recurrent_group(CONV, recurrent))
            self.kernels[CONV] = recurrent_kernels(self.ops, recurrent)
        self.groups = tuple(groups)

    @property
    def weight_bytes(self) -> int:
        """Bytes that all matrices hold."""
        matrices = [m for x in self.layers for m in (x.mixer, x.network)]
        ends = [self.embedding] + ([self.output] if self.output is not self.embedding else [])
        return sum(m.nbytes for m in (*matrices, *ends))

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""
        return self.ops.embed(self.embedding, batch.tokens)

    def run(self, x: Array, batch: Batch, start: int, stop: int) -> None:
        """Layers start … stop-1, in place on x."""
        rope = self.ops.rope_table(self._rope, batch.positions)
        for layer in self.layers[start:stop]:
            layer.mixer.add_to(x, batch.groups[layer.mixer.group], layer.place, rope)
            layer.network.add_to(x)

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers."""
        return self.ops.linear_fine(x, self.output, self.final_norm, self.config.eps)


def build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> Lfm2Model:
    """The model, its tensors taken through `load`."""
    if file.get_int("lfm2.attention.sliding_window", default=0):
        raise ModelError(f"{file.path}: lfm2.attention.sliding_window is not known to Quire")
    return Lfm2Model(file, load, ops, type_k, type_v)


def _kv_heads(file: WeightFile) -> list[int]:
    """Key/value heads of each layer; 0 stands for a convolution."""
    key = "lfm2.attention.head_count_kv"
    n_layers = file.get_int("lfm2.block_count", minimum=1, maximum=hf.MAX_LAYERS)
    found = file.metadata.get(key)
    if not isinstance(found, np.ndarray):
        return [file.get_int(key, minimum=1, maximum=4096)] * n_layers
    if len(found) != n_layers or found.dtype.kind not in "iu":
        raise ModelError(f"{file.path}: {key} must be a whole number for each of {n_layers} layers")
    counts: list[int] = found.tolist()
    if min(counts) < 0 or max(counts) > 4096 or len(set(counts) - {0}) > 1:
        raise ModelError(f"{file.path}: {key} is {counts}; all that are not 0 must be alike")
    return counts


_FINAL_NORM = "token_embd_norm.weight"  # converters call it so, although it comes at the end
_LAYER = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
}
_ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
}
_CONV = {
    f"shortconv.{name}.{what}": f"conv.{name}.{what}"
    for name in ("conv", "in_proj", "out_proj")
    for what in ("weight", "bias")
}


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file; the first folders spell some settings otherwise."""
    usual = {
        "intermediate_size": _network_width(config),
        "rms_norm_eps": config.number("norm_eps", default=1e-5),
    }
    attends = _attends(config)
    facts = hf.metadata(HFConfig(config.path, {**config.values, **usual}), "lfm2")
    kv_heads = config.whole("num_key_value_heads")
    facts["lfm2.attention.head_count_kv"] = np.where(attends, kv_heads, 0).astype(np.int32)
    facts["lfm2.shortconv.l_cache"] = config.whole("conv_L_cache", default=3)
    keys, made = hf.rope_of(config, "lfm2", 1e6)
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", default=True))
    tensors = {
        "token_embd.weight": one("model.embed_tokens.weight"),
        _FINAL_NORM: one("model.embedding_norm.weight"),
    }
    if not tied:
        tensors["output.weight"] = one("lm_head.weight")
    for i, attention in enumerate(attends):
        for name, stored in (_LAYER | (_ATTENTION if attention else _CONV)).items():
            change = SQUEEZE_CONV if name == "shortconv.conv.weight" else None
            tensors[f"blk.{i}.{name}"] = one(f"model.layers.{i}.{stored}", change)
    return Naming(facts | keys, tensors, made, hf.not_needed(tied))


def _attends(config: HFConfig) -> list[bool]:
    """Which layers have attention: by a name for each, by their numbers, or all."""
    n_layers = hf.layers(config)
    if "layer_types" in config:
        types = config.strings("layer_types")
        if len(types) != n_layers or set(types) - {"full_attention", "conv"}:
            config.refuse("layer_types", "each layer must be full_attention or conv")
        return [kind == "full_attention" for kind in types]
    numbers = config.values.get("full_attn_idxs")
    if numbers is None:
        return [True] * n_layers
    if not isinstance(numbers, list) or not set(map(type, numbers)) <= {int}:
        config.refuse("full_attn_idxs", "must be a list of layers")
    return [i in numbers for i in range(n_layers)]


def _network_width(config: HFConfig) -> int:
    """Two thirds of what is given, rounded up, unless the width is meant as it stands."""
    key = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    width = config.whole(key)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = config.whole("block_multiple_of", default=256)
    scaled = config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3)
    return -(-int(scaled) // multiple) * multiple
