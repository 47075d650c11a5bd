"""Gemma 3 (text): most layers look through a sliding window, every sixth one at everything.

Each of the two kinds of layer has its own rotary embedding. What attention and the gated network
give is normed once more before it is added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models import folder_names
from quire.models.decoder import Decoder
from quire.models.layers import Attention, GatedNetwork
from quire.models.loader import Kit
from quire.models.rope import frequencies
from quire.models.sizes import DenseSizes
from quire.models.windows import Windows, all_but_every, layer_types
from quire.ops import GELU_MUL, Rope
from quire.weights.file import WeightFile
from quire.weights.naming import ADD_ONE, HFConfig, Naming

_PERIOD = 6
_LOCAL_BASE = 10000.0
_WIDTH_27B = 5376
_TENSORS = folder_names.ATTENTION | folder_names.QK_NORM | folder_names.FEED_FORWARD | {
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}  # fmt: skip


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit."""
    c = DenseSizes.read(file, "gemma3")
    windows = Windows.read(file, "gemma3", c.n_layers, _PERIOD, required=True)
    scale = _attention_scale(file, c)
    cap, softcap = (
        file.get_float(f"gemma3.{which}_logit_softcapping", default=0.0, minimum=0.0)
        for which in ("final", "attn")
    )
    local_base = file.get_float("gemma3.rope.freq_base_swa", default=_LOCAL_BASE, minimum=1e-3)
    local = Rope(c.head_dim, frequencies(local_base, c.head_dim), neox=True)

    def attention(i: int) -> Attention:
        window = windows.of(i)
        return Attention(
            kit, c, i, local if window else c.rope, window=window, qk_norm=True, scale=scale,
            softcap=softcap, post_norm="post_attention_norm",
        )  # fmt: skip

    def network(i: int) -> GatedNetwork:
        return GatedNetwork(kit, c, i, act=GELU_MUL, post_norm="post_ffw_norm")

    layers = [(attention(i), network(i)) for i in range(c.n_layers)]
    return Decoder(kit, c, layers, embedding_scale=c.width**0.5, softcap=cap)


def _attention_scale(file: WeightFile, c: DenseSizes) -> float:
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
    text = folder_names.text_settings(config, tied=True)
    plain = _text_from_hf(HFConfig(config.path, _USUAL | dict(text.values)))
    if "text_config" not in config:
        return plain
    now = folder_names.inside(
        plain, "model.language_model.", tuple(f"model.{eye}" for eye in _EYES)
    )
    first = folder_names.inside(plain, "language_model.model.", _EYES)  # as transformers 4 had it
    return replace(now, otherwise=first.tensors, left_out=(*now.left_out, *first.left_out))


def _text_from_hf(config: HFConfig) -> Naming:
    config.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", False, default=False)
    dims = folder_names.head_dim(config)
    facts = folder_names.metadata(config, "gemma3")
    facts["gemma3.attention.sliding_window"] = config.whole("sliding_window")
    scalar = config.number("query_pre_attn_scalar", default=256.0, least=1e-6)
    facts["gemma3.attention.scale"] = scalar**-0.5
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if key in config:
            facts[f"gemma3.{key}"] = config.number(key)
    period = config.whole("sliding_window_pattern", default=_PERIOD)
    n_layers = folder_names.layers(config)
    sliding = layer_types(config, all_but_every(period, n_layers))
    if not np.array_equal(sliding, all_but_every(_PERIOD, n_layers)):
        facts["gemma3.attention.sliding_window_pattern"] = sliding
    keys, made, local_base = _rope(config, dims)
    if local_base != _LOCAL_BASE:
        facts["gemma3.rope.freq_base_swa"] = local_base
    tied = config.flag("tie_word_embeddings", default=True)
    changes = {name: ADD_ONE for name in ("output_norm.weight", *_TENSORS) if "norm" in name}
    tensors = folder_names.tensors(config, _TENSORS, changes, tied)
    return Naming(facts | keys, tensors, made, folder_names.not_needed(tied))


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
    keys, made = folder_names.rope(full, "gemma3", dims, base)
    return keys, made, local_base
