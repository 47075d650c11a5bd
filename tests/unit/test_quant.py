"""Tensor types: sizes and values agree with the `gguf` package, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.weights.quant import DEQUANTIZABLE, GGMLType, dequantize, quantize_q4_0, quantize_q8_0

gguf = pytest.importorskip("gguf")

# Where the fp16 scales of each type lie in its block.
SCALES = {
    GGMLType.F16: [0],
    GGMLType.Q4_0: [0],
    GGMLType.Q4_1: [0, 2],
    GGMLType.Q5_0: [0],
    GGMLType.Q5_1: [0, 2],
    GGMLType.Q8_0: [0],
    GGMLType.Q2_K: [80, 82],
    GGMLType.Q3_K: [108],
    GGMLType.Q4_K: [0, 2],
    GGMLType.Q5_K: [0, 2],
    GGMLType.Q6_K: [208],
    GGMLType.IQ4_NL: [0],
    GGMLType.IQ4_XS: [0],
}
REQUIRED = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K"}
REQUIRED |= {"Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}


def oracle_type(type: GGMLType) -> Any:
    return gguf.GGMLQuantizationType(int(type))


def bits(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32)


def random_blocks(type: GGMLType, count: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes with finite fp16 scales, subnormal and zero ones among them."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, type.type_size), dtype=np.uint8)
    for at in SCALES.get(type, []):
        scales = rng.integers(0, 0x7C00, (count, 1), dtype=np.uint16)
        scales |= rng.integers(0, 2, (count, 1), dtype=np.uint16) << 15
        scales[0] = 0
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks


def test_numbers_and_sizes_are_those_of_ggml() -> None:
    theirs = {
        type.name: (int(type), *gguf.GGML_QUANT_SIZES[type]) for type in gguf.GGML_QUANT_SIZES
    }
    ours = {type.name: (int(type), type.block_size, type.type_size) for type in GGMLType}
    assert {name: theirs.get(name) for name in ours} == ours
    assert {type.name for type in DEQUANTIZABLE} >= REQUIRED


@pytest.mark.parametrize("type", sorted(DEQUANTIZABLE), ids=lambda type: type.name)
@pytest.mark.parametrize("rows,blocks_per_row", [(1, 1), (3, 5), (7, 301)])
def test_dequantize_equals_gguf(type: GGMLType, rows: int, blocks_per_row: int) -> None:
    raw = random_blocks(type, rows * blocks_per_row, seed=int(type)).reshape(rows, -1)
    shape = (rows, blocks_per_row * type.block_size)
    values = dequantize(raw.reshape(-1), type, shape)
    expected = gguf.quants.dequantize(raw, oracle_type(type))
    assert values.shape == shape and values.dtype == np.float32
    np.testing.assert_array_equal(bits(values), bits(expected))


@pytest.mark.parametrize("type", sorted(DEQUANTIZABLE), ids=lambda type: type.name)
def test_dequantize_reads_unaligned_read_only_views_and_copies(type: GGMLType) -> None:
    raw = random_blocks(type, 4, seed=1).reshape(-1)
    shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
    shifted.flags.writeable = False
    shape = (2, 2, type.block_size)
    values = dequantize(shifted, type, shape)
    np.testing.assert_array_equal(bits(values), bits(dequantize(raw, type, shape)))
    assert values.flags.writeable and not np.shares_memory(values, shifted)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("type", sorted(DEQUANTIZABLE), ids=lambda type: type.name)
def test_any_bytes_give_values_without_warnings(type: GGMLType) -> None:
    raw = np.full(type.type_size * 3, 0xFF, dtype=np.uint8)
    assert dequantize(raw, type, (3, type.block_size)).shape == (3, type.block_size)


def test_a_type_that_cannot_be_computed_is_named() -> None:
    with pytest.raises(ModelError, match=r"IQ2_XS.*Q4_K"):
        dequantize(np.zeros(74, np.uint8), GGMLType.IQ2_XS, (256,))


def awkward_weights() -> NDArray[np.float32]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((600, 160)) * rng.lognormal(0, 3, (600, 1))
    x[0] = 0
    x[1] = -0.0
    x[2, ::2] = 127.0  # with this maximum the scale is 1 and the halves below are exact ties
    x[2, 1::2] = np.arange(80) - 40.5
    x[3] = -8.0
    x[3, 1:] = np.arange(159) % 16 - 7.5
    x[4] = 1e-6  # a scale that fp16 holds only as a subnormal
    x[5] = 65504.0
    return x.astype(np.float32)


@pytest.mark.parametrize("quantize,name", [(quantize_q8_0, "Q8_0"), (quantize_q4_0, "Q4_0")])
def test_quantize_equals_gguf(quantize: Any, name: str) -> None:
    x = awkward_weights()
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(quantize(x), expected)


@pytest.mark.parametrize(
    "quantize,type,steps,error",
    [(quantize_q8_0, GGMLType.Q8_0, 127, 0.5), (quantize_q4_0, GGMLType.Q4_0, 8, 1.0)],
)
def test_quantized_weights_come_back_close(
    quantize: Any, type: GGMLType, steps: int, error: float
) -> None:
    x = np.random.default_rng(3).standard_normal((5, 7, 64)).astype(np.float32)
    packed = quantize(x)
    assert packed.shape == (5, 7, 2 * type.type_size)
    back = dequantize(packed.reshape(-1), type, x.shape)
    largest = np.abs(x.reshape(5, 7, 2, 32)).max(axis=-1, keepdims=True)
    limit = error / steps + 2.0**-11  # in parts of the largest weight; its scale is an fp16
    assert (np.abs(back - x).reshape(5, 7, 2, 32) <= 1.0001 * limit * largest).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quantize", [quantize_q8_0, quantize_q4_0])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_weights_that_do_not_fit_are_refused(quantize: Any, value: float) -> None:
    x = np.ones((2, 32), np.float32)
    x[1, 5] = value
    with pytest.raises(ModelError, match="NaN or too large"):
        quantize(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quantize", [quantize_q8_0, quantize_q4_0])
def test_tiny_weights_become_zero(quantize: Any) -> None:
    x = np.full((1, 32), 1e-42, np.float32)  # so small that one over the scale is infinite
    type = GGMLType.Q8_0 if quantize is quantize_q8_0 else GGMLType.Q4_0
    assert not dequantize(quantize(x).reshape(-1), type, x.shape).any()


@pytest.mark.parametrize("quantize", [quantize_q8_0, quantize_q4_0])
def test_rows_must_be_whole_blocks(quantize: Any) -> None:
    with pytest.raises(ModelError, match=r"multiple of 32.*\(2, 33\)"):
        quantize(np.zeros((2, 33), np.float32))
