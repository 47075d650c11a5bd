"""The tensor types of GGUF files: their numbers, their sizes, and what they mean in float32.

The NumPy code here is the plain reading of each format. Kernels take the same type numbers and
are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError

__all__ = ["DEQUANTIZABLE", "GGMLType", "dequantize"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class GGMLType(IntEnum):
    """A tensor type, numbered as in ggml."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def block_size(self) -> int:
        """How many weights one block holds; a row is a whole number of blocks."""
        return _SIZES[self][0]

    @property
    def type_size(self) -> int:
        """How many bytes one block takes."""
        return _SIZES[self][1]

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of a tensor of this type; its last dimension must be whole blocks."""
        block, size = _SIZES[self]
        assert shape[-1] % block == 0, (self, shape)
        return prod(shape) // block * size


_SIZES: Final[dict[GGMLType, tuple[int, int]]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 40),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
}

# The sixteen levels that the four bits of IQ4_NL and IQ4_XS stand for.
_IQ4_LEVELS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
# Work on this many weights at a time, so that temporaries stay in the processor's cache.
_CHUNK: Final = 1 << 16


def dequantize(data: Bytes, type: GGMLType, shape: Sequence[int]) -> Floats:
    """The float32 values of a tensor's bytes, as a new array of the given shape."""
    expand = _EXPAND.get(type)
    if expand is None:
        known = ", ".join(sorted(kind.name for kind in DEQUANTIZABLE))
        raise ModelError(f"tensor type {type.name} cannot be computed with; Quire knows {known}")
    assert data.size == type.nbytes(shape), (data.size, type, shape)
    blocks = data.reshape(-1, type.type_size)
    out = np.empty((len(blocks), type.block_size), dtype=np.float32)
    step = _CHUNK // type.block_size
    # A damaged file may hold NaN or infinite scales: they come out as such, without warnings.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = expand(blocks[start : start + step])
    return out.reshape(shape)


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at byte `at` of every block, as a float32 column."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def _fields(raw: Bytes, width: int, bits: int) -> Bytes:
    """Split bytes into fields of `bits`: each run of `width` bytes gives its lowest fields first.

    This one pattern covers every packed format of ggml, weights and scales alike.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    spread = raw.reshape(len(raw), -1, 1, width) >> shifts
    return (spread & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)


def _scaled(scales: Floats, values: NDArray[np.generic], minima: Floats | None = None) -> Floats:
    """`scales * values - minima`, where each scale covers an equal share of a block's values."""
    parts = values.reshape(*scales.shape, -1).astype(np.float32)
    parts *= scales[..., None]
    if minima is not None:
        parts -= minima[..., None]
    return parts.reshape(len(values), -1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return _half(blocks, 0)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _fields(blocks[:, 2:], 16, 4).astype(np.int8) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _fields(blocks[:, 4:], 16, 4), -_half(blocks, 2))


def _five_bits(low: Bytes, high: Bytes) -> Bytes:
    """Nibbles joined with a fifth bit each, which Q5_0 and Q5_1 keep in one 32-bit word."""
    return _fields(low, 16, 4) | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Floats:
    values = _five_bits(blocks[:, 6:], blocks[:, 2:6]).astype(np.int8) - 16
    return _scaled(_half(blocks, 0), values)


def _q5_1(blocks: Bytes) -> Floats:
    values = _five_bits(blocks[:, 8:], blocks[:, 4:8])
    return _scaled(_half(blocks, 0), values, -_half(blocks, 2))


def _q8_0(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), blocks[:, 2:].view(np.int8))


def _q2_k(blocks: Bytes) -> Floats:
    scales, minima = blocks[:, :16] & 0x0F, blocks[:, :16] >> 4
    values = _fields(blocks[:, 16:80], 32, 2)
    return _scaled(_half(blocks, 80) * scales, values, _half(blocks, 82) * minima)


def _q3_k(blocks: Bytes) -> Floats:
    low, high = _fields(blocks[:, 96:104], 8, 4), _fields(blocks[:, 104:108], 4, 2)
    scales = (low | high << np.uint8(4)).astype(np.int8) - 32
    # The third bit is stored inverted: where it is clear, 4 is taken away.
    high_bits = _fields(blocks[:, :32], 32, 1) << np.uint8(2)
    values = (_fields(blocks[:, 32:96], 32, 2) | high_bits).astype(np.int8) - 4
    return _scaled(_half(blocks, 108) * scales, values)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit scales and eight 6-bit minima that Q4_K and Q5_K pack into 12 bytes."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.hstack([first & 0x3F, (rest & 0x0F) | (first >> 6 << 4)])
    minima = np.hstack([second & 0x3F, (rest >> 4) | (second >> 6 << 4)])
    return scales, minima


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _k_scales(blocks[:, 4:16])
    values = _fields(blocks[:, 16:], 32, 4)
    return _scaled(_half(blocks, 0) * scales, values, _half(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _k_scales(blocks[:, 4:16])
    values = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << np.uint8(4)
    return _scaled(_half(blocks, 0) * scales, values, _half(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Floats:
    values = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << np.uint8(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _scaled(scales, values.astype(np.int8) - 32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _scaled(_half(blocks, 0), _IQ4_LEVELS[_fields(blocks[:, 2:], 16, 4)])


def _iq4_xs(blocks: Bytes) -> Floats:
    low, high = _fields(blocks[:, 4:8], 1, 4), _fields(blocks[:, 2:4], 1, 2)
    scales = (low | high << np.uint8(4)).astype(np.int8) - 32
    return _scaled(_half(blocks, 0) * scales, _IQ4_LEVELS[_fields(blocks[:, 8:], 16, 4)])


_EXPAND: Final[dict[GGMLType, Callable[[Bytes], Floats]]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
}
DEQUANTIZABLE: Final = frozenset(_EXPAND)
