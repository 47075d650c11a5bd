"""Llama and its kin (SmolLM2, Mistral, TinyLlama): plain heads, rotated in neighbouring pairs.

GGUF files have the rows of q and k permuted so that the pairs lie side by side.
"""

from __future__ import annotations

from quire.models.dense import DenseConfig, DenseModel
from quire.models.loader import Loader
from quire.ops import Ops
from quire.weights.gguf import GGUF


def build(file: GGUF, load: Loader, ops: Ops, type_k: str, type_v: str) -> DenseModel:
    """The model, its tensors taken through `load`."""
    return DenseModel(DenseConfig.read(file, "llama", neox=False), load, ops, type_k, type_v)
