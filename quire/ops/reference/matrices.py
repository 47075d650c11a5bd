"""What products with weights, norms and activations mean, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.ops import SILU_MUL

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def silu(x: Floats) -> Floats:
    """x · sigmoid(x)."""
    y = x.astype(np.float64)
    return np.asarray(y / (1 + np.exp(-y)), np.float32)


def gelu(x: Floats) -> Floats:
    """The tanh approximation of gelu."""
    y = x.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)
    return np.asarray(0.5 * y * (1 + np.tanh(inner)), np.float32)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x divided by its root mean square over the last axis, times weight."""
    y = x.astype(np.float64)
    scale = 1 / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    return np.asarray(y * scale * weight, np.float32)


def add_norm(into: Floats, x: Floats, weight: Floats, eps: float) -> Floats:
    """What `into` holds afterwards."""
    return into + rms_norm(x, weight, eps)


def softcap(x: Floats, cap: float) -> Floats:
    """x held softly between -cap and cap."""
    return np.asarray(cap * np.tanh(x.astype(np.float64) / cap), np.float32)


def quantize_activations(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Rows as int8 in groups of 32 columns, and the scale of each group."""
    groups = np.ascontiguousarray(x, np.float32).reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        scale = np.where(top < 1e-30, np.float32(0), top / np.float32(127))
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    q = np.rint(groups * inverse[..., None]).astype(np.int8)
    return q.reshape(x.shape), scale


def linear(
    x: Floats,
    w: Floats,
    norm: Floats | None = None,
    eps: float = 0.0,
    act: int = 0,
    bias: Floats | None = None,
    into: Floats | None = None,
    exact: bool = False,
) -> Floats:
    """w · prologue(x) + bias (+ into); activations go through int8 unless exact."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if act:
        gate, up = np.split(x, 2, axis=-1)
        x = (silu if act == SILU_MUL else gelu)(gate) * up
    y = x.astype(np.float64)
    if not exact:
        q, scale = quantize_activations(x)
        y = q.astype(np.float64) * np.repeat(scale.astype(np.float64), 32, axis=-1)
    wide, out = w.astype(np.float64), np.empty((len(y), len(w)))
    for i, row in enumerate(y):  # rows of a product of many are not added up in the same order
        out[i] = wide @ row
    for term in (bias, into):
        if term is not None:
            out = out + term
    return out.astype(np.float32)


def linear_int16(x: Floats, w: Floats, norm: Floats, eps: float) -> Floats:
    """w · rms_norm(x) with 16 bits of each activation: int8, and int8 of what that loses."""
    h = rms_norm(x, norm, eps)
    q, scales = quantize_activations(h)
    groups = q.reshape(*scales.shape, -1) * scales[..., None]
    rest = (h - groups.reshape(h.shape)).astype(np.float32)
    return linear(h, w) + linear(rest, w)


def embed(table: Floats, ids: Ints, scale: float = 1.0) -> Floats:
    """Rows of a matrix by id, times scale."""
    return table[ids] * np.float32(scale)
