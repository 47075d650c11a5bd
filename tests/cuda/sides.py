"""The same calls on the reference and on the GPU, each with memory of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops import Ops
from quire.ops.cuda import CudaOps, Machine
from quire.ops.reference.table import ReferenceOps
from quire.weights.quant import GGMLType, dequantize

GPU = torch.cuda.is_available()


@cache
def cuda() -> CudaOps:
    """The table on the GPU, or interpreted."""
    return CudaOps(Machine(0 if GPU else None))


@cache
def reference() -> ReferenceOps:
    """The table by its definitions."""

    def values(data: NDArray[np.uint8], kind: int, shape: tuple[int, int]) -> NDArray[np.float32]:
        return dequantize(data, GGMLType(kind), shape)

    return ReferenceOps(values)


class Bytes:
    """Pages of a side, poisoned; every byte of the reference's may be NaN's too."""

    def __init__(self, ops: Ops, n_pages: int, page_bytes: int, poison: int = 0xFF) -> None:
        self.on_gpu = GPU and isinstance(ops, CudaOps)
        self.shape = n_pages, page_bytes
        if self.on_gpu:
            self._tensor = torch.full(self.shape, poison, dtype=torch.uint8, device="cuda")
            self.base = int(self._tensor.data_ptr())
        else:
            room = np.full(n_pages * page_bytes + 64, poison, np.uint8)
            start = -room.ctypes.data % 64
            self._array = room[start : start + n_pages * page_bytes].reshape(self.shape)
            self.base = self._array.ctypes.data

    def read(self) -> NDArray[np.uint8]:
        """A copy of all bytes."""
        if self.on_gpu:
            found: NDArray[np.uint8] = self._tensor.cpu().numpy()
            return found
        return self._array.copy()

    def write(self, values: NDArray[np.uint8]) -> None:
        """Replaces all bytes."""
        if self.on_gpu:
            self._tensor.copy_(torch.from_numpy(values))
        else:
            self._array[:] = values


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> None:
    """Two results are the same, bit by bit."""
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def close(got: NDArray[Any], want: NDArray[Any], limit: float) -> None:
    """Two results differ by no more than a part of the largest value."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    scale = np.abs(want).max(initial=1e-6)
    assert np.abs(got - want).max(initial=0) <= limit * scale
