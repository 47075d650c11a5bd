"""Mamba-2: recurrent layers and nothing else, so a context costs the same however long it is.

A layer is in(norm(x)) → [z | x B C | dt], the recurrence over all but z, a norm gated by z, out.
"""

from __future__ import annotations

import math

import numpy as np

from quire.errors import ModelError
from quire.models import folder_names
from quire.models.decoder import Decoder
from quire.models.loader import Kit
from quire.models.recurrent_layers import Ssd, SsdShape
from quire.models.sizes import MOST, Sizes
from quire.weights.file import REQUIRED, Required, WeightFile
from quire.weights.gguf_format import Value
from quire.weights.naming import SQUEEZE_CONV, Change, HFConfig, Naming, one

_CONTEXT = 2**20  # there is no limit; converters write this


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit; it has no keys and values."""
    c, shape = Sizes.read(file, "mamba2"), _shape(file)
    return Decoder(kit, c, [(Ssd(kit, c, i, shape), None) for i in range(c.n_layers)])


def _shape(file: WeightFile) -> SsdShape:
    """The sizes a file gives, each within reason."""

    def count(key: str, most: int = MOST, default: int | Required = REQUIRED) -> int:
        return file.get_int(f"mamba2.ssm.{key}", default=default, minimum=1, maximum=most)

    inner, heads = count("inner_size"), count("time_step_rank")
    groups = count("group_count", default=1)
    if inner % heads or heads % groups:
        raise ModelError(
            f"{file.path}: {inner} columns in {heads} heads of {groups} groups; each number "
            "must divide the one before"
        )
    return SsdShape(
        inner=inner,
        n_heads=heads,
        n_groups=groups,
        state_dim=count("state_size"),
        taps=count("conv_kernel", 1024),
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
        "mamba2.block_count": folder_names.layers(config),
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
    for i in range(folder_names.layers(config)):
        for name, (stored, change) in _LAYER.items():
            tensors[f"blk.{i}.{name}"] = one(f"backbone.layers.{i}.{stored}", change)
    return Naming(facts | _limits(config), tensors, ignored=folder_names.not_needed(tied))


def _limits(config: HFConfig) -> dict[str, Value]:
    """Limits of the time step, where there are any, under keys of Quire's own: GGUF has none.

    Infinity has several spellings in JSON.
    """
    found = config.values.get("time_step_limit") or [0.0, math.inf]
    infinite = (math.inf, "Infinity", {"__float__": "Infinity"})
    limits = [math.inf if x in infinite else x for x in found] if isinstance(found, list) else []
    known = [type(x) is float or (type(x) is int and x < MOST) for x in limits]
    if known != [True, True] or not 0 <= limits[0] < limits[1]:
        config.refuse("time_step_limit", "must be two numbers from 0 on, the smaller one first")
    low, high = map(float, limits)
    facts = {"mamba2.ssm.time_step_min": low, "mamba2.ssm.time_step_max": high}
    return {key: value for key, value in facts.items() if 0 < value < math.inf}
