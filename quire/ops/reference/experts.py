"""What a mixture of experts means, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.ops.reference.matrices import Floats, linear, rms_norm, silu


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
    chosen, weights, middle = experts_in(
        x, router, gate_up, n_used, norm, eps, normalize, scale, exact
    )
    return experts_out(middle, chosen, weights, down, into, exact)


def experts_in(
    x: Floats,
    router: Floats,
    gate_up: Floats,
    n_used: int,
    norm: Floats,
    eps: float,
    normalize: bool,
    scale: float,
    exact: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.float64], Floats]:
    """Who is chosen for each row, with which weight, and silu(gate) · up of each, row by row."""
    h = rms_norm(x, norm, eps)
    logits = linear(h, router, exact=True)
    chosen, weights = choose_experts(logits, n_used, normalize, scale)
    middle = np.empty((len(x) * n_used, gate_up.shape[1] // 2), np.float32)
    for i, expert in enumerate(chosen.ravel()):
        token = i // n_used
        gate, up = np.split(linear(h[token : token + 1], gate_up[expert], exact=exact)[0], 2)
        middle[i] = silu(gate) * up
    return chosen, weights, middle


def experts_out(
    middle: Floats, chosen: NDArray[np.int64], weights: NDArray[np.float64], down: Floats,
    into: Floats, exact: bool = False,
) -> Floats:  # fmt: skip
    """into + Σ weight · down(middle)."""
    out = into.astype(np.float64)
    for i, (expert, share) in enumerate(zip(chosen.ravel(), weights.ravel(), strict=True)):
        y = linear(middle[i : i + 1], down[expert], exact=exact)
        out[i // chosen.shape[1]] += share * y[0].astype(np.float64)
    return out.astype(np.float32)


def add_gated(into: Floats, y: Floats, gate: Floats) -> Floats:
    """into + sigmoid(gate) · y, with one gate for each row."""
    return into + y * (1 / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32)
