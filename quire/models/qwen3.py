"""Qwen3 (dense): q and k are normed per head before the halves of a head are rotated."""

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
    c = DenseSizes.read(file, "qwen3")
    windows = Windows.read(file, "qwen3", c.n_layers)

    def attention(i: int) -> Attention:
        return Attention(kit, c, i, c.rope, window=windows.of(i), qk_norm=True)

    layers = [(attention(i), GatedNetwork(kit, c, i)) for i in range(c.n_layers)]
    return Decoder(kit, c, layers)


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    tensors = folder_names.ATTENTION | folder_names.QK_NORM | folder_names.FEED_FORWARD
    return folder_names.decoder(config, "qwen3", tensors, windows=folder_names.qwen_windows(config))
