"""Qwen3 with experts (Qwen3-30B-A3B and its kin): every layer's network is a mixture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.models import folder_names
from quire.models.decoder import Decoder
from quire.models.experts import Experts, Routing
from quire.models.layers import Attention
from quire.models.loader import Kit
from quire.models.sizes import DenseSizes
from quire.models.windows import Windows
from quire.weights.file import WeightFile
from quire.weights.gguf_format import Value
from quire.weights.naming import HFConfig, Naming


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit."""
    c = DenseSizes.read(file, "qwen3moe", ffn="expert_feed_forward_length")
    windows = Windows.read(file, "qwen3moe", c.n_layers)
    routing = Routing.read(file, "qwen3moe")

    def attention(i: int) -> Attention:
        return Attention(kit, c, i, c.rope, window=windows.of(i), qk_norm=True)

    layers = [(attention(i), Experts(kit, c, i, routing)) for i in range(c.n_layers)]
    return Decoder(kit, c, layers)


_ROUTER = {
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
}


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file: its experts, stored one by one, become stacks.

    Layers with a plain network among those with experts are not known.
    """
    config.expect("mlp_only_layers", [], default=[])
    config.expect("decoder_sparse_step", 1, default=1)
    count = folder_names.expert_count(config)
    facts: dict[str, Value] = {
        "qwen3moe.expert_count": count,
        "qwen3moe.expert_used_count": config.whole("num_experts_per_tok"),
        "qwen3moe.expert_feed_forward_length": config.whole("moe_intermediate_size"),
        "qwen3moe.expert_weights_norm": config.flag("norm_topk_prob", default=False),
    }
    stacks = folder_names.expert_stacks(config, count)
    sliding = np.full(folder_names.layers(config), config.flag("use_sliding_window", default=False))
    plain = folder_names.decoder(
        config, "qwen3moe", folder_names.ATTENTION | folder_names.QK_NORM | _ROUTER,
        windows=folder_names.windows_in(config, sliding),
    )  # fmt: skip
    return replace(plain, metadata=plain.metadata | facts, tensors=plain.tensors | stacks)
