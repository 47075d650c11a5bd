"""Qwen3.5 with experts (text): Qwen3.5 under another name, since its networks tell themselves."""

from __future__ import annotations

from quire.models import qwen35
from quire.models.decoder import Decoder
from quire.models.loader import Kit
from quire.weights.file import WeightFile
from quire.weights.naming import HFConfig, Naming


def build(file: WeightFile, kit: Kit) -> Decoder:
    """The model, its tensors taken through the kit."""
    return qwen35.build(file, kit, "qwen35moe")


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    return qwen35.from_hf(config, "qwen35moe")
