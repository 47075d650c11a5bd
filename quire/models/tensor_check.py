"""Holds a file's tensors against what its model needs, before any of them is read."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.models.active import blocks_ahead
from quire.models.loader import Rows, loaded_type
from quire.ops import Matrix, Ops, Refused
from quire.weights.file import TensorFacts, WeightFile
from quire.weights.gguf_format import quote

# Read elsewhere, known from the settings, or of use only to kernels that round activations so.
_UNUSED: Final = ("rope_freqs.weight", ".attn_rot_embd.weight", ".input_scale")


@dataclass(frozen=True)
class MatrixSize:
    """A matrix that is not there yet: its shape, and the bytes that it will hold."""

    rows: int
    cols: int
    nbytes: int


class _Packed:
    """A matrix as its parts are stacked: the last rows of one may share a tile with the next."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._parts: list[tuple[int, int, int]] = []
        self.nbytes = 0

    def add(self, parts: list[tuple[int, int, int]]) -> int:
        """What the matrix grows by."""
        before, now = self.nbytes, self._ops.packed_bytes([*self._parts, *parts])
        self._parts += parts
        self.nbytes = now
        return now - before


class TensorCheck:
    """A loader that loads nothing: it notes what is missing or misshaped, and what would be packed.

    `packed` is what each tensor will take in memory, by the packer's own arithmetic.
    """

    def __init__(self, file: WeightFile, ops: Ops, quantize: str | None = None) -> None:
        self._file = file
        self._ops = ops
        self._quantize = quantize
        self._faults: list[str] = []
        self._asked: set[str] = set()
        self._matrices: set[str] = set()
        self.packed: Counter[str] = Counter()
        self._read = [0]

    @property
    def nbytes(self) -> int:
        """Bytes of the file that loading will read."""
        return self._read[0]

    def on(self, ops: Ops) -> TensorCheck:
        """The same for a part of the model that is on another device; what is noted is shared."""
        twin = copy.copy(self)
        twin._ops = ops
        return twin

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self._file.tensors

    def matrix(self, cols: int, *parts: Rows, exact: bool = False) -> Matrix:
        """Checks each part; there is no matrix yet."""
        packed = _Packed(self._ops)
        taken = 0
        for name, rows, *where in parts:
            tensor = self._file.tensors.get(name)
            if tensor is not None and tensor.shape and _flat(tensor) == (rows, cols):
                self._note(name, tensor)
                some = rows_taken(rows, where)
                self._pack(packed, name, [(some, cols)], exact)
                taken += some
            else:
                self._check(name, (rows, cols))
        if not exact:
            self._matrices.update(name for name, *_ in parts)
        return MatrixSize(taken, cols, packed.nbytes)

    def experts(self, count: int, cols: int, *parts: Rows) -> Matrix:
        """Checks each part; there is no matrix yet."""
        packed = _Packed(self._ops)
        for name, rows, *_ in parts:
            if self._check(name, (count, rows, cols)):
                self._pack(packed, name, [(rows, cols)] * count, exact=False)
            self._matrices.add(name)
        return MatrixSize(count * sum(rows for _, rows, *_ in parts), cols, packed.nbytes)

    def vector(self, *parts: Rows) -> Any:
        """Checks each part; there is no array yet."""
        for name, rows, *_ in parts:
            self._check(name, (rows,))

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Checks the tensor; there are only zeros yet.

        Faults are raised at once, so that nobody makes zeros of a size that is only claimed.
        """
        if not self._check(name, shape):
            self.raise_faults()
        return np.zeros(shape, np.float32)

    def _pack(
        self, packed: _Packed, name: str, shapes: list[tuple[int, int]], exact: bool
    ) -> None:  # fmt: skip
        """Notes what parts of these shapes, all from one tensor, will take in a matrix."""
        tensor = self._file.tensors[name]
        type = tensor.type if exact else loaded_type(name, tensor, self._quantize)
        try:
            self.packed[name] += packed.add([(int(type), *shape) for shape in shapes])
        except Refused as error:
            self._faults.append(f"{name}: {error}")

    def _check(self, name: str, shape: tuple[int, ...]) -> bool:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            self._faults.append(f"{name}: missing, should be {list(shape)}")
        elif tensor.shape != shape:
            self._faults.append(f"{name}: is {list(tensor.shape)}, should be {list(shape)}")
        else:
            self._note(name, tensor)
            return True
        return False

    def _note(self, name: str, tensor: TensorFacts) -> None:
        self._asked.add(name)
        self._read[0] += tensor.nbytes  # once for each matrix that takes rows of it

    def raise_faults(self) -> None:
        """One error that lists every fault."""
        if self._faults:
            faults = "\n  ".join(self._faults)
            count = _counted(len(self._faults), "is", "are")
            raise ModelError(f"{self._file.path}: {count} not as needed:\n  {faults}")

    def refuse_rest(self) -> None:
        """Tensors that nobody asked for would change what is computed, so they are refused."""
        arch, ahead = self._file.get_str("general.architecture"), blocks_ahead(self._file)
        rest = [name for name in self._file.tensors if name not in self._asked]
        left = [n for n in rest if not n.endswith(_UNUSED) and not n.startswith(ahead)]
        if left:
            named = ", ".join(quote(name) for name in left[:8])
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            count = _counted(len(left), "has", "have")
            raise ModelError(
                f"{self._file.path}: {count} no place in Quire's {arch}: {named}{more}"
            )

    @property
    def idle(self) -> bool:
        """Whether `quantize` would turn no matrix into blocks."""
        tensors = {name: self._file.tensors[name] for name in self._matrices}
        return all(loaded_type(n, t, self._quantize) == t.type for n, t in tensors.items())


def _counted(n: int, one: str, several: str) -> str:
    return f"1 tensor {one}" if n == 1 else f"{n} tensors {several}"


def _flat(tensor: TensorFacts) -> tuple[int, int]:
    return prod(tensor.shape[:-1]), tensor.shape[-1]


def rows_taken(rows: int, where: list[slice | NDArray[np.intp]]) -> int:
    """How many rows are meant."""
    if not where:
        return rows
    return len(range(rows)[where[0]]) if isinstance(where[0], slice) else len(where[0])
