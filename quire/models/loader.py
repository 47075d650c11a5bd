"""Takes a model's tensors out of a file: once to check them all, once to pack them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from quire.errors import ModelError
from quire.ops import Array, Matrix, Ops
from quire.weights.gguf import GGUF
from quire.weights.quant import dequantize

ProgressFn = Callable[[int, int], None]
Rows = tuple[str, int]
"""A tensor's name and the rows it must have."""


class Loader(Protocol):
    """How a model asks for its tensors."""

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""

    def matrix(self, cols: int, *parts: Rows) -> Matrix:
        """Tensors of `cols` columns stacked along rows into one matrix."""

    def vector(self, *parts: Rows) -> Array:
        """One-dimensional tensors, one after the other, in float32."""


class TensorCheck:
    """Notes what is missing or misshaped, and the bytes that will be packed."""

    def __init__(self, file: GGUF) -> None:
        self._file = file
        self._faults: list[str] = []
        self.nbytes = 0

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self._file.tensors

    def matrix(self, cols: int, *parts: Rows) -> Matrix:
        """Checks each part; there is no matrix yet."""
        for name, rows in parts:
            self._check(name, (rows, cols))

    def vector(self, *parts: Rows) -> Array:
        """Checks each part; there is no array yet."""
        for name, rows in parts:
            self._check(name, (rows,))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            self._faults.append(f"{name}: missing, should be {list(shape)}")
        elif tensor.shape != shape:
            self._faults.append(f"{name}: is {list(tensor.shape)}, should be {list(shape)}")
        else:
            self.nbytes += tensor.nbytes

    def raise_faults(self) -> None:
        """One error that lists every fault."""
        if self._faults:
            faults = "\n  ".join(self._faults)
            count = len(self._faults)
            raise ModelError(f"{self._file.path}: {count} tensors are not as needed:\n  {faults}")


class TensorLoader:
    """Packs tensors for a device, and lets go of the file's pages behind itself."""

    def __init__(self, file: GGUF, ops: Ops, total: int, progress: ProgressFn | None) -> None:
        self._file = file
        self._ops = ops
        self._total = total
        self._done = 0
        self._progress = progress

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self._file.tensors

    def matrix(self, cols: int, *parts: Rows) -> Matrix:
        """Tensors of `cols` columns stacked along rows into one matrix."""
        packed = self._ops.pack(
            [(int(self._file.tensors[n].type), rows, cols, self._file.data(n)) for n, rows in parts]
        )
        for name, _ in parts:
            self._file.release(name)
            self._advance(self._file.tensors[name].nbytes)
        return packed

    def vector(self, *parts: Rows) -> Array:
        """One-dimensional tensors, one after the other, in float32."""
        values: list[Any] = []
        for name, _ in parts:
            tensor = self._file.tensors[name]
            values.append(dequantize(self._file.data(name), tensor.type, tensor.shape))
            self._advance(tensor.nbytes)
        return self._ops.vector(np.concatenate(values))

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self._total)
