"""Qwen3.5 with experts (text): Qwen3.5 under another name, since its networks tell themselves."""

from __future__ import annotations

from quire.models import qwen35
from quire.models.delta_hybrid import DeltaHybridModel
from quire.models.loader import Loader
from quire.ops import Ops
from quire.weights.file import WeightFile
from quire.weights.naming import HFConfig, Naming


def build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> DeltaHybridModel:
    """The model, its tensors taken through `load`."""
    return qwen35.build(file, load, ops, type_k, type_v, "qwen35moe")


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    return qwen35.from_hf(config, "qwen35moe")
