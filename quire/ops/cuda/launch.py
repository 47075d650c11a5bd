"""Who launches the CUDA C++ kernels of products: those of csrc, in the shapes that suit a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from quire.ops.cuda.formats import TILE, UNIT
from quire.ops.cuda.machine import Machine, power_of_two
from quire.ops.cuda.matrices import Segment
from quire.ops.cuda.nvrtc import Kernel, Native, native

SOME = 64
"""Tokens that the kernel for some takes."""
_THREADS = 256
SLICED_BELOW = 1300
"""With fewer tiles of rows, slices of K run in blocks of their own."""
SOME_SHAPES = {
    (16, "slice"): (1, 8, 4), (16, "gated"): (1, 12, 3), (16, "whole"): (1, 8, 4),
    (32, "slice"): (1, 6, 4), (32, "gated"): (1, 8, 3), (32, "whole"): (1, 6, 4),
    (64, "slice"): (1, 6, 3), (64, "gated"): (3, 5, 1), (64, "whole"): (2, 6, 2),
}  # fmt: skip
"""By tokens and kernel: groups of four warps, units in flight, blocks on a multiprocessor."""
DENSE_SHAPES = {
    (16, "slice"): (2, 6, 2), (16, "gated"): (1, 8, 3), (16, "whole"): (1, 8, 3),
    (32, "slice"): (2, 5, 2), (32, "gated"): (2, 5, 2), (32, "whole"): (2, 5, 2),
    (64, "slice"): (2, 4, 2), (64, "gated"): (3, 5, 1), (64, "whole"): (3, 5, 1),
}  # fmt: skip
"""The same for weights of 16 bits."""
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
        ("fine", _I), ("owner", _P), ("pairs", _P), ("divide", _I), ("narrow", _I),
    )  # fmt: skip


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
        kernel = on.kernel(("common", "norm", "rows"), "join", 128)
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
        ("common", "norm", "rows"), f"prepare_{name}", _THREADS, SOURCE=source,
        KEPT=min(-(-cols // (4 * _THREADS)), MOST_KEPT),
    )  # fmt: skip
    given = _Prepare(
        at(x), at(norm), at(values), at(undo), x.stride(0), len(x), cols, act, fine, eps,
        joined or _Join(),
    )  # fmt: skip
    kernel.launch(on.stream, (len(x), 1, 1), 0, given)


def _some_tokens(x: Prepared) -> int:
    """Columns of a tile of tokens."""
    return min(max(power_of_two(len(x.values)), 16), SOME)


def _some(on: Native, name: str, w: Segment, tokens: int) -> tuple[Kernel, int, int]:
    """A kernel of some.cu, its shared memory, and groups of four warps in a block."""
    f = w.format
    groups, stages, blocks = (SOME_SHAPES if f.bits else DENSE_SHAPES)[
        tokens, "whole" if name == "routed" else name
    ]
    kernel = on.kernel(
        ("common", "weights", "unit", "some"), f"some_{name}", 128 * groups, WEIGHTS=f.native,
        TOKENS=tokens, GROUPS=groups, STAGES=stages, BLOCKS=blocks,
    )  # fmt: skip
    unit = f.unit_bytes if f.bits else TILE * UNIT * 2
    sums = tokens * 32 * groups * 4  # of up
    return kernel, max(stages * (tokens * UNIT * 2 + 4 * groups * unit), sums), groups


def product_some(
    machine: Machine, x: Prepared, w: Segment, out: torch.Tensor, bias: torch.Tensor | None = None,
    into: bool = False, act: int = 0,
) -> Slices | None:  # fmt: skip
    """One segment's columns of the output for some tokens; with `act`, act(gate) · up.

    What is returned is still to be added.
    """
    tokens, rows = _some_tokens(x), w.rows // 2 if act else w.rows
    tiles = -(-rows // TILE)
    token_tiles = -(-x.n // (tokens // 2 if x.fine else tokens))
    sliced = not act and w.slices > 1 and tiles * token_tiles < SLICED_BELOW
    on = native(machine.device)
    name = "gated" if act else "slice" if sliced else "whole"
    kernel, shared, groups = _some(on, name, w, tokens)
    to = machine.empty(w.slices, len(x.values), w.rows) if sliced else out
    given = _Some(
        at(x.values), at(w.q), at(to),
        at(bias), at(out) if into else None, at(x.scales), out.stride(0), x.n, w.cols, w.rows,
        tiles, act, x.fine,
        narrow=out.dtype is torch.bfloat16,
    )  # fmt: skip
    grid = token_tiles, -(-tiles // (groups * (2 if act else 4))), w.slices if sliced else 1
    kernel.launch(on.stream, grid, shared, given)
    return Slices(machine, to, x, bias, into) if sliced else None


def product_routed(
    machine: Machine, x: Prepared, w: Segment, owner: torch.Tensor, pairs: torch.Tensor,
    divide: int, out: torch.Tensor,
) -> bool:  # fmt: skip
    """Experts' columns of the output: a tile of pairs meets its owner; False if not for these.

    Pair i has row i // divide of x, and writes row i.
    """
    f, rows = w.format, w.part_rows[0]
    whole = f.bits > 0 or (f.dtype is not torch.float32 and w.cols % UNIT == 0)
    if machine.interpreted or not whole or rows % TILE or w.first % TILE or w.cols % 8:
        return False
    on = native(machine.device)
    kernel, shared, groups = _some(on, "routed", w, pairs.shape[1])
    first = w.q[w.first // TILE if f.bits else w.first :]
    given = _Some(
        at(x.values), at(first), at(out), None, None, at(x.scales),
        out.stride(0), len(out), w.cols, rows, rows // TILE, 0, False, at(owner), at(pairs), divide,
    )  # fmt: skip
    grid = len(owner), -(-rows // (TILE * 4 * groups)), 1
    kernel.launch(on.stream, grid, shared, given)
    return True
