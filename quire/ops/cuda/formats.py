"""Weights as files hold them, turned into what the kernels multiply with.

    dense    row-major, in the file's own type: float32, float16, bfloat16
    int8     a byte per weight, and for each group a scale, and a minimum where the type has one
    int4     the same with four bits; in each unit of columns a byte has one of each half

A weight is level · scale + minimum, with scale and minimum in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Levels = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Levels [blocks, weights], scales [blocks, groups], minima of the same shape."""


@dataclass(frozen=True)
class Format:
    """How weights of a file's type are held."""

    bits: int
    """4, 8, or 0 for dense."""
    group: int = 32
    minimum: bool = False
    dtype: torch.dtype = torch.uint8
    """Of what is stored; of dense weights, the weights' own."""

    @property
    def multiply(self) -> torch.dtype:
        """The type that tensor cores multiply."""
        return torch.float16 if self.bits else self.dtype

    def unit(self, cols: int) -> int:
        """Columns whose two halves share bytes."""
        return 256 if cols % 256 == 0 else 64

    def row_bytes(self, cols: int) -> int:
        """Elements of a stored row."""
        if self.bits != 4:
            return cols
        unit = self.unit(cols)
        return -(-cols // unit) * unit // 2

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of so many rows."""
        if not self.bits:
            return rows * cols * int(self.dtype.itemsize)
        scales = cols // self.group * 2 * (1 + self.minimum)
        return rows * (self.row_bytes(cols) + scales)


INT8 = torch.int8
FORMATS: dict[int, Format] = {
    0: Format(0, dtype=torch.float32),  # F32
    1: Format(0, dtype=torch.float16),  # F16
    30: Format(0, dtype=torch.bfloat16),  # BF16
    2: Format(4, 32, True),  # Q4_0
    3: Format(4, 32, True),  # Q4_1
    6: Format(8, 32, False, INT8),  # Q5_0
    7: Format(8, 32, True, INT8),  # Q5_1
    8: Format(8, 32, False, INT8),  # Q8_0
    10: Format(4, 16, True),  # Q2_K
    11: Format(4, 16, True),  # Q3_K
    12: Format(4, 32, True),  # Q4_K
    13: Format(8, 32, True, INT8),  # Q5_K
    14: Format(8, 16, False, INT8),  # Q6_K
    20: Format(8, 32, False, INT8),  # IQ4_NL
    23: Format(8, 32, False, INT8),  # IQ4_XS
}
"""By ggml's number of a type."""
_DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dense(data: torch.Tensor, kind: int, rows: int, cols: int) -> torch.Tensor:
    """Rows of a dense type: a view of their bytes."""
    return data.view(_DENSE[kind]).view(rows, cols)


def levels(data: torch.Tensor, kind: int) -> Levels:
    """The levels, scales and minima of a part's blocks."""
    size, read = _READERS[kind]
    return read(data.view(-1, size))


def nibbles(level: torch.Tensor, unit: int) -> torch.Tensor:
    """Levels [rows, cols] as bytes: in each unit of columns, one of each half."""
    rows, cols = level.shape
    padded = -(-cols // unit) * unit
    if padded != cols:
        level = torch.nn.functional.pad(level, (0, padded - cols))
    halves = level.view(rows, padded // unit, 2, unit // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, padded // 2)


def from_nibbles(bytes: torch.Tensor, unit: int, cols: int) -> torch.Tensor:
    """The inverse of `nibbles`."""
    units = bytes.view(len(bytes), -1, unit // 2)
    return torch.cat([units & 15, units >> 4], 2).view(len(bytes), -1)[:, :cols]


# ---- the blocks of each type, as quire.weights.quant reads them -------------------------------


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(raw: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Bytes split into fields: each run of `width` bytes gives its lowest fields first."""
    shifts: Sequence[int] = range(0, 8, bits)
    runs = raw.reshape(len(raw), -1, 1, width)
    spread = torch.cat([runs >> shift for shift in shifts], 2)
    return (spread & ((1 << bits) - 1)).reshape(len(raw), -1)


def _signed(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int8)


def _q4_0(b: torch.Tensor) -> Levels:
    d = _half(b, 0)
    return _fields(b[:, 2:], 16, 4), d, -8 * d


def _q4_1(b: torch.Tensor) -> Levels:
    return _fields(b[:, 4:], 16, 4), _half(b, 0), _half(b, 2)


def _five(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    bits = torch.stack([high >> i & 1 for i in range(8)], 2).reshape(len(high), -1)
    return _fields(low, 16, 4) | bits << 4


def _q5_0(b: torch.Tensor) -> Levels:
    return _five(b[:, 6:], b[:, 2:6]).to(INT8) - 16, _half(b, 0), None


def _q5_1(b: torch.Tensor) -> Levels:
    return _five(b[:, 8:], b[:, 4:8]).to(INT8), _half(b, 0), _half(b, 2)


def _q8_0(b: torch.Tensor) -> Levels:
    return _signed(b[:, 2:]), _half(b, 0), None


def _q2_k(b: torch.Tensor) -> Levels:
    scales, minima = (b[:, :16] & 15).float(), (b[:, :16] >> 4).float()
    return _fields(b[:, 16:80], 32, 2), _half(b, 80) * scales, -_half(b, 82) * minima


def _q3_k(b: torch.Tensor) -> Levels:
    low, high = _fields(b[:, 96:104], 8, 4), _fields(b[:, 104:108], 4, 2)
    scales = _half(b, 108) * ((low | high << 4).to(INT8) - 32).float()
    level = _fields(b[:, 32:96], 32, 2) | _fields(b[:, :32], 32, 1) << 2
    return level, scales, -4 * scales


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    return scales.float(), minima.float()


def _q4_k(b: torch.Tensor) -> Levels:
    scales, minima = _k_scales(b[:, 4:16])
    return _fields(b[:, 16:], 32, 4), _half(b, 0) * scales, -_half(b, 2) * minima


def _q5_k(b: torch.Tensor) -> Levels:
    scales, minima = _k_scales(b[:, 4:16])
    level = _fields(b[:, 48:], 32, 4) | _fields(b[:, 16:48], 32, 1) << 4
    return level.to(INT8), _half(b, 0) * scales, -_half(b, 2) * minima


def _q6_k(b: torch.Tensor) -> Levels:
    level = _fields(b[:, :128], 64, 4) | _fields(b[:, 128:192], 32, 2) << 4
    return level.to(INT8) - 32, _half(b, 208) * _signed(b[:, 192:208]).float(), None


def _iq4(level: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_IQ4, dtype=INT8, device=level.device)
    return table[level.long()]


def _iq4_nl(b: torch.Tensor) -> Levels:
    return _iq4(_fields(b[:, 2:], 16, 4)), _half(b, 0), None


def _iq4_xs(b: torch.Tensor) -> Levels:
    low, high = _fields(b[:, 4:8], 1, 4), _fields(b[:, 2:4], 1, 2)
    scales = _half(b, 0) * ((low | high << 4).to(INT8) - 32).float()
    return _iq4(_fields(b[:, 8:], 16, 4)), scales, None


_READERS: dict[int, tuple[int, Callable[[torch.Tensor], Levels]]] = {
    2: (18, _q4_0), 3: (20, _q4_1), 6: (22, _q5_0), 7: (24, _q5_1), 8: (34, _q8_0),
    10: (84, _q2_k), 11: (110, _q3_k), 12: (144, _q4_k), 13: (176, _q5_k), 14: (210, _q6_k),
    20: (18, _iq4_nl), 23: (136, _iq4_xs),
}  # fmt: skip
"""Bytes of a block, and who reads it."""
