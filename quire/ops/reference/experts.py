"""What a mixture of experts means, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.ops import SILU_MUL
from quire.ops.reference.matrices import Floats, linear, rms_norm


def choose_experts(
    logits: Floats, n_used: int, normalize: bool, scale: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The likeliest experts of each row (of equals the lower number), and their weights."""
    x = logits.astype(np.float64)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(p, chosen, -1)
    if normalize:
        weights /= weights.sum(-1, keepdims=True)
    return chosen, weights * scale


def experts(
    x: Floats,
    router: Floats,
    gate_up: Floats,
    down: Floats,
    n_used: int,
    norm: Floats,
    eps: float,
    normalize: bool,
    scale: float,
    into: Floats,
    exact: bool = False,
) -> Floats:
    """into + Σ weight · expert(rms_norm(x)); gate_up is [experts, 2 · ffn, width].

    down is [experts, width, ffn]. The router sees float32, the experts int8 unless exact.
    """
    h = rms_norm(x, norm, eps)
    logits = linear(h, router, exact=True)
    chosen, weights = choose_experts(logits, n_used, normalize, scale)
    out = into.astype(np.float64)
    for token, (ids, shares) in enumerate(zip(chosen, weights, strict=True)):
        row = h[token : token + 1]
        for expert, share in zip(ids, shares, strict=True):
            middle = linear(row, gate_up[expert], exact=exact)
            y = linear(middle, down[expert], act=SILU_MUL, exact=exact)
            out[token] += share * y[0].astype(np.float64)
    return out.astype(np.float32)


def add_gated(into: Floats, y: Floats, gate: Floats) -> Floats:
    """into + sigmoid(gate) · y, with one gate for each row."""
    return into + y * (1 / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32)
