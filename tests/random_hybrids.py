"""Small random models of gated delta nets and gated attention, as folders, in awkward sizes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.safetensors_writer import write_folder

Tensors = dict[str, NDArray[np.float32]]

VOCABULARY = Path(__file__).parent / "data" / "models" / "tiny-hybrid"
KINDS = {
    "Qwen3Next": "qwen3_next",
    "Qwen3_5": "qwen3_5_text",
    "Qwen3_5Moe": "qwen3_5_moe_text",
}
USUAL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 512, "tie_word_embeddings": False, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
NETWORK = {"intermediate_size": 96, "num_experts": 0}
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip


def settings(kind: str, **changed: Any) -> dict[str, Any]:
    """A config.json; those of Qwen3.5 have experts if and only if they are of the other class."""
    experts = kind == "Qwen3_5Moe" or changed.get("num_experts", 0) > 0
    names = {"architectures": [f"{kind}ForCausalLM"], "model_type": KINDS[kind]}
    return names | USUAL | (EXPERTS if experts else NETWORK) | changed


def layer_types(config: dict[str, Any]) -> list[str]:
    """What each layer is; every fourth has attention unless the settings say otherwise."""
    every = range(1, config["num_hidden_layers"] + 1)
    usual = ["linear_attention" if i % 4 else "full_attention" for i in every]
    return config.get("layer_types") or usual


def tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Values spread so that logits differ by several units."""
    rng = np.random.default_rng(seed)
    width = config["hidden_size"]
    joint = config["model_type"] == "qwen3_next"

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * 1.3 / shape[-1] ** 0.5).astype(np.float32)

    def near(value: float, size: int) -> NDArray[np.float32]:
        return (value + 0.2 * rng.standard_normal(size)).astype(np.float32)

    out = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], width),
        "model.norm.weight": near(0, width),
    }
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(config["vocab_size"], width)
    for i, kind in enumerate(layer_types(config)):
        shapes = _attention(config) if kind == "full_attention" else _delta(config, joint)
        shapes |= _network(config) | {"input_layernorm": (width,)}
        shapes |= {"post_attention_layernorm": (width,)}
        for name, shape in shapes.items():
            value = 1 if name == "linear_attn.norm" else 0
            made = near(value, shape[0]) if len(shape) == 1 else matrix(*shape)
            ending = "" if name.endswith(("A_log", "dt_bias")) else ".weight"
            out[f"model.layers.{i}.{name}{ending}"] = made
    return out


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (2 * q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
    }


def _delta(config: dict[str, Any], joint: bool) -> dict[str, tuple[int, ...]]:
    width, n_v = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = n_v * config["linear_value_head_dim"]
    inputs = {"qkvz": 2 * keys + 2 * values, "ba": 2 * n_v}
    if not joint:
        inputs = {"qkv": 2 * keys + values, "z": values, "b": n_v, "a": n_v}
    return {f"linear_attn.in_proj_{name}": (rows, width) for name, rows in inputs.items()} | {
        "linear_attn.conv1d": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (n_v,),
        "linear_attn.dt_bias": (n_v,),
        "linear_attn.norm": (config["linear_value_head_dim"],),
        "linear_attn.out_proj": (width, values),
    }


def _network(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = config["hidden_size"]

    def gated(at: str, ffn: int) -> dict[str, tuple[int, ...]]:
        up = (ffn, width)
        return {f"{at}.gate_proj": up, f"{at}.up_proj": up, f"{at}.down_proj": (width, ffn)}

    if not config["num_experts"]:
        return gated("mlp", config["intermediate_size"])
    out = gated("mlp.shared_expert", config["shared_expert_intermediate_size"])
    for e in range(config["num_experts"]):
        out |= gated(f"mlp.experts.{e}", config["moe_intermediate_size"])
    return out | {"mlp.gate": (config["num_experts"], width), "mlp.shared_expert_gate": (1, width)}


def write(folder: Path, config: dict[str, Any], weights: Tensors) -> Path:
    """A folder of these, with the vocabulary of the trained models."""
    write_folder(folder, config, {"model.safetensors": weights})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(VOCABULARY / name, folder)
    return folder
