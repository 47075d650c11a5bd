"""Qwen2 and Qwen2.5: biases on q, k and v; halves of a head are rotated against each other."""

from __future__ import annotations

from quire.models.dense import DenseConfig, DenseModel
from quire.models.loader import Loader
from quire.ops import Ops
from quire.weights.gguf import GGUF


def build(file: GGUF, load: Loader, ops: Ops, type_k: str, type_v: str) -> DenseModel:
    """The model, its tensors taken through `load`."""
    config = DenseConfig.read(file, "qwen2", neox=True)
    return DenseModel(config, load, ops, type_k, type_v, qkv_bias=True)
