"""The product that ends a model: nearer to exact than int8, and the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest

from quire.ops import _cpu
from quire.ops.reference import matrices as reference
from quire.weights.quant import GGMLType, dequantize
from quire.weights.quantize import quantize


@pytest.mark.parametrize("cols", [32, 96, 576])
def test_fine_is_exact_to_sixteen_bits(isa: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    values = rng.standard_normal((100, cols), np.float32)
    raw = quantize(values, GGMLType.Q8_0).reshape(-1)
    w = dequantize(raw, GGMLType.Q8_0, (100, cols)).astype(np.float64)
    x = (rng.standard_normal((9, cols)) * np.exp(rng.standard_normal(cols) * 2)).astype(np.float32)
    norm = (1 + rng.standard_normal(cols) / 4).astype(np.float32)
    h = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * norm
    expected = h @ w.T
    cpu = _cpu.Cpu(2, isa)
    packed = cpu.pack([(int(GGMLType.Q8_0), 100, cols, raw)])
    xs, weight = cpu.array(x), cpu.array(norm[None])
    fine = cpu.linear_int16(xs, packed, weight, 1e-5).numpy()
    coarse = cpu.linear(xs, packed, weight, 1e-5).numpy()
    plain = reference.linear_int16(x, w.astype(np.float32), norm, 1e-5)
    size = np.abs(expected).mean()
    assert np.abs(fine - plain).max() < 1e-4 * size
    assert np.abs(fine - expected).max() < 1e-3 * size
    assert np.abs(fine - expected).mean() < np.abs(coarse - expected).mean() / 50
    for i in range(9):
        alone = cpu.linear_int16(cpu.array(x[i : i + 1]), packed, weight, 1e-5).numpy()
        assert np.array_equal(alone[0], fine[i])


def test_exact_and_dense_products_stay_what_they_are() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((40, 64), np.float32)
    cpu = _cpu.Cpu(2, "portable")
    x, norm = cpu.array(rng.standard_normal((3, 64), np.float32)), cpu.array(np.ones((1, 64), "f4"))
    packed = cpu.pack([(int(GGMLType.F32), 40, 64, np.frombuffer(w.tobytes(), np.uint8))])
    fine = cpu.linear_int16(x, packed, norm, 1e-5).numpy()
    assert np.array_equal(fine, cpu.linear(x, packed, norm, 1e-5).numpy())
