"""Products of many tokens: weights unpacked for them, and on Hopper many.cu.

Tiles are cut so that they fill the GPU.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from quire.ops.cuda.driver import call
from quire.ops.cuda.formats import TILE, UNIT
from quire.ops.cuda.launch import SOME, Prepared, at
from quire.ops.cuda.machine import Machine
from quire.ops.cuda.matrices import Segment
from quire.ops.cuda.nvrtc import native

FILES = ("common", "weights", "hopper", "many_tiles", "many")
ROWS = (48, 64, 80, 96, 128, 160, 192)
"""Weight rows that a tile may have; of quantised weights no more than 128."""
_TOKENS, _GROUP, _EXPANDERS = 128, 128, 256
_STAGES = 8
_AROUND, _ADDING = 24, 8
"""What a tile costs beside its products, and where they wait for slices to be added, in rows."""
_P, _L, _I = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
DTYPES = {torch.float16: (6, "f16"), torch.bfloat16: (9, "bf16")}
"""As the driver and PTX name them."""
_SWIZZLED, _PROMOTED = 3, 3  # by 128 bytes; reads of 256 bytes


TensorMap = ctypes.c_ubyte * 128
"""CUtensorMap."""


class _Many(ctypes.Structure):
    """ManyArgs of many.cu."""

    _fields_ = (
        ("x", TensorMap), ("w", TensorMap), ("packed", _P), ("out", _P), ("bias", _P), ("into", _P),
        ("undo", _P), ("stride", _L), ("n", _I), ("rows", _I), ("blocks", _I), ("slice", _I),
        ("row_tiles", _I), ("token_tiles", _I), ("units", _I), ("pad", ctypes.c_ubyte * 52),
    )  # fmt: skip


class _Expand(ctypes.Structure):
    """ExpandArgs of expand.cu."""

    _fields_ = (("w", _P), ("out", _P), ("rows", _I), ("cols", _I), ("bfloat", _I))


def takes_many(machine: Machine, x: Prepared, w: Segment, out: torch.Tensor) -> bool:
    """Whether the kernel for many tokens can multiply these."""
    if x.n <= SOME or x.fine or w.first or not machine.hopper:
        return False
    if x.values.dtype is not w.format.multiply or x.values.dtype not in DTYPES:
        return False
    aligned = out.stride(0) % 2 == 0 and out.data_ptr() % 8 == 0
    return aligned and w.cols % UNIT == 0 and w.rows % TILE == 0


class Tile(NamedTuple):
    """What many.cu is compiled for: it changes no bit."""

    rows: int
    shared: int
    """What two neighbours share: 1 rows, 2 tokens."""
    two: bool
    """Registers for two slices."""


def tile_of(w: Segment, tokens: int, processors: int, gated: bool) -> Tile:
    """The tile with which a product of so many tokens takes least time."""
    token_tiles, packed = -(-tokens // _TOKENS), w.format.bits > 0
    most_two = 80 if packed else 128  # rows of which two slices fit the registers

    def cost(size: int) -> int:
        tiles = -(-w.rows // size) * token_tiles
        return -(-tiles // processors) * (size + _AROUND + (0 if size <= most_two else _ADDING))

    best = min((s for s in ROWS if not packed or (s <= 128 and not (gated and s % 32))), key=cost)
    return Tile(best, 1 if token_tiles % 2 == 0 and not packed else 2, best <= most_two)


def product_many(
    machine: Machine, x: Prepared, w: Segment, out: torch.Tensor, bias: torch.Tensor | None = None,
    into: bool = False, act: int = 0,
) -> None:  # fmt: skip
    """One segment's columns of the output; with `act` of gate and up, act(gate) · up."""
    on, packed = native(machine.device), w.format.bits > 0
    tile = tile_of(w, x.n, on.processors, act > 0)
    kind, name = DTYPES[x.values.dtype]
    units = tile.rows // TILE * w.format.unit_bytes if packed else 0
    stage = -(-(2 * UNIT * (_TOKENS + tile.rows) + units) // 1024) * 1024
    stages = min((on.most_shared - 2048) // stage, _STAGES)
    given = {"ROWS": tile.rows, "SHARED": tile.shared, "STAGES": stages, "TYPE": name}
    given |= {"TWO": int(tile.two), "ACT": act, "BFLOAT": int(out.dtype is torch.bfloat16)}
    given |= {"WEIGHTS": w.format.native} if packed else {}
    kernel = on.kernel(FILES, "many", (5 if packed else 3) * _GROUP, **given)
    box = tile.rows // 2 if act or tile.shared == 1 else tile.rows
    rows, per_tile = (w.rows // 2, tile.rows // 2) if act else (w.rows, tile.rows)
    tiles = -(-rows // per_tile), -(-x.n // _TOKENS)
    arguments = _Many(
        tensor_map(x.values.data_ptr(), x.n, w.cols, _TOKENS // tile.shared, kind),
        TensorMap() if packed else tensor_map(w.q.data_ptr(), w.rows, w.cols, box, kind), at(w.q),
        at(out), at(bias), at(out) if into else None, at(x.scales) if x.scaled else None,
        out.stride(0), x.n, rows, w.cols // UNIT, w.slice_cols // UNIT, *tiles,
        w.rows // TILE,
    )  # fmt: skip
    paired, others = tiles if tile.shared == 2 else tiles[::-1]
    pairs = -(-paired // 2) * others
    grid = 2 * min(pairs, on.processors // 2), 1, 1
    kernel.launch(on.stream, grid, stages * (stage + 24), arguments)


@lru_cache(4096)
def tensor_map(
    address: int, rows: int, cols: int, box: int, kind: int
) -> ctypes.Array[ctypes.c_ubyte]:
    """How the copy engine is told of a matrix of 16 bits and boxes of its rows by 64 columns."""
    room = (ctypes.c_ubyte * 192)()
    start = -ctypes.addressof(room) % 64
    sizes, strides = (ctypes.c_uint64 * 2)(cols, rows), (ctypes.c_uint64 * 1)(2 * cols)
    call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(ctypes.addressof(room) + start), kind, 2,
        ctypes.c_void_p(address), sizes, strides, (ctypes.c_uint32 * 2)(UNIT, box),
        (ctypes.c_uint32 * 2)(1, 1), 0, _SWIZZLED, _PROMOTED, 0,
    )  # fmt: skip
    return TensorMap.from_buffer_copy(room, start)


def expand(machine: Machine, w: Segment, out: torch.Tensor) -> None:
    """Quantised weights as the very float16 that products make of them, or as bfloat16."""
    on = native(machine.device)
    kernel = on.kernel(
        ("common", "weights", "expand"), "expand", _EXPANDERS, WEIGHTS=w.format.native
    )
    units = -(-w.rows // TILE) * -(-w.cols // UNIT)
    given = _Expand(at(w.q), at(out), w.rows, w.cols, out.dtype is torch.bfloat16)
    kernel.launch(on.stream, (-(-units // (4 * _EXPANDERS // 32)), 1, 1), 0, given)
