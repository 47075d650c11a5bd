"""Qwen3 with experts (Qwen3-30B-A3B and its kin): every layer's network is a mixture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.models import hf
from quire.models.dense import DenseConfig, DenseModel
from quire.models.experts import ExpertNetwork, ExpertsConfig
from quire.models.loader import Loader
from quire.models.windows import Windows
from quire.ops import Ops
from quire.weights.file import WeightFile
from quire.weights.gguf_format import Value
from quire.weights.naming import HFConfig, Naming


def build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> DenseModel:
    """The model, its tensors taken through `load`."""
    c = DenseConfig.read(file, "qwen3moe", neox=True, ffn="expert_feed_forward_length")
    experts = ExpertsConfig.read(file, "qwen3moe")

    def network(at: str) -> ExpertNetwork:
        return ExpertNetwork(ops, experts, load, at, c.width, c.ffn_width, c.eps)

    windows = Windows.read(file, "qwen3moe", c.n_layers)
    return DenseModel(c, windows, load, ops, type_k, type_v, qk_norm=True, network=network)


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
    count = hf.expert_count(config)
    facts: dict[str, Value] = {
        "qwen3moe.expert_count": count,
        "qwen3moe.expert_used_count": config.whole("num_experts_per_tok"),
        "qwen3moe.expert_feed_forward_length": config.whole("moe_intermediate_size"),
        "qwen3moe.expert_weights_norm": config.flag("norm_topk_prob", default=False),
    }
    stacks = hf.expert_stacks(config, count)
    sliding = np.full(hf.layers(config), config.flag("use_sliding_window", default=False))
    plain = hf.decoder(
        config, "qwen3moe", hf.ATTENTION | hf.QK_NORM | _ROUTER,
        windows=hf.windows_in(config, sliding),
    )  # fmt: skip
    return replace(plain, metadata=plain.metadata | facts, tensors=plain.tensors | stacks)
