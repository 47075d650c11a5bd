"""Hyperparameters that nobody asked for: most are harmless, some would change what is computed.

An architecture reads what it computes with. What a file says besides must not be ignored in silence
if another program would compute with it: a cap of the logits, a scale, a window.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from quire.errors import ModelError
from quire.weights.file import WeightFile
from quire.weights.gguf_format import Value, quote
from quire.weights.naming import HFConfig, Naming

# What a key has in its name that is about arithmetic, and the values under which it changes none.
_ARITHMETIC: Final[dict[str, tuple[Any, ...]]] = {
    "softcap": (0,),
    "scale": (0, 1),
    "scaling": (0, 1, "none"),
    "multiplier": (0, 1),
    "factor": (0, 1),
    "clamp": (0,),
    "alibi": (0,),
    "temperature": (0, 1),
    "residual": (0,),
    "sparsity": (0,),
    "altup": (0,),
    "lora": (0,),
    "shared_kv": (0,),
    "sliding_window": (0,),
    "gating": (0, 1),  # 1 is a softmax
    "expert": (0, 1),
    "causal": (1,),
}
_HARMLESS: Final = (
    # known from the tensors' shapes, of use to other programs, or without a part in it
    "vocab_size", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "expert_shared_count", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.dimension_sections", "attention.sliding_window_pattern",
)  # fmt: skip
_YARN: Final = {  # as llama.cpp has them where a file does not say
    "rope.scaling.yarn_beta_fast": 32, "rope.scaling.yarn_beta_slow": 1,
    "rope.scaling.yarn_ext_factor": 1,
}  # fmt: skip

# Settings of config.json that change what is computed: GGUF's key if there is one, neutral values.
_SETTINGS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "final_logit_softcapping": ("final_logit_softcapping", (0,)),
    "attn_logit_softcapping": ("attn_logit_softcapping", (0,)),
    "query_pre_attn_scalar": ("attention.scale", ()),
    "attention_multiplier": ("attention.scale", ()),
    "logit_scale": ("logit_scale", (1,)),
    "logits_scaling": ("logit_scale", (1,)),
    "embedding_multiplier": ("embedding_scale", (1,)),
    "residual_multiplier": ("residual_scale", (1,)),
    "scale_emb": ("embedding_scale", (1,)),
    "scale_depth": ("residual_scale", ()),
    "clip_qkv": ("attention.clamp_kqv", (0,)),
    "alibi": ("attention.max_alibi_bias", (0,)),
}


def refuse_unread(file: WeightFile) -> None:
    """Refuses a file that asks for arithmetic which its architecture, once built, has not read."""
    arch = file.get_str("general.architecture")
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or key in file.asked or name in _HARMLESS:
            continue
        neutral = next((values for word, values in _ARITHMETIC.items() if word in name), None)
        if neutral is None or _is(value, *neutral, *([_YARN[name]] if name in _YARN else [])):
            continue
        if name == "attention.scale" and _is_usual_scale(file, arch, value):
            continue
        raise ModelError(
            f"{file.path}: {quote(key)} is {quote(str(value))}, which Quire's {arch} does not "
            "compute with, so its output would be wrong"
        )


def refuse_unused(config: HFConfig, naming: Naming) -> None:
    """The same for a folder, whose settings are many: of those that are known to matter."""
    arch = naming.metadata["general.architecture"]
    inner = config.values.get("text_config")
    for values in (config.values, inner if isinstance(inner, dict) else {}):
        for key, (twin, neutral) in _SETTINGS.items():
            value = values.get(key)
            if value is None or f"{arch}.{twin}" in naming.metadata or _is(value, *neutral):
                continue
            raise ModelError(
                f"{config.path}: {quote(key)} is {quote(str(value))}, which Quire's {arch} does "
                "not compute with, so its output would be wrong"
            )


def _is(value: Value | Any, *neutral: Any) -> bool:
    """Whether a value, or every entry of an array, is one of these."""
    if isinstance(value, np.ndarray):
        return all(entry in neutral for entry in value.tolist())
    return value in neutral if isinstance(value, (bool, int, float, str)) else False


def _is_usual_scale(file: WeightFile, arch: str, value: Value) -> bool:
    """Whether the scores are scaled as they are without a word about it: by a head's size."""
    heads = file.get_int(f"{arch}.attention.head_count", default=0)
    width = file.get_int(f"{arch}.embedding_length", default=0)
    size = file.get_int(f"{arch}.attention.key_length", default=width // heads if heads else 0)
    return isinstance(value, float) and size > 0 and abs(value * size**0.5 - 1) < 1e-4
