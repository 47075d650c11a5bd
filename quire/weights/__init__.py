"""Model files: reading them, what their tensors mean, and where to get them."""

from __future__ import annotations

from quire.weights.gguf import GGUF, TensorInfo
from quire.weights.quant import GGMLType, dequantize

__all__ = ["GGUF", "GGMLType", "TensorInfo", "dequantize"]
