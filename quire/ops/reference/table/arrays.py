"""Arrays and what is done to each of their values."""

from __future__ import annotations

from weakref import WeakSet

import numpy as np

from quire.ops import Array, Float32, Int32
from quire.ops.reference import experts, matrices, recurrent
from quire.ops.reference.table.memory import need


class HostArray:
    """A float32 matrix in NumPy."""

    def __init__(self, values: Float32) -> None:
        self.values = np.ascontiguousarray(np.atleast_2d(values), np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, cols = self.values.shape
        return rows, cols

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.values.nbytes


def values_of(x: Array) -> Float32:
    """The values of an array that this device made."""
    if not isinstance(x, HostArray):
        raise TypeError(f"{type(x).__name__} is not an array of the reference")
    return x.values


def row_of(x: Array, count: int, what: str) -> Float32:
    """The values of a vector of this length."""
    values = values_of(x).ravel()
    need(len(values) == count, f"{what} has {len(values)} values where {count} are needed")
    return values


def need_same(what: str, x: Array, other: Array) -> None:
    """Refuses arrays of two shapes."""
    need(x.shape == other.shape, f"{what}: arrays of {x.shape} and {other.shape}")


class Arrays:
    """The group `ArrayOps` of the table."""

    def __init__(self) -> None:
        self._arrays: WeakSet[HostArray] = WeakSet()

    def new(self, values: Float32) -> HostArray:
        """An array with a copy of these values."""
        made = HostArray(np.array(values, np.float32))
        self._arrays.add(made)
        return made

    @property
    def compute_bytes(self) -> int:
        """Bytes held for arrays."""
        return sum(each.nbytes for each in self._arrays)

    def trim(self) -> None:
        """Does nothing: NumPy holds nothing that no array uses."""

    def vector(self, values: Float32) -> Array:
        """A one-row array from host values."""
        return self.new(np.reshape(values, (1, -1)))

    def array(self, values: Float32) -> Array:
        """An array from host values: a matrix, or one row."""
        return self.new(values)

    def numpy(self, x: Array) -> Float32:
        """The array's values, without a copy."""
        return values_of(x)

    def take_rows(self, x: Array, rows: Int32) -> Array:
        """Some rows of x."""
        need(((rows >= 0) & (rows < x.shape[0])).all(), f"a row outside {x.shape[0]} rows")
        return self.new(values_of(x)[rows])

    def columns(self, x: Array, start: int, count: int) -> Array:
        """A copy of some columns."""
        inside = start >= 0 and count > 0 and start + count <= x.shape[1]
        need(inside, f"columns: {start} to {start + count} of {x.shape[1]}")
        return self.new(values_of(x)[:, start : start + count])

    def add_norm(self, into: Array, x: Array, weight: Array, eps: float) -> None:
        """Adds rms_norm(x) · weight to `into`."""
        need_same("add_norm", into, x)
        row = row_of(weight, x.shape[1], "weight")
        values_of(into)[:] = matrices.add_norm(values_of(into), values_of(x), row, eps)

    def gated_norm(
        self, x: Array, gate: Array, weight: Array, eps: float, group: int, gate_first: bool
    ) -> Array:
        """rms_norm over groups of columns, with a gate after or before."""
        need_same("gated_norm", x, gate)
        need(group > 0 and x.shape[1] % group == 0, f"groups of {group} in {x.shape[1]} columns")
        row = values_of(weight).ravel()
        need(len(row) in (group, x.shape[1]), f"gated_norm: {len(row)} weights")
        return self.new(
            recurrent.gated_norm(values_of(x), values_of(gate), row, eps, group, gate_first)
        )

    def gate_sigmoid(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate), in place."""
        need_same("gate_sigmoid", x, gate)
        values_of(x)[:] = recurrent.gate_sigmoid(values_of(x), values_of(gate))
        return x

    def add_gated(self, into: Array, y: Array, gate: Array) -> None:
        """into += sigmoid(gate) · y, with one gate for each row."""
        need_same("add_gated", into, y)
        need(gate.shape == (y.shape[0], 1), f"gate must be one column of {y.shape[0]} rows")
        values_of(into)[:] = experts.add_gated(values_of(into), values_of(y), values_of(gate))

    def softcap(self, x: Array, cap: float) -> None:
        """Turns x into cap · tanh(x / cap), in place."""
        need(cap > 0, f"cap must be above 0, not {cap}")
        values_of(x)[:] = matrices.softcap(values_of(x), cap)
