"""Qwen3 (dense): q and k are normed per head before the halves of a head are rotated."""

from __future__ import annotations

from quire.models.dense import DenseConfig, DenseModel
from quire.models.loader import Loader
from quire.ops import Ops
from quire.weights.gguf import GGUF


def build(file: GGUF, load: Loader, ops: Ops, type_k: str, type_v: str) -> DenseModel:
    """The model, its tensors taken through `load`."""
    config = DenseConfig.read(file, "qwen3", neox=True)
    return DenseModel(config, load, ops, type_k, type_v, qk_norm=True)
