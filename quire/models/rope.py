"""Rotary frequencies, with every way of stretching them that files ask for."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.ops import Rope
from quire.weights.file import WeightFile
from quire.weights.quant import dequantize


def read_rope(file: WeightFile, arch: str, head_dim: int, neox: bool) -> Rope:
    """The rotary embedding that a file describes."""
    n_rot = file.get_int(
        f"{arch}.rope.dimension_count", default=head_dim, minimum=2, maximum=head_dim
    )
    base = file.get_float(f"{arch}.rope.freq_base", default=10000.0, minimum=1e-3)
    if n_rot % 2:
        raise ModelError(f"{file.path}: {arch}.rope.dimension_count is {n_rot}, should be even")
    freqs = frequencies(base, n_rot)
    if "rope_freqs.weight" in file.tensors:  # Llama 3: one divisor for each frequency
        freqs = freqs / _factors(file, n_rot)
    kind = file.get_str(f"{arch}.rope.scaling.type", default="none")
    factor = file.get_float(f"{arch}.rope.scaling.factor", default=1.0, minimum=1e-3)
    if kind == "none" or factor == 1.0:
        return Rope(n_rot, freqs, neox)
    if kind == "linear":
        return Rope(n_rot, freqs / factor, neox)
    if kind == "yarn":
        if base <= 1.0:
            raise ModelError(f"{file.path}: {arch}.rope.freq_base is {base}; yarn needs above 1")
        trained = file.get_int(f"{arch}.rope.scaling.original_context_length", minimum=1)
        attn = file.get_float(f"{arch}.rope.scaling.attn_factor", default=1.0)
        mscale = attn * (1.0 + 0.1 * math.log(factor))
        return Rope(n_rot, yarn(freqs, n_rot, base, factor, trained), neox, mscale)
    raise ModelError(
        f"{file.path}: {arch}.rope.scaling.type is {kind!r}; known are none, linear, yarn"
    )


def frequencies(base: float, n_rot: int) -> NDArray[np.float64]:
    """One for each pair of dimensions, from 1 down to almost 1/base."""
    return base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def yarn(
    freqs: NDArray[np.float64], n_rot: int, base: float, factor: float, trained: int,
    beta_fast: float = 32.0, beta_slow: float = 1.0,
) -> NDArray[np.float64]:  # fmt: skip
    """Slow frequencies are stretched by `factor`, fast ones kept, those between blended."""

    def dim_of(turns: float) -> float:
        return n_rot * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of(beta_fast)), 0)
    high = min(math.ceil(dim_of(beta_slow)), n_rot - 1)
    ramp = (np.arange(n_rot // 2) - low) / max(high - low, 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    return freqs / factor * (1.0 - keep) + freqs * keep


def _factors(file: WeightFile, n_rot: int) -> NDArray[np.float64]:
    tensor = file.tensors["rope_freqs.weight"]
    if not file.whole:  # nothing will be computed
        return np.ones(n_rot // 2)
    factors = dequantize(file.data("rope_freqs.weight"), tensor.type, tensor.shape).astype(
        np.float64
    )
    if factors.shape != (n_rot // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
        raise ModelError(
            f"{file.path}: rope_freqs.weight must be {n_rot // 2} positive numbers, "
            f"it is {list(factors.shape)}"
        )
    return factors
