"""Arrays on the GPU, and what is done to each of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import numpy as np
import torch

from quire.ops import Array, Float32, Int32
from quire.ops.cuda.kernels import rows
from quire.ops.cuda.machine import Machine, OnDevice, need, power_of_two

_WIDEST = 4096  # columns that a kernel over rows takes at a time


class Pending(Protocol):
    """Slices of a product, or what is yet to be computed."""

    def join(self, base: torch.Tensor) -> None:
        """Adds them one after the other, then to `base` or over it."""


@dataclass(frozen=True)
class Later:
    """Values that are written when they are first read, as float32 or in the type that is read."""

    write: Callable[[torch.Tensor], None]

    def join(self, base: torch.Tensor) -> None:
        """Writes them over `base`."""
        self.write(base)


class CudaArray:
    """A float32 matrix on the GPU.

    A product may leave its slices for the next reader to add: until then they are `pending`.
    """

    __slots__ = ("__weakref__", "base", "pending")

    def __init__(self, values: torch.Tensor) -> None:
        self.base = values
        """What the pending slices are added to, or written over; without any, the values."""
        self.pending: Pending | None = None

    @property
    def values(self) -> torch.Tensor:
        """The values; what is pending is added first."""
        if self.pending is not None:
            self.pending.join(self.base)
            self.pending = None
        return self.base

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, cols = self.base.shape
        return rows, cols

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return int(self.base.numel()) * 4


def array_of(x: Array) -> CudaArray:
    """An array that this device made."""
    if not isinstance(x, CudaArray):
        raise TypeError(f"{type(x).__name__} is not an array of the GPU")
    return x


def values_of(x: Array) -> torch.Tensor:
    """The values of an array that this device made."""
    return array_of(x).values


def row_of(x: Array, count: int, what: str) -> torch.Tensor:
    """The values of a vector of this length."""
    values = values_of(x).view(-1)
    need(len(values) == count, f"{what} has {len(values)} values where {count} are needed")
    return values


def need_same(what: str, x: Array, other: Array) -> None:
    """Refuses arrays of two shapes."""
    need(x.shape == other.shape, f"{what}: arrays of {x.shape} and {other.shape}")


def block_of(cols: int) -> int:
    """Columns that a kernel over rows takes at a time: a matter of the width alone."""
    return min(power_of_two(cols, 32), _WIDEST)


class Arrays:
    """The group `ArrayOps` of the table."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._arrays: WeakSet[CudaArray] = WeakSet()

    def new(self, values: torch.Tensor) -> CudaArray:
        """An array of these values, which it keeps."""
        made = CudaArray(values)
        if self.machine.interpreted:
            self._arrays.add(made)
        return made

    @property
    def compute_bytes(self) -> int:
        """Bytes held for arrays: all that torch has of the GPU and no matrix holds."""
        if self.machine.interpreted:
            return sum(each.nbytes for each in self._arrays)
        return max(self.machine.reserved - self.machine.weights, 0)

    def trim(self) -> None:
        """Returns to the system what no array uses."""
        self.machine.trim()

    def vector(self, values: Float32) -> Array:
        """A one-row array from host values."""
        return self.array(np.reshape(values, (1, -1)))

    def array(self, values: Float32) -> Array:
        """An array from host values: a matrix, or one row."""
        return self.new(self.machine.send(np.atleast_2d(values).astype(np.float32, copy=False)))

    def numpy(self, x: Array) -> Float32:
        """A copy of the array's values on the host."""
        return self.machine.fetch(values_of(x))

    def take_rows(self, x: Array, rows: Int32 | OnDevice) -> Array:
        """Some rows of x."""
        if isinstance(rows, OnDevice):
            return self.new(values_of(x).index_select(0, rows.tensor))
        need(((rows >= 0) & (rows < x.shape[0])).all(), f"a row outside {x.shape[0]} rows")
        if len(rows) == x.shape[0] and (np.diff(rows) == 1).all():
            return self.new(values_of(x).clone())
        return self.new(values_of(x).index_select(0, self.machine.upload(rows)))

    def columns(self, x: Array, start: int, count: int) -> Array:
        """A copy of some columns."""
        inside = start >= 0 and count > 0 and start + count <= x.shape[1]
        need(inside, f"columns: {start} to {start + count} of {x.shape[1]}")
        part = values_of(x)[:, start : start + count]
        return self.new(part.clone(memory_format=torch.contiguous_format))

    def add_norm(self, into: Array, x: Array, weight: Array, eps: float) -> None:
        """Adds rms_norm(x) · weight to `into`."""
        need_same("add_norm", into, x)
        n, cols = x.shape
        row = row_of(weight, cols, "weight")
        if n:
            rows.add_norm[(n,)](values_of(into), values_of(x), row, cols, eps, BLOCK=block_of(cols))

    def gated_norm(
        self, x: Array, gate: Array, weight: Array, eps: float, group: int, gate_first: bool
    ) -> Array:
        """rms_norm over groups of columns, with a gate after or before."""
        need_same("gated_norm", x, gate)
        n, cols = x.shape
        need(group > 0 and cols % group == 0, f"groups of {group} in {cols} columns")
        row = values_of(weight).view(-1)
        need(len(row) in (group, cols), f"gated_norm: {len(row)} weights")
        out = self.machine.empty(n, cols)
        if n:
            rows.gated_norm[(n, cols // group)](
                values_of(x), values_of(gate), row, out, cols, group,
                group if len(row) == cols else 0, eps,
                FIRST=gate_first, BLOCK=block_of(group),
            )  # fmt: skip
        return self.new(out)

    def gate_sigmoid(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate), in place."""
        need_same("gate_sigmoid", x, gate)
        values_of(x).mul_(torch.sigmoid(values_of(gate)))
        return x

    def add_gated(self, into: Array, y: Array, gate: Array) -> None:
        """into += sigmoid(gate) · y, with one gate for each row."""
        need_same("add_gated", into, y)
        need(gate.shape == (y.shape[0], 1), f"gate must be one column of {y.shape[0]} rows")
        values_of(into).add_(values_of(y) * torch.sigmoid(values_of(gate)))

    def softcap(self, x: Array, cap: float) -> None:
        """Turns x into cap · tanh(x / cap), in place."""
        need(cap > 0, f"cap must be above 0, not {cap}")
        values_of(x).div_(cap).tanh_().mul_(cap)
