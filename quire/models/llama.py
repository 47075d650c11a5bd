"""Llama and its kin (SmolLM2, Mistral, TinyLlama): plain heads, rotated in neighbouring pairs.

GGUF files have the rows of q and k permuted so that the pairs lie side by side.
"""

from __future__ import annotations

import numpy as np

from quire.models import folder_names
from quire.models.decoder import Decoder
from quire.models.layers import Attention, GatedNetwork
from quire.models.loader import Kit
from quire.models.sizes import DenseSizes
from quire.models.windows import Windows
from quire.weights.file import WeightFile
from quire.weights.naming import HFConfig, Naming, pair_up


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit."""
    c = DenseSizes.read(file, "llama", neox=False)
    windows = Windows.read(file, "llama", c.n_layers)

    def attention(i: int) -> Attention:
        return Attention(kit, c, i, c.rope, window=windows.of(i))

    layers = [(attention(i), GatedNetwork(kit, c, i)) for i in range(c.n_layers)]
    return Decoder(kit, c, layers)


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", default=heads)
    changes = {"attn_q.weight": pair_up(heads), "attn_k.weight": pair_up(kv_heads)}
    for section in (config, config.section("rope_parameters")):  # pairs are made of whole heads
        section.expect("partial_rotary_factor", 1.0, default=1.0)
    tensors = folder_names.ATTENTION | folder_names.FEED_FORWARD
    return folder_names.decoder(config, "llama", tensors, changes, windows=_windows(config))


def _windows(config: HFConfig) -> Windows:
    """All layers of Mistral may have a window; those of Llama never do, whatever a folder says."""
    names = config.strings("architectures", default=[]) or [config.text("model_type")]
    mistral = names[0].lower().startswith("mistral")
    return folder_names.windows_in(config, np.full(folder_names.layers(config), mistral))
