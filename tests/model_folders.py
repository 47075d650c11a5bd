"""Models as folders: trained ones, and random ones of kinds for which there is no trained one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.config import LoadConfig
from quire.models.registry import open_weights
from quire.ops.cpu import CpuOps
from quire.placement.blueprint import Blueprint
from tests import random_hybrids
from tests.safetensors_writer import write_folder

MODELS = Path(__file__).parent / "data" / "models"
_VOCAB = 4096
_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": _VOCAB, "hidden_size": 96, "norm_eps": 1e-5,
    "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2,
    "block_ff_dim": 150, "block_auto_adjust_ff_dim": True, "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1e4,
    "full_attn_idxs": [1, 4], "max_position_embeddings": 2048, "tie_embedding": True,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "vocab_size": _VOCAB, "hidden_size": 96, "expand": 2,
    "num_hidden_layers": 3, "num_heads": 6, "head_dim": 32, "n_groups": 2, "state_size": 64,
    "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
}  # fmt: skip


class _Random:
    """Values spread so that logits differ by several units."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(11)

    def matrix(self, *shape: int) -> NDArray[np.float32]:
        return (self._rng.standard_normal(shape) * 1.3 / shape[-1] ** 0.5).astype(np.float32)

    def near(self, value: float, size: int) -> NDArray[np.float32]:
        return (value + 0.2 * self._rng.standard_normal(size)).astype(np.float32)


def write_lfm2(folder: Path) -> Path:
    """LFM2 with three convolutions and two layers of attention, spelled as its first folders."""
    c, r = _LFM2, _Random()
    width, head, ffn = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"], 128
    tensors = {
        "model.embed_tokens.weight": r.matrix(_VOCAB, width),
        "model.embedding_norm.weight": r.near(1, width),
    }
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}operator_norm.weight": r.near(1, width),
            f"{at}ffn_norm.weight": r.near(1, width),
            f"{at}feed_forward.w1.weight": r.matrix(ffn, width),
            f"{at}feed_forward.w3.weight": r.matrix(ffn, width),
            f"{at}feed_forward.w2.weight": r.matrix(width, ffn),
        }
        if i not in c["full_attn_idxs"]:
            tensors |= {
                f"{at}conv.in_proj.weight": r.matrix(3 * width, width),
                f"{at}conv.conv.weight": r.matrix(width, 1, c["conv_L_cache"]),
                f"{at}conv.out_proj.weight": r.matrix(width, width),
            }
            continue
        for name, heads in (("q", c["num_attention_heads"]), ("k", 2), ("v", 2)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = r.matrix(heads * head, width)
        for name in "qk":
            tensors[f"{at}self_attn.{name}_layernorm.weight"] = r.near(1, head)
        tensors[f"{at}self_attn.out_proj.weight"] = r.matrix(width, width)
    return _write(folder, c, tensors)


def write_mamba2(folder: Path) -> Path:
    """Mamba-2 with two groups of heads."""
    c, r = _MAMBA2, _Random()
    width, heads, inner = c["hidden_size"], c["num_heads"], c["num_heads"] * c["head_dim"]
    channels = inner + 2 * c["n_groups"] * c["state_size"]
    tensors = {
        "backbone.embeddings.weight": r.matrix(_VOCAB, width),
        "backbone.norm_f.weight": r.near(1, width),
        "lm_head.weight": r.matrix(_VOCAB, width),
    }
    for i in range(c["num_hidden_layers"]):
        at = f"backbone.layers.{i}."
        tensors |= {
            f"{at}norm.weight": r.near(1, width),
            f"{at}mixer.in_proj.weight": r.matrix(inner + channels + heads, width),
            f"{at}mixer.conv1d.weight": r.matrix(channels, 1, c["conv_kernel"]),
            f"{at}mixer.conv1d.bias": r.near(0, channels),
            f"{at}mixer.A_log": r.near(0.5, heads),
            f"{at}mixer.D": r.near(1, heads),
            f"{at}mixer.dt_bias": r.near(-2, heads),
            f"{at}mixer.norm.weight": r.near(1, inner),
            f"{at}mixer.out_proj.weight": r.matrix(width, inner),
        }
    return _write(folder, c, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[np.float32]]) -> Path:
    write_folder(folder, config, {"model.safetensors": tensors})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODELS / "tiny-dense" / name, folder)
    return folder


def write_qwen3next(folder: Path) -> Path:
    """Qwen3-Next with experts, as its real ones are."""
    config = random_hybrids.settings("Qwen3Next", **random_hybrids.EXPERTS)
    return random_hybrids.write(folder, config, random_hybrids.tensors(config))


def exactly(path: Path) -> dict[str, Any]:
    """Settings that leave nothing rounded; those of K and V only where there are any."""
    with open_weights(path) as file:
        groups = Blueprint.read(file, CpuOps(1), LoadConfig()).groups
    attends = any(group.kind != "recurrent" for group in groups)
    return {"activations": "f32"} | ({"type_k": "f32", "type_v": "f32"} if attends else {})


TRAINED = sorted(p.parent.name for p in MODELS.glob("*/golden.json"))
RANDOM = {"lfm2": write_lfm2, "mamba2": write_mamba2, "qwen3next": write_qwen3next}


def model_folder(name: str, scratch: Path) -> Path:
    """The folder of a trained model, or of a random one that is written now."""
    return RANDOM[name](scratch / name) if name in RANDOM else MODELS / name
