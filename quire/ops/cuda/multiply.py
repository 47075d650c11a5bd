"""Products of activations with weights: who launches them, and in which shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.cuda import launch
from quire.ops.cuda.arrays import Arrays, CudaArray, Later, block_of
from quire.ops.cuda.formats import UNIT, Format
from quire.ops.cuda.kernels import product as kernels
from quire.ops.cuda.kernels import rows as row_kernels
from quire.ops.cuda.launch import SOME, Prepared, Slices
from quire.ops.cuda.machine import power_of_two
from quire.ops.cuda.many import expand, product_many, takes_many
from quire.ops.cuda.matrices import Segment

_FULL = 200
"""Programs that keep a large GPU busy: with fewer, slices do run in parallel."""
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton: kernels compute addresses themselves
    TensorDescriptor = None
_WIDE_SUMS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
"""Whether torch multiplies 16 bits into float32."""
MULTIPLY = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Sum:
    """Where a segment's products go, and what is added to them."""

    out: torch.Tensor
    bias: torch.Tensor | None
    into: bool
    """Added to what `out` holds."""


def tile_of(w: Segment, tokens: int) -> dict[str, Any]:
    """The shape of a product's tiles: which one makes no difference to any bit."""
    size = {"BR": 64, "BT": min(power_of_two(tokens, 16), 64), "BK": 64}
    how = {"num_warps": 4, "num_stages": 4}
    if w.format.multiply is torch.float32:
        size["BK"], how["num_stages"] = 32, 2
    elif w.format.bits:
        how["num_stages"] = 2
    elif tokens > SOME:
        size["BT"] = 128
        # With three stages a third program fits on a multiprocessor, if there is one.
        how["num_stages"] = 3 if triton.cdiv(w.rows, 64) * triton.cdiv(tokens, 128) > 264 else 4
    return size | how | {"EVEN": w.cols % size["BK"] == 0}


def gated_tile_of(w: Segment, tokens: int) -> dict[str, Any]:
    """The same for products that have gate and up: of rows there are twice as many."""
    size = {"BR": 64, "BT": min(power_of_two(tokens, 16), 64), "BK": 64}
    how = {"num_warps": 4, "num_stages": 3 if tokens > SOME else 4}
    return size | how | {"EVEN": w.cols % size["BK"] == 0}


class Multiplying(Arrays):
    """Activations in 16 bits, and their products with the segments of a matrix."""

    exact_batches = True
    """Whether a token has the same bits in every batch; if not, prompts take torch's products.

    Quantised weights are bfloat16 there: so are activations then, and need no scale. Gate and up
    are multiplied as ever where that is faster, which it is on Hopper.
    """

    def kind_of(self, format: Format, n: int, fine: bool = False) -> torch.dtype:
        """The type in which so many tokens are multiplied with weights of a format."""
        if (
            format.bits
            and not (fine or self.exact_batches or self.machine.interpreted)
            and n > SOME
        ):
            return torch.bfloat16
        return format.multiply

    def prepare(
        self, x: CudaArray, cols: int, norm: torch.Tensor | None, eps: float, act: int,
        kind: torch.dtype, fine: bool = False,
    ) -> Prepared:  # fmt: skip
        """Activations in the type that a weight is multiplied in."""
        n = x.shape[0]
        fine = fine and kind is not torch.float32
        if x.base.dtype is kind and norm is None and not act:
            return Prepared(x.values, x.values, n, False)
        values = self.machine.empty(n * (1 + fine), cols, dtype=self.machine.half(kind))
        scales = self.machine.empty(n)
        if self.machine.interpreted:
            row_kernels.prepare[(n,)](
                x.values, x.values if norm is None else norm, values, scales, n, cols, eps,
                NORM=norm is not None, ACT=act, SCALED=kind is torch.float16, FINE=fine,
                BLOCK=block_of(cols),
            )  # fmt: skip
            return Prepared(values, scales, n, fine)
        joined, total = None, None
        left = x.pending
        if (
            isinstance(left, Later)
            and kind is torch.bfloat16
            and norm is None
            and not (act or fine)
        ):
            left.join(values)  # it is written in this type at once
            return Prepared(values, values, n, False)
        if isinstance(left, Slices) and left.fused and not (act or fine or kind is torch.float32):
            total = self.machine.empty(*x.shape)
            joined = left.arguments(x.base, total)
        rows = x.values if joined is None else x.base
        launch.prepare(self.machine, rows, norm, eps, act, fine, values, scales, joined)
        if total is not None:
            x.base, x.pending = total, None
        return Prepared(values, scales, n, fine)

    def product(self, x: Prepared, w: Segment, to: Sum) -> Slices | None:
        """One segment's columns of the output; what is returned is still to be added."""
        if x.n <= SOME and self._native(w):
            return launch.product_some(self.machine, x, w, to.out, to.bias, to.into)
        packed = w.format.bits and not self.machine.interpreted
        if packed and not takes_many(self.machine, x, w, to.out):
            w = self.expanded([w], x.values.dtype)
        if not self.exact_batches and x.n > SOME and self._library(x, w, to):
            return None
        if takes_many(self.machine, x, w, to.out):
            product_many(self.machine, x, w, to.out, to.bias, to.into)
            return None
        tile = tile_of(w, x.n)
        programs = triton.cdiv(w.rows, tile["BR"])
        if x.n <= SOME and programs < _FULL and w.slices > 1:
            return self._in_slices(x, w, to, tile)
        self._launch(x, w, to.out, to, tile, False)
        return None

    def gated(self, x: Prepared, w: Segment, act: int, kind: torch.dtype) -> torch.Tensor:
        """act(gate) · up of a segment that has the rows of both, in this type."""
        rows = w.rows // 2
        out = self.machine.empty(x.n, rows, dtype=kind)
        if x.n <= SOME and self._native(w):
            launch.product_some(self.machine, x, w, out, act=act)
            return out
        if w.format.bits and not takes_many(self.machine, x, w, out):
            w = self.expanded([w], x.values.dtype)
        if takes_many(self.machine, x, w, out):
            product_many(self.machine, x, w, out, act=act)
            return out
        tile = gated_tile_of(w, x.n)
        values, q, tma = self._operands(x, w, tile)
        kernels.gated[(triton.cdiv(rows, tile["BR"]), triton.cdiv(x.n, tile["BT"]))](
            values, q, out, x.scales, x.n, rows, w.cols, w.slice_cols, ACT=act,
            SCALED=x.scaled, TMA=tma, **tile,
        )  # fmt: skip
        return out

    def _operands(self, x: Prepared, w: Segment, tile: dict[str, Any]) -> tuple[Any, Any, bool]:
        """Activations and weights as a kernel takes them: by the copy engine where there is one."""
        engine = TensorDescriptor is not None and self.machine.launches_ahead
        if x.fine or not (engine and self._native(w)):
            return x.values, w.q, False
        made = TensorDescriptor.from_tensor
        return made(x.values, [tile["BT"], 64]), made(w.q, [tile["BR"], 64]), True

    def _native(self, w: Segment) -> bool:
        """Whether CUDA C++ multiplies with these: quantised, or 16 bits in whole units."""
        if self.machine.interpreted or w.first:
            return False
        return w.format.bits > 0 or (w.format.dtype is not torch.float32 and w.cols % UNIT == 0)

    def expanded(self, segments: Sequence[Segment], kind: torch.dtype) -> Segment:
        """For many tokens: quantised weights unpacked once, instead of by every tile."""
        cols, rows = segments[0].cols, tuple(segment.rows for segment in segments)
        values, start = self.machine.empty(sum(rows), cols, dtype=kind), 0
        for segment in segments:
            expand(self.machine, segment, values[start : start + segment.rows])
            start += segment.rows
        return Segment(Format(0, dtype=kind), cols, rows, values)

    def gated_by_library(
        self, x: Prepared, w: Segment, act: int, kind: torch.dtype
    ) -> torch.Tensor:
        """act(gate) · up by torch's product, in this type."""
        w = self.expanded([w], x.values.dtype) if w.format.bits else w
        both, rows = torch.mm(x.values, w.q.T), w.rows // 2
        out = self.machine.empty(x.n, rows, dtype=kind)
        kernels.activate[(triton.cdiv(rows, 1024), x.n)](both, out, rows, ACT=act, BLOCK=1024)
        return out

    def _library(self, x: Prepared, w: Segment, to: Sum) -> bool:
        """By torch's product, if it has this one."""
        narrow = not w.format.bits and w.format.dtype is not torch.float32 and not w.first
        if self.machine.interpreted or x.fine or not (narrow and _WIDE_SUMS):
            return False
        weights, plain = w.q.T, not x.scaled and to.bias is None
        if plain and to.into and to.out.is_contiguous():
            torch.addmm(to.out, x.values, weights, out_dtype=torch.float32, out=to.out)
        elif plain and to.out.is_contiguous():
            torch.mm(x.values, weights, out_dtype=torch.float32, out=to.out)
        else:
            values = torch.mm(x.values, weights, out_dtype=torch.float32)
            Slices(self.machine, values[None], x, to.bias, to.into).join(to.out)
        return True

    def _in_slices(self, x: Prepared, w: Segment, to: Sum, tile: dict[str, Any]) -> Slices | None:
        """Slices in parallel, to be added one after the other."""
        parts = self.machine.empty(w.slices, len(x.values), w.rows)
        self._launch(x, w, parts, to, tile, True)
        if not self.machine.interpreted:
            return Slices(self.machine, parts, x, to.bias, to.into)
        out, bias, block = to.out, to.bias, 128
        kernels.join[(triton.cdiv(w.rows, block), x.n)](
            parts, out, out if bias is None else bias, out, x.scales, x.n, len(x.values), w.rows,
            out.stride(0), w.slices, BLOCK=block, FINE=x.fine, INTO=to.into,
            BIAS=bias is not None, SCALED=x.scaled, num_warps=1,
        )  # fmt: skip
        return None

    def _launch(
        self, x: Prepared, w: Segment, out: torch.Tensor, to: Sum, tile: dict[str, Any], split: bool
    ) -> None:
        f, bias = w.format, to.bias
        grid = triton.cdiv(w.rows, tile["BR"]), triton.cdiv(x.n, tile["BT"]), 1
        values, q, tma = self._operands(x, w, tile)
        kernels.product[(*grid[:2], w.slices if split else 1)](
            values, q, out, out if bias is None else bias, out, x.scales, x.n, w.rows, w.cols,
            out.stride(-2), w.slice_cols, BITS=f.bits, GROUP=f.group, MINIMUM=f.minimum,
            MULTIPLY=MULTIPLY[self.machine.half(f.multiply)], SPLIT=split, FINE=x.fine, TMA=tma,
            SCALED=x.scaled, BIAS=bias is not None, INTO=to.into, **tile,
        )  # fmt: skip
