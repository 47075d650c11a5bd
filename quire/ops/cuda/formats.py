"""Weights as files hold them, turned into what the kernels multiply with.

    dense        row-major, in the file's own type: float32, float16, bfloat16
    quantised    units of 16 rows × 64 columns, along a tile of 16 rows, then tile by tile

A quantised weight is level · scale + minimum, scale and minimum in float16. A unit has its levels,
of four or eight bits, in the order in which the lanes of a warp hold the operand of `mma`: lane
(g, t) has rows g and g+8, columns 2t, 2t+1, 2t+8, 2t+9 of each 16. Then for each g come the scales
(and minima) of rows g and g+8, group by group. Rows and columns are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Levels = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Levels [blocks, weights], scales [blocks, groups], minima of the same shape."""
TILE, UNIT = 16, 64
"""Rows and columns of a unit."""


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

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit: levels, then scales and minima."""
        scales = TILE * (UNIT // self.group) * (1 + self.minimum) * 2
        return TILE * UNIT * self.bits // 8 + scales

    @property
    def native(self) -> str:
        """Its name in csrc."""
        if self.bits:
            return f"Quantised<{self.bits},{self.group},{int(self.minimum)}>"
        return {torch.float16: "Dense<Half>", torch.bfloat16: "Dense<Bfloat>"}[self.dtype]

    def stored(self, rows: int, cols: int) -> tuple[int, int]:
        """The shape of the stored tensor."""
        if not self.bits:
            return rows, cols
        return -(-rows // TILE), -(-cols // UNIT) * self.unit_bytes

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of so many rows."""
        first, second = self.stored(rows, cols)
        return first * second * int(self.dtype.itemsize)


INT8 = torch.int8
FORMATS: dict[int, Format] = {
    0: Format(0, dtype=torch.float32),  # F32
    1: Format(0, dtype=torch.float16),  # F16
    30: Format(0, dtype=torch.bfloat16),  # BF16
    2: Format(4, 32, True),  # Q4_0
    3: Format(4, 32, True),  # Q4_1
    6: Format(8),  # Q5_0
    7: Format(8, 32, True),  # Q5_1
    8: Format(8),  # Q8_0
    10: Format(4, 16, True),  # Q2_K
    11: Format(4, 16, True),  # Q3_K
    12: Format(4, 32, True),  # Q4_K
    13: Format(8, 32, True),  # Q5_K
    14: Format(8, 16, False),  # Q6_K
    20: Format(8),  # IQ4_NL
    23: Format(8),  # IQ4_XS
}
"""By ggml's number of a type."""
_DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dense(data: torch.Tensor, kind: int, rows: int, cols: int) -> torch.Tensor:
    """Rows of a dense type: a view of their bytes."""
    return data.view(_DENSE[kind]).view(rows, cols)


def levels(data: torch.Tensor, kind: int) -> Levels:
    """The levels (of eight bits plus 128), scales and minima of a part's blocks."""
    size, read = _READERS[kind]
    level, scale, minimum = read(data.view(-1, size))
    return (level.view(torch.uint8) + 128 if FORMATS[kind].bits == 8 else level), scale, minimum


def tiles(
    format: Format, level: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None = None
) -> torch.Tensor:
    """Units of levels [rows, cols], scales and minima [rows, groups]; rows fill whole tiles."""
    rows, cols = level.shape
    units, groups = -(-cols // UNIT), UNIT // format.group
    pad = torch.nn.functional.pad
    level = pad(level, (0, units * UNIT - cols))
    # row: half, g; column: unit, step of 16 (as two bits), half of it, t, one of two
    level = level.view(-1, 2, 8, units, 2, 2, 2, 4, 2)
    if format.bits == 4:
        low, high = level.unbind(1)  # [tile, g, unit, step, step, half, t, one]
        body = (low | high << 4).permute(0, 2, 1, 6, 3, 4, 7, 5)
    else:
        body = level.permute(0, 3, 4, 2, 7, 5, 6, 1, 8)
    factors = [scale] if minimum is None else [scale, minimum]
    tail = torch.stack(
        [pad(each, (0, units * groups - each.shape[1])) for each in factors], 2
    ).to(torch.float16)  # fmt: skip
    tail = tail.view(-1, 2, 8, units, groups, len(factors)).permute(0, 3, 2, 4, 1, 5)
    flat = body.reshape(len(body), units, -1), tail.reshape(len(tail), units, -1).view(torch.uint8)
    return torch.cat(flat, 2).view(rows // TILE, -1)


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
