"""Gemma 3 (text): most layers look through a sliding window, every sixth one at everything.

Each of the two kinds of layer has its own rotary embedding. What attention and the gated network
give is normed once more before it is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.memory.build import GroupKernels
from quire.models import hf
from quire.models.dense import DenseConfig
from quire.models.loader import Loader
from quire.models.page_kernels import attention_kernels
from quire.models.rope import frequencies
from quire.models.windows import FULL, WINDOW, Windows, all_but_every, layer_types
from quire.ops import GELU_MUL, Array, Heads, Matrix, Ops, Rope
from quire.ops.batch import Batch
from quire.weights.file import WeightFile
from quire.weights.naming import ADD_ONE, HFConfig, Naming

_PERIOD = 6
_LOCAL_BASE = 10000.0
_WIDTH_27B = 5376
_TENSORS = hf.ATTENTION | hf.QK_NORM | hf.FEED_FORWARD | {
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer's weights; `place` is its number among the layers of its group."""

    group: str
    place: int
    attn_norm: Array
    qkv: Matrix
    heads: Any
    out: Matrix
    attn_post_norm: Array
    ffn_norm: Array
    gate_up: Matrix
    down: Matrix
    ffn_post_norm: Array


class Gemma3Model:
    """Gemma 3 on one device."""

    def __init__(
        self, file: WeightFile, config: DenseConfig, load: Loader, ops: Ops,
        type_k: str, type_v: str,
    ) -> None:  # fmt: skip
        self.ops = ops
        self.config = c = config
        self.n_layers = c.n_layers
        self.n_vocab = c.n_vocab
        self.n_ctx_train = c.n_ctx_train
        self._types = type_k, type_v
        self._scale = _attention_scale(file, c)
        self._cap = file.get_float("gemma3.final_logit_softcapping", default=0.0, minimum=0.0)
        self._softcap = file.get_float("gemma3.attn_logit_softcapping", default=0.0, minimum=0.0)
        self._windows = Windows.read(file, "gemma3", c.n_layers, _PERIOD, required=True)
        self.groups = self._windows.groups(c.n_kv_heads, c.head_dim)
        local_base = file.get_float("gemma3.rope.freq_base_swa", default=_LOCAL_BASE, minimum=1e-3)
        self._ropes = {
            FULL: ops.rope(c.rope),
            WINDOW: ops.rope(Rope(c.head_dim, frequencies(local_base, c.head_dim), neox=True)),
        }
        self.embedding = load.matrix(c.width, ("token_embd.weight", c.n_vocab))
        self.layers = [self._layer(load, i) for i in range(c.n_layers)]
        self.final_norm = load.vector(("output_norm.weight", c.width))
        self.output = self.embedding
        if load.has("output.weight"):
            self.output = load.matrix(c.width, ("output.weight", c.n_vocab))

    def _layer(self, load: Loader, i: int) -> Layer:
        c, at = self.config, f"blk.{i}."
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim

        def norm(name: str, size: int = c.width) -> Array:
            return load.vector((f"{at}{name}.weight", size))

        def matrix(cols: int, *parts: tuple[str, int]) -> Matrix:
            return load.matrix(cols, *((f"{at}{name}.weight", rows) for name, rows in parts))

        shape = Heads(
            c.n_heads, c.n_kv_heads, c.head_dim, c.head_dim, self._scale,
            self._windows.of(i), self._softcap,
        )  # fmt: skip
        q_norm, k_norm = norm("attn_q_norm", c.head_dim), norm("attn_k_norm", c.head_dim)
        return Layer(
            group=self._windows.group(i),
            place=self._windows.place(i),
            attn_norm=norm("attn_norm"),
            qkv=matrix(c.width, ("attn_q", q), ("attn_k", kv), ("attn_v", kv)),
            heads=self.ops.heads(shape, *self._types, q_norm, k_norm, c.eps),
            out=matrix(q, ("attn_output", c.width)),
            attn_post_norm=norm("post_attention_norm"),
            ffn_norm=norm("ffn_norm"),
            gate_up=matrix(c.width, ("ffn_gate", c.ffn_width), ("ffn_up", c.ffn_width)),
            down=matrix(c.ffn_width, ("ffn_down", c.width)),
            ffn_post_norm=norm("post_ffw_norm"),
        )

    @property
    def kernels(self) -> dict[str, GroupKernels]:
        """What the device can do with pages, by group."""
        return {
            layer.group: attention_kernels(self.ops, layer.heads, self._ropes[layer.group])
            for layer in self.layers
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes that all matrices hold."""
        matrices = [m for x in self.layers for m in (x.qkv, x.out, x.gate_up, x.down)]
        matrices += [self.embedding] + ([self.output] if self.output is not self.embedding else [])
        return sum(m.nbytes for m in matrices)

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""
        return self.ops.embed(self.embedding, batch.tokens, self.config.width**0.5)

    def run(self, x: Array, batch: Batch, start: int, stop: int) -> None:
        """Layers start … stop-1, in place on x."""
        ops, eps = self.ops, self.config.eps
        ropes = {
            group: ops.rope_table(self._ropes[group], batch.positions) for group in batch.groups
        }
        for layer in self.layers[start:stop]:
            memory = batch.groups[layer.group]
            k, v = memory.offsets[layer.place]
            qkv = ops.linear(x, layer.qkv, layer.attn_norm, eps)
            heads = ops.attention(qkv, layer.heads, memory.pages, ropes[layer.group], k, v)
            ops.add_norm(x, ops.linear(heads, layer.out), layer.attn_post_norm, eps)
            gate_up = ops.linear(x, layer.gate_up, layer.ffn_norm, eps)
            ops.add_norm(x, ops.linear(gate_up, layer.down, act=GELU_MUL), layer.ffn_post_norm, eps)

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers."""
        logits = self.ops.linear_fine(x, self.output, self.final_norm, self.config.eps)
        if self._cap:
            self.ops.softcap(logits, self._cap)
        return logits


def build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> Gemma3Model:
    """The model, its tensors taken through `load`."""
    config = DenseConfig.read(file, "gemma3", neox=True)
    return Gemma3Model(file, config, load, ops, type_k, type_v)


def _attention_scale(file: WeightFile, c: DenseConfig) -> float:
    """Files seldom give it: it follows from a head's size, in the largest model from the width."""
    over = c.width // c.n_heads if c.width == _WIDTH_27B else c.head_dim
    return file.get_float("gemma3.attention.scale", default=over**-0.5, minimum=0.0)


# What folders leave out, above all those of models that also see.
_USUAL: dict[str, Any] = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072,
}  # fmt: skip
_EYES = ("vision_tower.", "multi_modal_projector.")


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file; of a model that also sees, its text model."""
    text = hf.text_settings(config, tied=True)
    plain = _text_from_hf(HFConfig(config.path, _USUAL | dict(text.values)))
    if "text_config" not in config:
        return plain
    now = hf.inside(plain, "model.language_model.", tuple(f"model.{eye}" for eye in _EYES))
    first = hf.inside(plain, "language_model.model.", _EYES)  # as transformers 4 had it
    return replace(now, otherwise=first.tensors, left_out=(*now.left_out, *first.left_out))


def _text_from_hf(config: HFConfig) -> Naming:
    config.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", False, default=False)
    dims = hf.head_dim(config)
    facts = hf.metadata(config, "gemma3")
    facts["gemma3.attention.sliding_window"] = config.whole("sliding_window")
    scalar = config.number("query_pre_attn_scalar", default=256.0, least=1e-6)
    facts["gemma3.attention.scale"] = scalar**-0.5
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if key in config:
            facts[f"gemma3.{key}"] = config.number(key)
    period = config.whole("sliding_window_pattern", default=_PERIOD)
    n_layers = hf.layers(config)
    sliding = layer_types(config, all_but_every(period, n_layers))
    if not np.array_equal(sliding, all_but_every(_PERIOD, n_layers)):
        facts["gemma3.attention.sliding_window_pattern"] = sliding
    keys, made, local_base = _rope(config, dims)
    if local_base != _LOCAL_BASE:
        facts["gemma3.rope.freq_base_swa"] = local_base
    tied = config.flag("tie_word_embeddings", default=True)
    changes = {name: ADD_ONE for name in ("output_norm.weight", *_TENSORS) if "norm" in name}
    tensors = hf.tensors(config, _TENSORS, changes, tied)
    return Naming(facts | keys, tensors, made, hf.not_needed(tied))


def _rope(
    config: HFConfig, dims: int
) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]], float]:
    """The rotary embedding of full layers, and the base of those with a window."""
    if "rope_parameters" in config:
        both = config.section("rope_parameters")
        full, local = both.section("full_attention"), both.section("sliding_attention")
        local.expect("rope_type", "default", default="default")
        base = full.number("rope_theta", default=1e6)
        local_base = local.number("rope_theta", default=_LOCAL_BASE)
    else:  # as transformers 4 wrote it
        full = config.section("rope_scaling")
        base = config.number("rope_theta", default=1e6)
        local_base = config.number("rope_local_base_freq", default=_LOCAL_BASE)
    keys, made = hf.rope(full, "gemma3", dims, base)
    return keys, made, local_base
