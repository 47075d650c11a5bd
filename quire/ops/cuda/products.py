"""The group `MatrixOps` of the table, without experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from quire.ops import Array, Int32, Matrix, Ops, Part
from quire.ops.cuda import few, launch, matrices
from quire.ops.cuda.arrays import CudaArray, array_of, row_of, values_of
from quire.ops.cuda.formats import TILE
from quire.ops.cuda.launch import Prepared, Slices
from quire.ops.cuda.machine import OnDevice, need
from quire.ops.cuda.matrices import CudaMatrix, Segment
from quire.ops.cuda.multiply import MULTIPLY, Multiplying, Sum
from quire.ops.cuda.passing import CudaPassage
from quire.ops.passing import InPlace, Passage

__all__ = ["MULTIPLY", "Matrices", "matrix_of"]


def matrix_of(w: Matrix) -> CudaMatrix:
    """A matrix that this device made."""
    if not isinstance(w, CudaMatrix):
        raise TypeError(f"{type(w).__name__} is not a matrix of the GPU")
    return w


class Matrices(Multiplying):
    """Products with weights."""

    def expect(self, n_bytes: int) -> None:
        """Takes the memory of these matrices in one piece: torch would round each of them up."""
        self.machine.expect(n_bytes)

    def pack(self, parts: Sequence[Part]) -> Matrix:
        """One matrix from parts stacked along rows."""
        made = matrices.pack(parts, self.machine)
        self.machine.count_weights(made, made.nbytes)
        return made

    def passage(self, n_bytes: int) -> Passage:
        """Two rooms of so many bytes that matrices pass through."""
        return InPlace(cast(Ops, self)) if self.machine.interpreted else CudaPassage(self, n_bytes)

    def packed_bytes(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """What `pack` would hold for parts of these types, rows and columns."""
        return matrices.packed_bytes(parts)

    def embed(self, table: Matrix, ids: Int32 | OnDevice, scale: float = 1.0) -> Array:
        """Rows of a matrix by id, times scale."""
        if not isinstance(ids, OnDevice):  # those are the device's own
            need(((ids >= 0) & (ids < table.rows)).all(), f"an id outside {table.rows} rows")
        found = self.machine.integers(ids)
        return self.new(matrices.embed_ids(matrix_of(table), found, scale, self.machine))

    def linear(
        self, x: Array, w: Matrix, norm: Array | None = None, eps: float = 0.0, *,
        bias: Array | None = None, into: Array | None = None,
    ) -> Array:  # fmt: skip
        """w · x, or of its norm, + bias; added to `into` and returned when that is given."""
        matrix = matrix_of(w)
        added = None if bias is None else row_of(bias, matrix.rows, "bias")
        return self._linear(x, matrix, norm, eps, bias=added, into=into)

    def linear_int16(self, x: Array, w: Matrix, norm: Array, eps: float) -> Array:
        """w · rms_norm(x) with activations of twice 16 bits."""
        return self._linear(x, matrix_of(w), norm, eps, fine=True)

    def network(
        self, x: Array, gate_up: Matrix, down: Matrix, norm: Array, eps: float, act: int,
        into: Array | None = None,
    ) -> Array:  # fmt: skip
        """down · (act(gate) · up) of rms_norm(x); added to `into` when that is given."""
        up, n, width = matrix_of(gate_up), x.shape[0], down.cols
        need(act in (1, 2), f"act {act} is unknown")
        need(up.rows == 2 * width, f"gate and up have {up.rows} rows, not {2 * width}")
        need(x.shape[1] == up.cols, f"x of shape {x.shape} where {up.cols} columns are needed")
        weight = row_of(norm, up.cols, "norm")
        kinds = {self.kind_of(segment.format, n) for segment in matrix_of(down).segments}
        kind = torch.bfloat16 if kinds == {torch.bfloat16} else torch.float32
        if n and (middle := self._gated(array_of(x), up, weight, eps, act, kind)) is not None:
            return self._linear(middle, matrix_of(down), into=into)
        both = self._linear(x, up, norm, eps)
        return self._linear(both, matrix_of(down), act=act, into=into)

    def _gated(
        self, x: CudaArray, w: CudaMatrix, norm: torch.Tensor, eps: float, act: int,
        kind: torch.dtype,
    ) -> CudaArray | None:  # fmt: skip
        """act(gate) · up in one product, where that is best; of some tokens in this type."""
        segment, n, rows = w.segments[0], x.shape[0], w.rows // 2
        if self.machine.interpreted or len(w.segments) > 1 or rows % TILE:
            return None
        many = n > launch.SOME
        mine = segment.format.multiply if self.machine.hopper else self.kind_of(segment.format, n)
        if mine is torch.float32:
            return None
        if many and not (self.exact_batches or self.machine.hopper):
            if mine is not torch.bfloat16:
                return None
            prepared = self.prepare(x, w.cols, norm, eps, 0, mine)
            return self.new(self.gated_by_library(prepared, segment, act, kind))
        if n <= few.FEW:
            out = self.machine.empty(n, rows)
            if few.product_few(self.machine, x.values, segment, norm, eps, out, act=act):
                return self.new(out)
        if n <= few.FEW or (segment.format.bits and not many):
            kind = torch.float32
        prepared = self.prepare(x, w.cols, norm, eps, 0, mine)
        return self.new(self.gated(prepared, segment, act, kind))

    def _linear(
        self, x: Array, w: CudaMatrix, norm: Array | None = None, eps: float = 0.0, *, act: int = 0,
        bias: torch.Tensor | None = None, into: Array | None = None, fine: bool = False,
    ) -> Array:  # fmt: skip
        cols, shape = w.cols, (x.shape[0], w.rows)
        wanted = 2 * cols if act else cols
        need(x.shape[1] == wanted, f"x of shape {x.shape} where {wanted} columns are needed")
        need(into is None or into.shape == shape, f"into must be {shape}")
        weight = None if norm is None else row_of(norm, cols, "norm")
        out = self.new(self.machine.empty(*shape)) if into is None else into
        if shape[0]:
            to = Sum(values_of(out), bias, into is not None)
            array_of(out).pending = self._multiply(array_of(x), w, weight, eps, act, to, fine)
        return out

    def _multiply(
        self, x: CudaArray, w: CudaMatrix, norm: torch.Tensor | None, eps: float, act: int,
        to: Sum, fine: bool,
    ) -> Slices | None:  # fmt: skip
        """Products with all segments; what is returned is still to be added."""
        if norm is not None and not fine and x.shape[0] <= few.FEW and few.product_two(
            self.machine, x.values, w.segments, norm, eps, to.out, to.bias, to.into
        ):  # fmt: skip
            return None
        made: dict[torch.dtype, Prepared] = {}
        segments, start = self._at_once(w, x.shape[0], fine), 0
        for segment in segments:
            mine = slice(start, start + segment.rows)
            out, bias = to.out[:, mine], None if to.bias is None else to.bias[mine]
            start += segment.rows
            if not act and x.shape[0] <= few.FEW and few.product_few(
                self.machine, x.values, segment, norm, eps, out, bias, to.into, fine
            ):  # fmt: skip
                continue
            kind = self.kind_of(segment.format, x.shape[0], fine)
            if kind not in made:
                made[kind] = self.prepare(x, w.cols, norm, eps, act, kind, fine)
            pending = self.product(made[kind], segment, Sum(out, bias, to.into))
            if pending is not None:
                if len(segments) == 1:
                    return pending
                pending.join(out)
        return None

    def _at_once(self, w: CudaMatrix, n: int, fine: bool) -> Sequence[Segment]:
        """What so many tokens are multiplied with: of many, quantised segments become one."""
        packed = [segment.format for segment in w.segments if segment.format.bits]
        several = 1 < len(packed) == len(w.segments)
        if n <= launch.SOME or fine or self.machine.interpreted or not several:
            return w.segments
        return [self.expanded(w.segments, self.kind_of(packed[0], n))]
