"""Who launches the products of few tokens: few.cu, in the shapes that suit a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quire.ops.cuda.formats import TILE, UNIT
from quire.ops.cuda.launch import at
from quire.ops.cuda.machine import Machine
from quire.ops.cuda.matrices import Segment
from quire.ops.cuda.nvrtc import Kernel, Native, native

FEW = 4
"""Tokens that the kernel takes: with what rounding has lost, the eight columns of `mma`."""
_THREADS, _WARPS = 256, 8
STAGES: dict[int, tuple[tuple[int, int], ...]] = {
    0: ((5, 2), (3, 2)), 4: ((12, 2), (4, 2)), 8: ((8, 2), (3, 2)),
}  # fmt: skip
"""By bits of a weight: units that a warp has in flight, and blocks on a multiprocessor."""
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


class _Few(ctypes.Structure):
    """FewArgs of few.cu."""

    _fields_ = (
        ("x", _P), ("norm", _P), ("w", _P), ("out", _P), ("bias", _P), ("into", _P),
        ("x_stride", _L), ("out_stride", _L), ("n", _I), ("cols", _I), ("rows", _I), ("tiles", _I),
        ("act", _I), ("fine", _I), ("eps", _F),
    )  # fmt: skip


class _Two(ctypes.Structure):
    """TwoArgs of few.cu."""

    _fields_ = (("first", _Few), ("second", _Few), ("blocks", _I))


def _room(w: Segment, name: str, columns: int, stages: int) -> int:
    """Shared memory of a block of few.cu."""
    buffers = 4 if name == "few_gated" else 2
    fixed = buffers * _WARPS * TILE * columns * 4 + columns * (-(-w.cols // UNIT) * UNIT + 8) * 2
    each = 2 if w.format.bits or name == "few_gated" else 1  # units of a step
    unit = w.format.unit_bytes if w.format.bits else TILE * UNIT * 2
    return _WARPS * -(-stages // each) * each * unit + fixed


def _fitting(
    on: Native, name: str, columns: int, w: Segment, second: Segment | None = None
) -> tuple[Kernel, int, int] | None:
    """The kernel, its shared memory and blocks per multiprocessor; None where it does not fit."""
    best = None
    for i, (stages, bound) in enumerate(STAGES[w.format.bits]):
        shared = _room(w, name, columns, stages)
        given: dict[str, object] = {"WEIGHTS": w.format.native, "STAGES": stages, "BLOCKS": bound}
        if second is not None:
            other = STAGES[second.format.bits][i][0]
            shared = max(shared, _room(second, name, columns, other))
            given |= {"SECOND": second.format.native, "SECOND_STAGES": other}
        kernel = on.kernel(("common", "norm", "weights", "few"), name, _THREADS, **given)
        found = min(kernel.resident(shared), bound)
        if found and (best is None or found > best[2]):
            best = kernel, shared, found
        if found >= bound:
            break
    return best


def takes_few(machine: Machine, x: torch.Tensor, w: Segment) -> bool:
    """Whether the kernel for few tokens can read these."""
    f = w.format
    if machine.interpreted or len(x) > FEW or w.first or x.data_ptr() % 16 or x.stride(0) % 4:
        return False
    return f.bits > 0 or (f.dtype is not torch.float32 and w.cols % UNIT == 0)


def product_few(
    machine: Machine, x: torch.Tensor, w: Segment, norm: torch.Tensor | None, eps: float,
    out: torch.Tensor, bias: torch.Tensor | None = None, into: bool = False, fine: bool = False,
    act: int = 0,
) -> bool:  # fmt: skip
    """One segment's columns of the output for few tokens; False where this is not for them.

    With `act` the segment is gate and up, and the output act(gate) · up.
    """
    n, rows = len(x), w.rows // 2 if act else w.rows
    if not takes_few(machine, x, w) or (act and rows % TILE):
        return False
    on = native(machine.device)
    name = "few_gated" if act else "few" if norm is None else "few_normed"
    found = _fitting(on, name, n * (1 + fine), w)
    if found is None:
        return False
    kernel, shared, resident = found
    tiles = -(-rows // TILE)
    given = _few(x, w, norm, eps, out, bias, into, fine, act, tiles)
    kernel.launch(on.stream, (min(tiles, on.processors * resident), 1, 1), shared, given)
    return True


def _few(
    x: torch.Tensor, w: Segment, norm: torch.Tensor | None, eps: float, out: torch.Tensor,
    bias: torch.Tensor | None, into: bool, fine: bool, act: int, tiles: int,
) -> _Few:  # fmt: skip
    return _Few(
        at(x), at(norm), at(w.q), at(out), at(bias), at(out) if into else None, x.stride(0),
        out.stride(0), len(x), w.cols, w.rows, tiles, act, fine, eps,
    )  # fmt: skip


def product_two(
    machine: Machine, x: torch.Tensor, segments: Sequence[Segment], norm: torch.Tensor, eps: float,
    out: torch.Tensor, bias: torch.Tensor | None, into: bool,
) -> bool:  # fmt: skip
    """The same for a matrix of two formats in one launch: some blocks take one, some the other."""
    if len(segments) != 2 or not all(takes_few(machine, x, w) for w in segments):
        return False
    on = native(machine.device)
    found = _fitting(on, "few_two", len(x), *segments)
    if found is None:
        return False
    kernel, shared, resident = found
    tiles = [-(-w.rows // TILE) for w in segments]
    most = min(sum(tiles), on.processors * resident)
    share = round(most * segments[0].nbytes / sum(w.nbytes for w in segments))
    first = min(max(share, most - tiles[1], 1), tiles[0], most - 1)
    start, given = 0, []
    for w, count in zip(segments, tiles, strict=True):
        mine = slice(start, start + w.rows)
        part = None if bias is None else bias[mine]
        given.append(_few(x, w, norm, eps, out[:, mine], part, into, False, 0, count))
        start += w.rows
    kernel.launch(on.stream, (most, 1, 1), shared, _Two(*given, first))
    return True
