"""Mamba-2: recurrent layers and nothing else, so a context costs the same however long it is.

A layer is in(norm(x)) → [z | x B C | dt], the recurrence over all but z, a norm gated by z, out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.errors import ModelError
from quire.memory.build import GroupKernels
from quire.models import hf
from quire.models.dense import vocabulary
from quire.models.loader import Loader
from quire.models.page_kernels import recurrent_group, recurrent_kernels
from quire.ops import Array, Matrix, Ops, Recurrent
from quire.ops.batch import Batch
from quire.weights.file import WeightFile
from quire.weights.gguf_format import Value
from quire.weights.naming import SQUEEZE_CONV, Change, HFConfig, Naming, one

GROUP = "recurrent"
_MOST = 2**20  # no real model has more of anything that is counted here
_CONTEXT = 2**20  # there is no limit; converters write this


@dataclass(frozen=True)
class Config:
    """The sizes of a Mamba-2 model."""

    n_layers: int
    width: int
    inner: int
    n_heads: int
    n_groups: int
    state_dim: int
    conv_width: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    dt_limits: tuple[float, float]
    norm_shape: tuple[int, ...]
    """Of the gated norm's weights; each row of columns is normed by itself."""

    @property
    def channels(self) -> int:
        """What the convolution sees: x, B and C."""
        return self.inner + 2 * self.n_groups * self.state_dim

    @classmethod
    def read(cls, file: WeightFile) -> Config:
        """The sizes a file gives, each within reason."""

        def count(key: str, most: int = _MOST) -> int:
            return file.get_int(f"mamba2.{key}", minimum=1, maximum=most)

        inner, heads = count("ssm.inner_size"), count("ssm.time_step_rank")
        groups = file.get_int("mamba2.ssm.group_count", default=1, minimum=1, maximum=_MOST)
        if inner % heads or heads % groups:
            raise ModelError(
                f"{file.path}: {inner} columns in {heads} heads of {groups} groups; each number "
                "must divide the one before"
            )
        return cls(
            n_layers=count("block_count", hf.MAX_LAYERS),
            width=count("embedding_length"),
            inner=inner,
            n_heads=heads,
            n_groups=groups,
            state_dim=count("ssm.state_size"),
            conv_width=count("ssm.conv_kernel", 1024),
            n_vocab=vocabulary(file, "mamba2"),
            n_ctx_train=count("context_length", 2**31),
            eps=file.get_float("mamba2.attention.layer_norm_rms_epsilon", minimum=0.0, maximum=1.0),
            dt_limits=(
                file.get_float("mamba2.ssm.time_step_min", default=0.0, minimum=0.0),
                file.get_float("mamba2.ssm.time_step_max", default=math.inf, minimum=0.0),
            ),
            norm_shape=_norm_shape(file, inner, groups),
        )


def _norm_shape(file: WeightFile, inner: int, groups: int) -> tuple[int, ...]:
    """A row for each group, or one for all; tools that drop axes of one leave no rows."""
    norm = file.tensors.get("blk.0.ssm_norm.weight")
    known = (groups, inner // groups), (1, inner), (inner,)
    return norm.shape if norm is not None and norm.shape in known else known[0]


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    norm: Array
    enter: Matrix
    enter_bias: Array | None
    recurrent: Recurrent
    gated_norm: Array
    out: Matrix
    out_bias: Array | None


class Mamba2Model:
    """Mamba-2 on one device."""

    def __init__(self, config: Config, load: Loader, ops: Ops) -> None:
        self.ops = ops
        self.config = c = config
        self.n_layers = c.n_layers
        self.n_vocab = c.n_vocab
        self.n_ctx_train = c.n_ctx_train
        self.embedding = load.matrix(c.width, ("token_embd.weight", c.n_vocab))
        self.layers = [self._layer(f"blk.{i}.", load) for i in range(c.n_layers)]
        self._recurrent = {i: layer.recurrent for i, layer in enumerate(self.layers)}
        self.groups = (recurrent_group(GROUP, self._recurrent),)
        self.final_norm = load.vector(("output_norm.weight", c.width))
        self.output = self.embedding
        if load.has("output.weight"):
            self.output = load.matrix(c.width, ("output.weight", c.n_vocab))

    def _layer(self, at: str, load: Loader) -> Layer:
        c = self.config
        columns = c.inner + c.channels + c.n_heads

        def bias(name: str, size: int) -> Array | None:
            return load.vector((f"{at}{name}", size)) if load.has(f"{at}{name}") else None

        gated_norm = load.array(f"{at}ssm_norm.weight", c.norm_shape)
        return Layer(
            norm=load.vector((f"{at}attn_norm.weight", c.width)),
            enter=load.matrix(c.width, (f"{at}ssm_in.weight", columns)),
            enter_bias=bias("ssm_in.bias", columns),
            recurrent=self._recurrence(at, load),
            gated_norm=self.ops.vector(gated_norm.ravel()),
            out=load.matrix(c.inner, (f"{at}ssm_out.weight", c.width)),
            out_bias=bias("ssm_out.bias", c.width),
        )

    def _recurrence(self, at: str, load: Loader) -> Recurrent:
        c = self.config
        conv_bias = f"{at}ssm_conv1d.bias"
        return self.ops.ssd(
            c.n_heads, c.n_groups, c.inner // c.n_heads, c.state_dim,
            load.array(f"{at}ssm_conv1d.weight", (c.channels, c.conv_width)),
            load.array(conv_bias, (c.channels,)) if load.has(conv_bias) else None,
            load.array(f"{at}ssm_a", (c.n_heads, 1)).ravel(),
            load.array(f"{at}ssm_dt.bias", (c.n_heads,)),
            load.array(f"{at}ssm_d", (c.n_heads, 1)).ravel(),
            c.dt_limits,
        )  # fmt: skip

    @property
    def kernels(self) -> dict[str, GroupKernels]:
        """What the device can do with pages, by group."""
        return {GROUP: recurrent_kernels(self.ops, self._recurrent)}

    @property
    def weight_bytes(self) -> int:
        """Bytes that all matrices hold."""
        matrices = [m for x in self.layers for m in (x.enter, x.out)]
        matrices += [self.embedding] + ([self.output] if self.output is not self.embedding else [])
        return sum(m.nbytes for m in matrices)

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""
        return self.ops.embed(self.embedding, batch.tokens)

    def run(self, x: Array, batch: Batch, start: int, stop: int) -> None:
        """Layers start … stop-1, in place on x."""
        ops, c = self.ops, self.config
        memory = batch.groups[GROUP]
        for layer, at in zip(self.layers[start:stop], memory.offsets[start:stop], strict=True):
            mixed = ops.linear(x, layer.enter, layer.norm, c.eps, 0, layer.enter_bias)
            gate = ops.columns(mixed, 0, c.inner)
            inputs = ops.columns(mixed, c.inner, c.channels + c.n_heads)
            heads = ops.recur(inputs, layer.recurrent, memory.pages, *at)
            heads = ops.gated_norm(heads, gate, layer.gated_norm, c.eps, c.norm_shape[-1], True)
            ops.linear(heads, layer.out, bias=layer.out_bias, into=x)

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers."""
        return self.ops.linear_fine(x, self.output, self.final_norm, self.config.eps)


def build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> Mamba2Model:
    """The model, its tensors taken through `load`; there are no keys and values to have a type."""
    return Mamba2Model(Config.read(file), load, ops)


_ROWS = Change(lambda x: x.reshape(-1, 1), lambda s: (*s, 1))
_MINUS_EXP_ROWS = Change(lambda x: -np.exp(x).reshape(-1, 1), lambda s: (*s, 1), values=True)
_ONE_ROW = Change(lambda x: x.reshape(1, -1), lambda s: (1, *s))
_LAYER: dict[str, tuple[str, Change | None]] = {
    "attn_norm.weight": ("norm.weight", None),
    "ssm_in.weight": ("mixer.in_proj.weight", None),
    "ssm_in.bias": ("mixer.in_proj.bias", None),
    "ssm_conv1d.weight": ("mixer.conv1d.weight", SQUEEZE_CONV),
    "ssm_conv1d.bias": ("mixer.conv1d.bias", None),
    "ssm_a": ("mixer.A_log", _MINUS_EXP_ROWS),
    "ssm_d": ("mixer.D", _ROWS),
    "ssm_dt.bias": ("mixer.dt_bias", None),
    "ssm_norm.weight": ("mixer.norm.weight", _ONE_ROW),
    "ssm_out.weight": ("mixer.out_proj.weight", None),
    "ssm_out.bias": ("mixer.out_proj.bias", None),
}


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file.

    Transformers norms all columns together, however many groups there are; llama.cpp norms each
    group by itself. So a folder's norm is one row of weights, and a converted file's has several.
    """
    config.expect("hidden_act", "silu", default="silu")
    width, heads = config.whole("hidden_size"), config.whole("num_heads")
    inner = heads * config.whole("head_dim")
    if inner != config.whole("expand", default=2) * width:
        config.refuse("head_dim", f"{heads} heads must hold `expand` times the width of {width}")
    facts: dict[str, Value] = {
        "general.architecture": "mamba2",
        "mamba2.vocab_size": config.whole("vocab_size"),
        "mamba2.block_count": hf.layers(config),
        "mamba2.context_length": _CONTEXT,
        "mamba2.embedding_length": width,
        "mamba2.feed_forward_length": 0,
        "mamba2.attention.head_count": 0,
        "mamba2.attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "mamba2.ssm.conv_kernel": config.whole("conv_kernel", default=4),
        "mamba2.ssm.inner_size": inner,
        "mamba2.ssm.state_size": config.whole("state_size"),
        "mamba2.ssm.time_step_rank": heads,
        "mamba2.ssm.group_count": config.whole("n_groups"),
    }
    tied = config.flag("tie_word_embeddings", default=False)
    tensors = {
        "token_embd.weight": one("backbone.embeddings.weight"),
        "output_norm.weight": one("backbone.norm_f.weight"),
    }
    if not tied:
        tensors["output.weight"] = one("lm_head.weight")
    for i in range(hf.layers(config)):
        for name, (stored, change) in _LAYER.items():
            tensors[f"blk.{i}.{name}"] = one(f"backbone.layers.{i}.{stored}", change)
    return Naming(facts | _limits(config), tensors, ignored=hf.not_needed(tied))


def _limits(config: HFConfig) -> dict[str, Value]:
    """Limits of the time step, where there are any, under keys of Quire's own: GGUF has none.

    Infinity has several spellings in JSON.
    """
    found = config.values.get("time_step_limit") or [0.0, math.inf]
    infinite = (math.inf, "Infinity", {"__float__": "Infinity"})
    limits = [math.inf if x in infinite else x for x in found] if isinstance(found, list) else []
    known = [type(x) is float or (type(x) is int and x < _MOST) for x in limits]
    if known != [True, True] or not 0 <= limits[0] < limits[1]:
        config.refuse("time_step_limit", "must be two numbers from 0 on, the smaller one first")
    low, high = map(float, limits)
    facts = {"mamba2.ssm.time_step_min": low, "mamba2.ssm.time_step_max": high}
    return {key: value for key, value in facts.items() if 0 < value < math.inf}
