"""Llama and its kin (SmolLM2, Mistral, TinyLlama): plain heads, rotated in neighbouring pairs.

GGUF files have the rows of q and k permuted so that the pairs lie side by side.
"""

from __future__ import annotations

import numpy as np

from quire.models import hf
from quire.models.dense import DenseConfig, DenseModel
from quire.models.loader import Loader
from quire.models.windows import Windows
from quire.ops import Ops
from quire.weights.file import WeightFile
from quire.weights.naming import HFConfig, Naming, pair_up


def build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> DenseModel:
    """The model, its tensors taken through `load`."""
    config = DenseConfig.read(file, "llama", neox=False)
    windows = Windows.read(file, "llama", config.n_layers)
    return DenseModel(config, windows, load, ops, type_k, type_v)


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", default=heads)
    changes = {"attn_q.weight": pair_up(heads), "attn_k.weight": pair_up(kv_heads)}
    for section in (config, config.section("rope_parameters")):  # pairs are made of whole heads
        section.expect("partial_rotary_factor", 1.0, default=1.0)
    tensors = hf.ATTENTION | hf.FEED_FORWARD
    return hf.decoder(config, "llama", tensors, changes, windows=_windows(config))


def _windows(config: HFConfig) -> Windows:
    """All layers of Mistral may have a window; those of Llama never do, whatever a folder says."""
    names = config.strings("architectures", default=[]) or [config.text("model_type")]
    mistral = names[0].lower().startswith("mistral")
    return hf.windows_in(config, np.full(hf.layers(config), mistral))
