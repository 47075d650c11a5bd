"""What the folders of most decoders have in common, and how GGUF writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.models.sizes import MAX_LAYERS
from quire.models.windows import MAX_WINDOW, Windows, layer_types
from quire.weights.file import REQUIRED, Required
from quire.weights.gguf_format import Value
from quire.weights.naming import Change, HFConfig, Naming, Source, one, stack

MAX_EXPERTS = 65536  # of all layers: each gets names, before it is known whether it is there
MAX_HEAD_DIM = 8192
_WINDOW = 4096  # of Mistral and Qwen, where a folder does not mention it


def layers(config: HFConfig) -> int:
    """How many layers there are, within reason."""
    return config.whole("num_hidden_layers", maximum=MAX_LAYERS)


def head_dim(config: HFConfig) -> int:
    """Dimensions of a head, which many folders leave to be computed."""
    share = config.whole("hidden_size") // config.whole("num_attention_heads")
    return config.whole("head_dim", default=max(share, 1), maximum=MAX_HEAD_DIM)


def metadata(config: HFConfig, arch: str) -> dict[str, Value]:
    """The sizes that every decoder has."""
    heads, dim = config.whole("num_attention_heads"), head_dim(config)
    return {
        "general.architecture": arch,
        f"{arch}.vocab_size": config.whole("vocab_size"),
        f"{arch}.block_count": layers(config),
        f"{arch}.context_length": config.whole("max_position_embeddings"),
        f"{arch}.embedding_length": config.whole("hidden_size"),
        f"{arch}.feed_forward_length": config.whole("intermediate_size"),
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config.whole("num_key_value_heads", default=heads),
        f"{arch}.attention.key_length": dim,
        f"{arch}.attention.value_length": dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", default=1e-6),
    }


def rope_of(
    config: HFConfig, arch: str, usual_base: float, usual_share: float = 1.0
) -> tuple[dict[str, Value], dict[str, NDArray[np.float32]]]:
    """The one rotary embedding of a decoder; transformers 4 spread it over several keys."""
    old = "rope_parameters" not in config
    section = config.section("rope_scaling" if old else "rope_parameters")
    first = config if old else section
    share = first.number("partial_rotary_factor", usual_share, least=0.0, most=1.0)
    base = first.number("rope_theta", default=usual_base)
    return rope(section, arch, int(head_dim(config) * share), base)


def rope(
    section: HFConfig, arch: str, n_rot: int, base: float
) -> tuple[dict[str, Value], dict[str, NDArray[np.float32]]]:
    """Rotary embedding: its keys, and the divisors of each frequency where Llama 3 has them."""
    out: dict[str, Value] = {
        f"{arch}.rope.freq_base": base,
        f"{arch}.rope.dimension_count": n_rot,
    }
    kind = section.text("rope_type", default=section.text("type", default="default"))
    if kind == "default":
        return out, {}
    if kind == "llama3":
        return out, {"rope_freqs.weight": _llama3_factors(section, base, n_rot)}
    if kind not in ("linear", "yarn"):
        section.refuse("rope_type", "known are default, linear, yarn, llama3")
    at, factor = f"{arch}.rope.scaling.", section.number("factor")
    out |= {f"{at}type": kind, f"{at}factor": factor}
    if kind == "yarn":
        usual_values = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None}
        for key, value in usual_values.items():
            section.expect(key, value, default=value)
        usual = 1.0 + 0.1 * math.log(max(factor, 1.0))
        out[f"{at}original_context_length"] = section.whole("original_max_position_embeddings")
        out[f"{at}attn_factor"] = section.number("attention_factor", default=usual) / usual
    return out, {}


def _llama3_factors(section: HFConfig, base: float, n_rot: int) -> NDArray[np.float32]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = section.number("factor")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    trained = section.whole("original_max_position_embeddings")
    if not (factor >= 1 and 0 < low < high):
        section.refuse("factor", "needs factor >= 1 and 0 < low_freq_factor < high_freq_factor")
    turns = trained * base ** (-np.arange(0, n_rot, 2) / n_rot) / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - keep) / factor + keep)).astype(np.float32)


def decoder(
    config: HFConfig, arch: str, layer: dict[str, str], changes: dict[str, Change] | None = None,
    rotated: float = 1.0, windows: Windows | None = None,
) -> Naming:  # fmt: skip
    """A plain decoder; `layer` maps GGUF's names within a layer to the folder's.

    `rotated` is the share of a head that is rotated if the folder does not say.
    """
    config.expect("hidden_act", "silu", default="silu")
    facts = metadata(config, arch)
    if windows is None:
        config.expect("use_sliding_window", False, default=False)
    elif windows.sliding.any():
        facts[f"{arch}.attention.sliding_window"] = windows.size
        facts[f"{arch}.attention.sliding_window_pattern"] = windows.sliding
    keys, made = rope_of(config, arch, 10000.0, rotated)
    tied = config.flag("tie_word_embeddings", default=False)
    named = tensors(config, layer, changes, tied)
    # Models that make vectors are stored without what is around them.
    bare = {
        name: replace(source, names=tuple(n.removeprefix("model.") for n in source.names))
        for name, source in named.items()
    }
    return Naming(facts | keys, named, made, not_needed(tied), otherwise=bare)


def windows_in(config: HFConfig, sliding: NDArray[np.bool_]) -> Windows:
    """These layers with the window that a folder has; it has none if its size is null."""
    if config.values.get("sliding_window", _WINDOW) is None:
        return Windows(0, np.zeros_like(sliding))
    return Windows(config.whole("sliding_window", default=_WINDOW, maximum=MAX_WINDOW), sliding)


def qwen_windows(config: HFConfig) -> Windows:
    """Windows of Qwen2 and Qwen3: in the last layers, if they are switched on at all."""
    first = config.whole("max_window_layers", default=28, minimum=0)
    sliding = layer_types(config, np.arange(layers(config)) >= first)
    return windows_in(config, sliding & config.flag("use_sliding_window", default=False))


def tensors(
    config: HFConfig, layer: dict[str, str], changes: dict[str, Change] | None, tied: bool
) -> dict[str, Source]:
    """Embedding, final norm and output, then those of each layer; `changes` is by GGUF's name."""
    changes = changes or {}
    out = {
        "token_embd.weight": one("model.embed_tokens.weight"),
        "output_norm.weight": one("model.norm.weight", changes.get("output_norm.weight")),
    }
    if not tied:
        out["output.weight"] = one("lm_head.weight")
    for i in range(layers(config)):
        for name, stored in layer.items():
            out[f"blk.{i}.{name}"] = one(f"model.layers.{i}.{stored}", changes.get(name))
    return out


def expert_count(config: HFConfig, default: int | Required = REQUIRED) -> int:
    """How many experts a layer has; with a default of 0, none are fine as well."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    least = 0 if default == 0 else 1
    return config.whole(key, default, least, maximum=MAX_EXPERTS // layers(config))


def expert_stacks(config: HFConfig, count: int) -> dict[str, Source]:
    """Experts that are stored one by one, as stacks, in every layer."""
    return {
        f"blk.{i}.ffn_{name}_exps.weight": stack(
            f"model.layers.{i}.mlp.experts.{e}.{name}_proj.weight" for e in range(count)
        )
        for i in range(layers(config))
        for name in ("gate", "up", "down")
    }


def not_needed(tied: bool) -> tuple[str, ...]:
    """Tensors that some folders carry and that follow from others or from the settings."""
    return ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)


def text_settings(config: HFConfig, tied: bool = False) -> HFConfig:
    """The settings of the text model, which those of a model that also sees hold inside."""
    if "text_config" not in config:
        return config
    inner = {k: v for k, v in config.section("text_config").values.items() if v is not None}
    tied = config.flag("tie_word_embeddings", default=tied)  # said outside, inside or both
    return HFConfig(config.path, {"tie_word_embeddings": tied, **inner})


def inside(plain: Naming, where: str, left_out: tuple[str, ...]) -> Naming:
    """The same tensors where they lie in the folder of a model that also sees: model.… there."""

    def moved(sources: Mapping[str, Source]) -> dict[str, Source]:
        return {
            name: replace(source, names=tuple(n.replace("model.", where, 1) for n in source.names))
            for name, source in sources.items()
        }

    return replace(
        plain, tensors=moved(plain.tensors), otherwise=moved(plain.otherwise),
        left_out=(*plain.left_out, *left_out),
    )  # fmt: skip


ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
"""The tensors of plain attention, by GGUF's name within a layer."""
QKV_BIAS = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
QK_NORM = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
