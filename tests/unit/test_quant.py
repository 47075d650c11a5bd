"""Tensor types: sizes and values agree with the `gguf` package, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.weights.quant import DEQUANTIZABLE, GGMLType, dequantize
from quire.weights.quantize import quantize

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


BY_32 = [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0]
BY_256 = [GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K]


@pytest.mark.parametrize(
    "type", [*BY_32, GGMLType.F16, GGMLType.BF16, GGMLType.F32], ids=lambda type: type.name
)
def test_quantize_equals_gguf(type: GGMLType) -> None:
    x = awkward_weights()
    expected = gguf.quants.quantize(x, oracle_type(type)).view(np.uint8)
    np.testing.assert_array_equal(quantize(x, type), expected.reshape(len(x), -1))


@pytest.mark.parametrize("type", BY_32, ids=lambda type: type.name)
def test_quantized_weights_come_back_close(type: GGMLType) -> None:
    """No weight is further off than half a step, or one where the top level is cut."""
    x = np.random.default_rng(3).standard_normal((5, 7, 64)).astype(np.float32)
    packed = quantize(x, type)
    assert packed.shape == (5, 7, 2 * type.type_size)
    off = np.abs(dequantize(packed.reshape(-1), type, x.shape) - x).reshape(5, 7, 2, 32)
    parts = x.reshape(5, 7, 2, 32)
    steps = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 127, "Q4_1": 15, "Q5_1": 31}[type.name]
    span = np.ptp(parts, axis=-1, keepdims=True) if type.name.endswith("_1") else (
        np.abs(parts).max(axis=-1, keepdims=True))  # fmt: skip
    half = 1.0 if type.name in ("Q4_0", "Q5_0") else 0.5
    limit = (half / steps + 2.0**-10) * span  # scales and minima are fp16
    assert (off <= limit + 2.0**-10 * np.abs(parts).max()).all()


def error(x: NDArray[np.float32], type: GGMLType) -> float:
    back = dequantize(quantize(x, type).reshape(-1), type, x.shape)
    return float(np.sqrt(np.square(back - x).sum() / np.square(x).sum()))


def plain_k(x: NDArray[np.float32], top: int) -> float:
    """The error with the least and the largest weight of each 32 at the ends, scales of 6 bits."""
    parts = x.reshape(-1, 8, 32).astype(np.float64)
    least = np.minimum(parts.min(axis=-1), 0)
    scale = (parts.max(axis=-1) - least) / top
    scale = (
        np.rint(scale / scale.max(axis=1, keepdims=True) * 63)
        * scale.max(axis=1, keepdims=True)
        / 63
    )
    lowest = np.maximum(-least.min(axis=1, keepdims=True), 1e-30)
    least = -np.rint(-least / lowest * 63) * lowest / 63
    level = np.clip(np.rint((parts - least[..., None]) / scale[..., None]), 0, top)
    back = (level * scale[..., None] + least[..., None]).reshape(x.shape)
    return float(np.sqrt(np.square(back - x).sum() / np.square(x).sum()))


def plain_six(x: NDArray[np.float32]) -> float:
    """The error of 6 bits with the largest magnitude of each 16 at an end."""
    parts = x.reshape(-1, 16, 16).astype(np.float64)
    scale = np.abs(parts).max(axis=-1) / 31
    top = scale.max(axis=1, keepdims=True)
    scale = np.rint(scale / top * 127) * top / 127
    back = np.clip(np.rint(parts / scale[..., None]), -32, 31) * scale[..., None]
    return float(np.sqrt(np.square(back.reshape(x.shape) - x).sum() / np.square(x).sum()))


@pytest.mark.parametrize("spread", ["normal", "heavy", "positive", "outliers"])
@pytest.mark.parametrize("type", BY_256, ids=lambda type: type.name)
def test_blocks_of_256_lose_less_than_plain_rounding(type: GGMLType, spread: str) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((64, 512))
    if spread == "heavy":
        x = rng.standard_t(4, (64, 512))
    elif spread == "positive":
        x = np.abs(x)
    elif spread == "outliers":
        x[:, ::97] *= 20
    x = (x * 0.02).astype(np.float32)
    plain = (
        plain_six(x) if type == GGMLType.Q6_K else plain_k(x, {"Q4_K": 15, "Q5_K": 31}[type.name])
    )
    assert error(x, type) < 0.99 * plain


def test_more_bits_lose_less() -> None:
    x = np.random.default_rng(6).standard_normal((32, 1024)).astype(np.float32)
    order = ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "BF16", "F16", "F32"]
    errors = [error(x, GGMLType[name]) for name in order]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0 and errors[0] < 0.1


@pytest.mark.parametrize("type", BY_256, ids=lambda type: type.name)
def test_what_a_block_holds_exactly_stays(type: GGMLType) -> None:
    """Weights that are levels of scales a block can have; nothing, and one value, too."""
    rng = np.random.default_rng(8)
    top = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 31}[type.name]
    levels = rng.integers(0, top + 1, (6, 512)) - (32 if type == GGMLType.Q6_K else 0)
    levels[:, ::16] = top if type != GGMLType.Q6_K else -32
    levels[:, 1::16] = 0
    x = (levels * 0.25).astype(np.float32)
    x[4], x[5] = 0, 0.5
    assert error(x, type) < 2e-3
    assert not dequantize(quantize(x[4:5], type).reshape(-1), type, (1, 512)).any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("type", [*BY_32, *BY_256, GGMLType.F16], ids=lambda type: type.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_weights_that_do_not_fit_are_refused(type: GGMLType, value: float) -> None:
    x = np.ones((2, 256), np.float32)
    x[1, 5] = value
    with pytest.raises(ModelError, match="NaN or too large"):
        quantize(x, type)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("type", [*BY_32, *BY_256], ids=lambda type: type.name)
def test_tiny_weights_become_zero(type: GGMLType) -> None:
    x = np.full((1, 256), 1e-42, np.float32)  # so small that one over the scale is infinite
    assert not dequantize(quantize(x, type).reshape(-1), type, x.shape).any()


@pytest.mark.parametrize("type", [*BY_32, *BY_256], ids=lambda type: type.name)
def test_rows_must_be_whole_blocks(type: GGMLType) -> None:
    with pytest.raises(ModelError, match=rf"multiple of {type.block_size}.*\(2, 33\)"):
        quantize(np.zeros((2, 33), np.float32), type)
