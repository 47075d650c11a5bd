"""Products with weights, which are held as float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quire.ops import Array, Float32, Int32, Matrix, Ops, Part
from quire.ops.passing import InPlace, Passage
from quire.ops.reference import experts, matrices
from quire.ops.reference.table.arrays import Arrays, need_same, row_of, values_of
from quire.ops.reference.table.memory import need

Dequantize = Callable[[NDArray[np.uint8], int, tuple[int, int]], Float32]
"""The values of a part: its bytes, ggml type, rows and columns."""


@dataclass(frozen=True)
class HostMatrix:
    """The values of a weight, part by part."""

    parts: list[Float32]

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(len(part) for part in self.parts)

    @property
    def cols(self) -> int:
        """Columns of each part."""
        return int(self.parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return sum(part.nbytes for part in self.parts)

    @property
    def values(self) -> Float32:
        """All parts, [rows, cols]."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    def stack(self, count: int, rows: int, cols: int) -> Float32:
        """The matrices of experts, [experts, rows, cols]."""
        need(self.cols == cols, f"{self.cols} columns where {cols} are needed")
        need(len(self.parts) % count == 0, f"{len(self.parts)} parts for {count} experts")
        each = [np.concatenate(self.parts[e::count]) for e in range(count)]
        need(all(len(part) == rows for part in each), f"an expert has other than {rows} rows")
        return np.stack(each)


def matrix_of(w: Matrix) -> HostMatrix:
    """A matrix that this device made."""
    if not isinstance(w, HostMatrix):
        raise TypeError(f"{type(w).__name__} is not a matrix of the reference")
    return w


class Matrices(Arrays):
    """The group `MatrixOps` of the table."""

    def __init__(self, dequantize: Dequantize) -> None:
        super().__init__()
        self._dequantize = dequantize

    def expect(self, n_bytes: int) -> None:
        """Each matrix is an array of its own."""

    def passage(self, n_bytes: int) -> Passage:
        """Matrices that are packed again, and let go."""
        return InPlace(cast(Ops, self))

    def pack(self, parts: Sequence[Part]) -> Matrix:
        """One matrix from parts stacked along rows."""
        need(parts, "a matrix needs at least one part")
        need(len({cols for _, _, cols, _ in parts}) == 1, "parts of several widths")
        return HostMatrix(
            [self._dequantize(data, type, (rows, cols)) for type, rows, cols, data in parts]
        )

    def packed_bytes(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """What `pack` would hold for parts of these types, rows and columns."""
        need(all(rows > 0 and cols > 0 for _, rows, cols in parts), "an empty part")
        return sum(4 * rows * cols for _, rows, cols in parts)

    def embed(self, table: Matrix, ids: Int32, scale: float = 1.0) -> Array:
        """Rows of a matrix by id, times scale."""
        need(((ids >= 0) & (ids < table.rows)).all(), f"an id outside {table.rows} rows")
        return self.new(matrices.embed(matrix_of(table).values, ids, scale))

    def linear(
        self, x: Array, w: Matrix, norm: Array | None = None, eps: float = 0.0, *,
        bias: Array | None = None, into: Array | None = None,
    ) -> Array:  # fmt: skip
        """w · x + bias, or of rms_norm(x); added to `into` and returned when that is given."""
        return self._linear(x, w, norm, eps, 0, bias, into)

    def network(
        self, x: Array, gate_up: Matrix, down: Matrix, norm: Array, eps: float, act: int,
        into: Array | None = None,
    ) -> Array:  # fmt: skip
        """down · (act(gate) · up), with gate and up of rms_norm(x); added to `into` if given."""
        need(act in (1, 2), f"act {act} is unknown")
        return self._linear(self.linear(x, gate_up, norm, eps), down, None, 0.0, act, None, into)

    def _linear(
        self, x: Array, w: Matrix, norm: Array | None, eps: float, act: int, bias: Array | None,
        into: Array | None,
    ) -> Array:  # fmt: skip
        need(act in (0, 1, 2) and not (act and norm), f"act {act} beside a norm, or unknown")
        cols = 2 * w.cols if act else w.cols
        need(x.shape[1] == cols, f"x of shape {x.shape} where {cols} columns are needed")
        shape = x.shape[0], w.rows
        need(into is None or into.shape == shape, f"into must be {shape}")
        out = matrices.linear(
            values_of(x), matrix_of(w).values,
            norm=None if norm is None else row_of(norm, w.cols, "norm"), eps=eps, act=act,
            bias=None if bias is None else row_of(bias, w.rows, "bias"),
            into=None if into is None else values_of(into), exact=True,
        )  # fmt: skip
        if into is None:
            return self.new(out)
        values_of(into)[:] = out
        return into

    def linear_int16(self, x: Array, w: Matrix, norm: Array, eps: float) -> Array:
        """w · rms_norm(x); here activations keep all their bits anyway."""
        return self.linear(x, w, norm, eps)

    def experts(
        self, x: Array, router: Matrix, gate_up: Matrix, down: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float, into: Array,
    ) -> Array:  # fmt: skip
        """Adds to `into` what the `n_used` likeliest experts make of rms_norm(x)."""
        need_same("experts", x, into)
        need(router.cols == x.shape[1], f"router has {router.cols} columns")
        need(1 <= n_used <= router.rows, f"n_used is {n_used}; there are {router.rows} experts")
        values_of(into)[:] = experts.experts(
            values_of(x), matrix_of(router).values,
            matrix_of(gate_up).stack(router.rows, 2 * down.cols, x.shape[1]),
            matrix_of(down).stack(router.rows, x.shape[1], down.cols), n_used,
            row_of(norm, x.shape[1], "norm"), eps, normalize, scale, values_of(into), exact=True,
        )  # fmt: skip
        return into

    def experts_in(
        self, x: Array, router: Matrix, gate_up: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float,
    ) -> tuple[Array, Array]:  # fmt: skip
        """The first half: the choice, and the middle."""
        count, width = router.rows, x.shape[1]
        need(router.cols == width, f"router has {router.cols} columns")
        need(1 <= n_used <= count, f"n_used is {n_used}; there are {count} experts")
        chosen, shares, middle = experts.experts_in(
            values_of(x), matrix_of(router).values,
            matrix_of(gate_up).stack(count, gate_up.rows // count, width), n_used,
            row_of(norm, width, "norm"), eps, normalize, scale, exact=True,
        )  # fmt: skip
        return self.new(np.hstack([chosen, shares]).astype(np.float32)), self.new(middle)

    def experts_out(
        self, middle: Array, chosen: Array, count: int, down: Matrix, into: Array
    ) -> Array:
        """The second half: adds to `into` what `down` makes of it."""
        ids, shares = np.split(values_of(chosen), 2, axis=1)
        need(((ids >= 0) & (ids < count)).all(), f"an expert that is not one of {count}")
        values_of(into)[:] = experts.experts_out(
            values_of(middle), ids.astype(np.int64), shares.astype(np.float64),
            matrix_of(down).stack(count, into.shape[1], down.cols), values_of(into), exact=True,
        )  # fmt: skip
        return into
