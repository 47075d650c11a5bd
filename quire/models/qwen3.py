"""Qwen3 (dense): q and k are normed per head before the halves of a head are rotated."""

from __future__ import annotations

from quire.models import hf
from quire.models.dense import DenseConfig, DenseModel
from quire.models.loader import Loader
from quire.models.windows import Windows
from quire.ops import Ops
from quire.weights.file import WeightFile
from quire.weights.naming import HFConfig, Naming


def build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> DenseModel:
    """The model, its tensors taken through `load`."""
    config = DenseConfig.read(file, "qwen3", neox=True)
    windows = Windows.read(file, "qwen3", config.n_layers)
    return DenseModel(config, windows, load, ops, type_k, type_v, qk_norm=True)


def from_hf(config: HFConfig) -> Naming:
    """How a folder is seen as a GGUF file."""
    tensors = hf.ATTENTION | hf.QK_NORM | hf.FEED_FORWARD
    return hf.decoder(config, "qwen3", tensors, windows=hf.qwen_windows(config))
