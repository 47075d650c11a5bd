"""Folders of Qwen3-Next and Qwen3.5 as GGUF files: what `delta_hybrid` is to files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.models import folder_names
from quire.models.delta_hybrid import (
    INTERVAL,
    MAX_COLUMNS,
    MAX_DIM,
    MAX_HEADS,
    MAX_TAPS,
    all_but_every,
)
from quire.models.recurrent_layers import DeltaShape
from quire.weights.gguf_format import Value
from quire.weights.naming import ADD_ONE, Change, HFConfig, Naming, Source, one

_TENSORS = folder_names.ATTENTION | folder_names.QK_NORM | {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}  # fmt: skip
_NETWORK = {
    name: stored for name, stored in folder_names.FEED_FORWARD.items() if name != "ffn_norm.weight"
}
_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
# The gated norm within a delta net is stored as it is, all others as their difference from one.
_NORMS = ("output_norm", "attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")
_EYES = ("model.visual.",)


def delta_shape(text: HFConfig) -> DeltaShape:
    """The sizes of the delta nets, each within reason."""

    def count(key: str, most: int) -> int:
        return text.whole(f"linear_{key}", maximum=most)

    n_k, n_v = count("num_key_heads", MAX_HEADS), count("num_value_heads", MAX_HEADS)
    dk, dv = count("key_head_dim", MAX_DIM), count("value_head_dim", MAX_DIM)
    if n_v % n_k or n_v * dv > MAX_COLUMNS:
        text.refuse(
            "linear_num_value_heads", f"must be a multiple of linear_num_key_heads, {n_k}, and "
            f"make at most {MAX_COLUMNS} columns with linear_value_head_dim, {dv}",
        )  # fmt: skip
    return DeltaShape(n_k, n_v, dk, dv, count("conv_kernel_dim", MAX_TAPS))


def naming(
    config: HFConfig, arch: str, inputs: dict[str, Source], changes: dict[str, Change]
) -> Naming:
    """A folder as GGUF would have it; `inputs` make q, k, v, z, b and a, in a layer's own names.

    Left out are the layers that guess tokens ahead (mtp.…) and the eyes (model.visual.…).
    """
    text = folder_names.text_settings(config)
    for key, usual in {"attn_output_gate": True, "attention_bias": False}.items():
        text.expect(key, usual, default=usual)
    text.expect("mlp_only_layers", [], default=[])
    text.expect("decoder_sparse_step", 1, default=1)
    count = folder_names.expert_count(text, default=0)
    facts = _delta_facts(text, arch) | (_expert_facts(text, arch, count) if count else {})
    if count:  # their folders may leave out the width of networks that no layer has
        width = text.whole("moe_intermediate_size")
        text = HFConfig(text.path, {"intermediate_size": width, **text.values})
    names = _TENSORS | (_EXPERTS if count else _NETWORK)
    changes = {f"{name}.weight": ADD_ONE for name in _NORMS} | changes
    plain = folder_names.decoder(text, arch, names, changes, rotated=0.25)
    more = {
        f"blk.{i}.{name}": one(f"model.layers.{i}.{source.names[0]}", source.change)
        for i in range(folder_names.layers(text))
        for name, source in inputs.items()
    }
    out = replace(
        plain, metadata=plain.metadata | facts, tensors=plain.tensors | more, left_out=("mtp.",)
    )
    if count:
        out = _with_experts(out, text, count)
    return (
        folder_names.inside(out, "model.language_model.", _EYES) if "text_config" in config else out
    )


def _delta_facts(text: HFConfig, arch: str) -> dict[str, Value]:
    shape = delta_shape(text)
    facts: dict[str, Value] = {
        f"{arch}.ssm.conv_kernel": shape.taps,
        f"{arch}.ssm.state_size": shape.dk,
        f"{arch}.ssm.group_count": shape.n_k,
        f"{arch}.ssm.time_step_rank": shape.n_v,
        f"{arch}.ssm.inner_size": shape.values,
    }
    interval = text.whole("full_attention_interval", default=INTERVAL)
    recurrent = _recurrent(text, all_but_every(interval, folder_names.layers(text)))
    if np.array_equal(recurrent, all_but_every(interval, len(recurrent))):
        return facts | {f"{arch}.full_attention_interval": interval}
    return facts | {f"{arch}.attention.recurrent_layers": recurrent}


def _recurrent(text: HFConfig, default: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which layers are delta nets, where the folder says it for each."""
    if "layer_types" not in text:
        return default
    types = text.strings("layer_types")
    if len(types) != len(default) or set(types) - {"linear_attention", "full_attention"}:
        text.refuse("layer_types", "each layer must be linear_attention or full_attention")
    return np.array([kind == "linear_attention" for kind in types])


def _expert_facts(text: HFConfig, arch: str, count: int) -> dict[str, Value]:
    shared = text.whole("shared_expert_intermediate_size")
    return {
        f"{arch}.expert_count": count,
        f"{arch}.expert_used_count": text.whole("num_experts_per_tok"),
        f"{arch}.expert_feed_forward_length": text.whole("moe_intermediate_size"),
        f"{arch}.expert_shared_feed_forward_length": shared,
        f"{arch}.expert_weights_norm": text.flag("norm_topk_prob", default=True),
    }


def _with_experts(plain: Naming, text: HFConfig, count: int) -> Naming:
    """Experts are stored one by one, or all of a layer in two tensors."""
    whole = {
        f"blk.{i}.ffn_{name}_exps.weight": one(f"model.layers.{i}.mlp.experts.{name}_proj")
        for i in range(folder_names.layers(text))
        for name in ("gate_up", "down")
    }
    stacks = folder_names.expert_stacks(text, count)
    return replace(plain, tensors=plain.tensors | stacks, otherwise=whole)
