"""Who launches the CUDA C++ kernels of products: those of csrc, in the shapes that suit a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.ops.cuda.formats import TILE, UNIT
from quire.ops.cuda.machine import Machine, power_of_two
from quire.ops.cuda.matrices import Segment
from quire.ops.cuda.nvrtc import Kernel, Native, native

FEW, SOME = 4, 64
"""Tokens that the kernel for few takes: with what rounding has lost, the eight columns of `mma`;
and tokens that the one for some takes."""
_THREADS, _WARPS = 256, 8
_SOME_THREADS, _SOME_WARPS = 128, 4
GATED_FROM = 33
"""With fewer tokens, gate and up are cheaper in slices than in one product with the activation."""
SLICED_BELOW = 1300
"""With fewer tiles of rows, slices of K run in blocks of their own."""
SOME_STAGES = {16: (4, 4), 32: (4, 4), 64: (4, 2)}
"""By tokens: units in flight, and blocks on a multiprocessor."""
STAGES: dict[int, tuple[tuple[int, int], ...]] = {
    0: ((5, 2), (3, 2)), 4: ((12, 2), (4, 2)), 8: ((8, 2), (3, 2)),
}  # fmt: skip
"""By bits of a weight: units that a warp has in flight, and blocks on a multiprocessor."""
MOST_KEPT = 10
"""Steps of 1,024 columns that a row's kernel holds in registers."""
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


class _Join(ctypes.Structure):
    """JoinArgs of rows.cu."""

    _fields_ = (
        ("parts", _P), ("out", _P), ("bias", _P), ("into", _P), ("undo", _P), ("out_stride", _L),
        ("into_stride", _L), ("n", _I), ("rows", _I), ("slices", _I), ("fine", _I),
    )  # fmt: skip


class _Prepare(ctypes.Structure):
    """PrepareArgs of rows.cu."""

    _fields_ = (
        ("x", _P), ("norm", _P), ("out", _P), ("undo", _P), ("x_stride", _L), ("n", _I),
        ("cols", _I), ("act", _I), ("fine", _I), ("eps", _F), ("from_", _Join),
    )  # fmt: skip


class _Some(ctypes.Structure):
    """SomeArgs of some.cu."""

    _fields_ = (
        ("x", _P), ("w", _P), ("out", _P), ("bias", _P), ("into", _P), ("undo", _P),
        ("out_stride", _L), ("n", _I), ("cols", _I), ("rows", _I), ("tiles", _I), ("act", _I),
        ("fine", _I),
    )  # fmt: skip


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


@dataclass(frozen=True)
class Prepared:
    """Activations as a product takes them."""

    values: torch.Tensor
    scales: torch.Tensor
    """What undoes the scale of each row; of float16 alone."""
    n: int
    fine: bool
    """As many rows again hold what rounding has lost."""

    @property
    def scaled(self) -> bool:
        """Whether rows have scales."""
        return self.values.dtype is torch.float16


def at(x: torch.Tensor | None) -> int | None:
    """Where a tensor lies, as kernels take it."""
    return None if x is None else int(x.data_ptr())


@dataclass(frozen=True)
class Slices:
    """A product whose slices are not added yet."""

    machine: Machine
    parts: torch.Tensor
    """[slices, columns, rows]"""
    x: Prepared
    bias: torch.Tensor | None
    into: bool

    @property
    def fused(self) -> bool:
        """Whether the kernel that prepares rows can add them."""
        return self.parts.shape[2] % 4 == 0 and not self.x.fine

    def arguments(self, values: torch.Tensor, out: torch.Tensor) -> _Join:
        """How kernels are told of it: `values` is what it is added to."""
        slices, _, rows = self.parts.shape
        return _Join(
            at(self.parts), at(out), at(self.bias), at(values) if self.into else None,
            at(self.x.scales) if self.x.scaled else None, out.stride(0), values.stride(0), self.x.n,
            rows, slices, self.x.fine,
        )  # fmt: skip

    def join(self, base: torch.Tensor) -> None:
        """Adds them one after the other, then to `base` or over it."""
        on = native(self.machine.device)
        kernel = on.kernel(("common", "rows"), "join", 128)
        grid = -(-self.parts.shape[2] // 512), self.x.n, 1
        kernel.launch(on.stream, grid, 0, self.arguments(base, base))


def prepare(
    machine: Machine, x: torch.Tensor, norm: torch.Tensor | None, eps: float, act: int, fine: bool,
    values: torch.Tensor, undo: torch.Tensor, joined: _Join | None = None,
) -> None:  # fmt: skip
    """Rows of activations in the type of `values`: of x, or of slices that are added first."""
    on, cols = native(machine.device), values.shape[1]
    name = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}[values.dtype]
    aligned = all((at(each) or 0) % 16 == 0 for each in (x, norm)) and x.stride(0) % 4 == 0
    source = 2 if joined else int(aligned and cols % 4 == 0 and not (act or fine))
    kernel = on.kernel(
        ("common", "rows"), f"prepare_{name}", _THREADS, SOURCE=source,
        KEPT=min(-(-cols // (4 * _THREADS)), MOST_KEPT),
    )  # fmt: skip
    given = _Prepare(
        at(x), at(norm), at(values), at(undo), x.stride(0), len(x), cols, act, fine, eps,
        joined or _Join(),
    )  # fmt: skip
    kernel.launch(on.stream, (len(x), 1, 1), 0, given)


def _room(w: Segment, name: str, columns: int, stages: int) -> int:
    """Shared memory of a block of few.cu."""
    buffers = 4 if name == "few_gated" else 2
    fixed = buffers * _WARPS * TILE * columns * 4 + columns * (-(-w.cols // UNIT) * UNIT + 8) * 2
    unit = w.format.unit_bytes if w.format.bits else TILE * UNIT * 2
    return _WARPS * stages * unit + fixed


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
        kernel = on.kernel(("common", "weights", "few"), name, _THREADS, **given)
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


def _some_tokens(x: Prepared) -> int:
    """Columns of a tile of tokens."""
    return min(max(power_of_two(len(x.values)), 16), SOME)


def product_some(
    machine: Machine, x: Prepared, w: Segment, out: torch.Tensor, bias: torch.Tensor | None = None,
    into: bool = False, act: int = 0,
) -> Slices | None:  # fmt: skip
    """One segment's columns of the output for some tokens; with `act`, act(gate) · up.

    What is returned is still to be added.
    """
    f, tokens = w.format, _some_tokens(x)
    rows = w.rows // 2 if act else w.rows
    tiles = -(-rows // TILE)
    per_tile = tokens // 2 if x.fine else tokens
    token_tiles = -(-x.n // per_tile)
    sliced = not act and w.slices > 1 and tiles * token_tiles < SLICED_BELOW
    name = "some_gated" if act else "some_slice" if sliced else "some_whole"
    on = native(machine.device)
    stages, blocks = SOME_STAGES[tokens]
    kernel = on.kernel(
        ("common", "weights", "some"), name, _SOME_THREADS, WEIGHTS=f.native, TOKENS=tokens,
        STAGES=stages, BLOCKS=blocks,
    )  # fmt: skip
    unit = f.unit_bytes if f.bits else TILE * UNIT * 2
    shared = stages * (tokens * UNIT * 2 + _SOME_WARPS * 2 * unit)
    to = machine.empty(w.slices, len(x.values), w.rows) if sliced else out
    given = _Some(
        at(x.values), at(w.q), at(to), at(bias), at(out) if into else None, at(x.scales),
        out.stride(0), x.n, w.cols, w.rows, tiles, act, x.fine,
    )  # fmt: skip
    per_block = _SOME_WARPS * (1 if act else 2)
    grid = token_tiles, -(-tiles // per_block), w.slices if sliced else 1
    kernel.launch(on.stream, grid, shared, given)
    return Slices(machine, to, x, bias, into) if sliced else None
