"""Qwen2 and Qwen2.5: biases on q, k and v; halves of a head are rotated against each other."""

from __future__ import annotations

from quire.models import folder_names
from quire.models.decoder import Decoder
from quire.models.layers import Attention, GatedNetwork
from quire.models.loader import Kit
from quire.models.sizes import DenseSizes
from quire.models.windows import Windows
from quire.weights.file import WeightFile
from quire.weights.naming import HFConfig, Naming


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit."""
    c = DenseSizes.read(file, "qwen2")
    windows = Windows.read(file, "qwen2", c.n_layers)

    def attention(i: int) -> Attention:
        return Attention(kit, c, i, c.rope, window=windows.of(i), bias=True)

    layers = [(attention(i), GatedNetwork(kit, c, i)) for i in range(c.n_layers)]
    return Decoder(kit, c, layers)


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    tensors = folder_names.ATTENTION | folder_names.QKV_BIAS | folder_names.FEED_FORWARD
    return folder_names.decoder(config, "qwen2", tensors, windows=folder_names.qwen_windows(config))
