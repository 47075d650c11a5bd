"""LFM2: short gated convolutions in most layers, full attention in the others.

Every layer ends in a gated network. A convolution remembers the last few inputs of each channel,
one less than it is wide, so only attention needs more memory as a context grows.
"""

from __future__ import annotations

import numpy as np

from quire.errors import ModelError
from quire.models import folder_names
from quire.models.decoder import Decoder
from quire.models.layers import Attention, GatedNetwork, Mixer
from quire.models.loader import Kit
from quire.models.recurrent_layers import ShortConv
from quire.models.sizes import MAX_LAYERS, DenseSizes
from quire.weights.file import WeightFile
from quire.weights.naming import SQUEEZE_CONV, HFConfig, Naming, one


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit."""
    if file.get_int("lfm2.attention.sliding_window", default=0):
        raise ModelError(f"{file.path}: lfm2.attention.sliding_window is not known to Quire")
    kv_heads = _kv_heads(file)
    c = DenseSizes.read(file, "lfm2", kv_heads=max(1, *kv_heads))
    taps = file.get_int("lfm2.shortconv.l_cache", minimum=1, maximum=1024)

    def mixer(i: int) -> Mixer:
        if not kv_heads[i]:
            return ShortConv(kit, c, i, taps)
        return Attention(kit, c, i, c.rope, qk_norm=True)

    layers = [(mixer(i), GatedNetwork(kit, c, i)) for i in range(c.n_layers)]
    usual = "output_norm.weight"
    final_norm = usual if kit.load.has(usual) else _FINAL_NORM
    return Decoder(kit, c, layers, final_norm=final_norm)


def _kv_heads(file: WeightFile) -> list[int]:
    """Key/value heads of each layer; 0 stands for a convolution."""
    key = "lfm2.attention.head_count_kv"
    n_layers = file.get_int("lfm2.block_count", minimum=1, maximum=MAX_LAYERS)
    found = file.metadata.get(key)
    if not isinstance(found, np.ndarray):
        return [file.get_int(key, minimum=1, maximum=4096)] * n_layers
    if len(found) != n_layers or found.dtype.kind not in "iu":
        raise ModelError(f"{file.path}: {key} must be a whole number for each of {n_layers} layers")
    counts: list[int] = found.tolist()
    if min(counts) < 0 or max(counts) > 4096 or len(set(counts) - {0}) > 1:
        raise ModelError(f"{file.path}: {key} is {counts}; all that are not 0 must be alike")
    return counts


_FINAL_NORM = "token_embd_norm.weight"  # converters call it so, although it comes at the end
_LAYER = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
}
_ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
}
_CONV = {
    f"shortconv.{name}.{what}": f"conv.{name}.{what}"
    for name in ("conv", "in_proj", "out_proj")
    for what in ("weight", "bias")
}


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file; the first folders spell some settings otherwise."""
    usual = {
        "intermediate_size": _network_width(config),
        "rms_norm_eps": config.number("norm_eps", default=1e-5),
    }
    attends = _attends(config)
    facts = folder_names.metadata(HFConfig(config.path, {**config.values, **usual}), "lfm2")
    kv_heads = config.whole("num_key_value_heads")
    facts["lfm2.attention.head_count_kv"] = np.where(attends, kv_heads, 0).astype(np.int32)
    facts["lfm2.shortconv.l_cache"] = config.whole("conv_L_cache", default=3)
    keys, made = folder_names.rope_of(config, "lfm2", 1e6)
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", default=True))
    tensors = {
        "token_embd.weight": one("model.embed_tokens.weight"),
        _FINAL_NORM: one("model.embedding_norm.weight"),
    }
    if not tied:
        tensors["output.weight"] = one("lm_head.weight")
    for i, attention in enumerate(attends):
        for name, stored in (_LAYER | (_ATTENTION if attention else _CONV)).items():
            change = SQUEEZE_CONV if name == "shortconv.conv.weight" else None
            tensors[f"blk.{i}.{name}"] = one(f"model.layers.{i}.{stored}", change)
    return Naming(facts | keys, tensors, made, folder_names.not_needed(tied))


def _attends(config: HFConfig) -> list[bool]:
    """Which layers have attention: by a name for each, by their numbers, or all."""
    n_layers = folder_names.layers(config)
    if "layer_types" in config:
        types = config.strings("layer_types")
        if len(types) != n_layers or set(types) - {"full_attention", "conv"}:
            config.refuse("layer_types", "each layer must be full_attention or conv")
        return [kind == "full_attention" for kind in types]
    numbers = config.values.get("full_attn_idxs")
    if numbers is None:
        return [True] * n_layers
    if not isinstance(numbers, list) or not set(map(type, numbers)) <= {int}:
        config.refuse("full_attn_idxs", "must be a list of layers")
    return [i in numbers for i in range(n_layers)]


def _network_width(config: HFConfig) -> int:
    """Two thirds of what is given, rounded up, unless the width is meant as it stands."""
    key = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    width = config.whole(key)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = config.whole("block_multiple_of", default=256)
    scaled = config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3)
    return -(-int(scaled) // multiple) * multiple
