"""Takes a model's tensors out of a file: once to check them all, once to pack them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError, RequestError
from quire.models.extent import blocks_ahead
from quire.ops import Array, Matrix, Ops, Part
from quire.weights.file import TensorFacts, WeightFile
from quire.weights.gguf_format import quote
from quire.weights.quant import GGMLType, dequantize, quantize_q4_0, quantize_q8_0

ProgressFn = Callable[[int, int], None]
Rows = tuple[str, int] | tuple[str, int, slice | NDArray[np.intp]]
"""A tensor's name, the rows it must have, and which of them are meant if not all.

A tensor has as many rows as all its dimensions but the last hold together: experts [n, rows, cols]
are n * rows rows, and a single dimension is one row."""

QUANTIZE: Final = ("q8_0", "q4_0")
"""What matrices of floats can be turned into while they are loaded."""
_FLOATS: Final = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_WRITERS: Final = {GGMLType.Q8_0: quantize_q8_0, GGMLType.Q4_0: quantize_q4_0}
# With four bits these lose most, and llama.cpp's tools spare them as well.
_SPARED: Final = ("token_embd.weight", "output.weight")
_CHUNK: Final = 1 << 22
# Read elsewhere, known from the settings, or of use only to kernels that round activations so.
_UNUSED: Final = ("rope_freqs.weight", ".attn_rot_embd.weight", ".input_scale")


class Loader(Protocol):
    """How a model asks for its tensors."""

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""

    def matrix(self, cols: int, *parts: Rows, exact: bool = False) -> Matrix:
        """Tensors of `cols` columns stacked along rows into one matrix.

        An `exact` one stays as it is in the file, whatever other matrices are turned into.
        """

    def experts(self, count: int, cols: int, *parts: Rows) -> Matrix:
        """Tensors [count, rows, cols] as one matrix, each expert's rows a part of its own."""

    def vector(self, *parts: Rows) -> Array:
        """One-dimensional tensors, one after the other, in float32."""

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A small tensor on the host, in float32."""


class TensorCheck:
    """Notes what is missing or misshaped, and the bytes that will be packed."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._faults: list[str] = []
        self._asked: set[str] = set()
        self._matrices: set[str] = set()
        self.nbytes = 0

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self._file.tensors

    def matrix(self, cols: int, *parts: Rows, exact: bool = False) -> Matrix:
        """Checks each part; there is no matrix yet."""
        for name, rows, *_ in parts:
            tensor = self._file.tensors.get(name)
            if tensor is not None and tensor.shape and _flat(tensor) == (rows, cols):
                self._note(name, tensor)
            else:
                self._check(name, (rows, cols))
        if not exact:
            self._matrices.update(name for name, *_ in parts)

    def experts(self, count: int, cols: int, *parts: Rows) -> Matrix:
        """Checks each part; there is no matrix yet."""
        for name, rows, *_ in parts:
            self._check(name, (count, rows, cols))
            self._matrices.add(name)

    def vector(self, *parts: Rows) -> Array:
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
        self.nbytes += tensor.nbytes  # once for each matrix that takes rows of it

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

    def refuse_idle(self, quantize: str | None) -> None:
        """A setting that would turn no matrix into blocks is refused."""
        tensors = {name: self._file.tensors[name] for name in self._matrices}
        if quantize and all(loaded_type(n, t, quantize) == t.type for n, t in tensors.items()):
            raise RequestError(
                f"quantize is {quantize}, but {self._file.path} has no matrix of 16 or 32 bits "
                "that it could turn into such blocks; leave it out"
            )


def _counted(n: int, one: str, several: str) -> str:
    return f"1 tensor {one}" if n == 1 else f"{n} tensors {several}"


class TensorLoader:
    """Packs tensors for a device, and lets go of the file's pages behind itself.

    With `quantize`, matrices of floats become blocks of that type on the way.
    """

    def __init__(
        self, file: WeightFile, ops: Ops, total: int, progress: ProgressFn | None,
        quantize: str | None = None,
    ) -> None:  # fmt: skip
        self._file = file
        self._ops = ops
        self._total = total
        self._done = 0
        self._progress = progress
        self._quantize = quantize

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self._file.tensors

    def matrix(self, cols: int, *parts: Rows, exact: bool = False) -> Matrix:
        """Tensors of `cols` columns stacked along rows into one matrix."""
        return self._pack([self._part(cols, part, exact) for part in parts], parts)

    def experts(self, count: int, cols: int, *parts: Rows) -> Matrix:
        """Tensors [count, rows, cols] as one matrix, each expert's rows a part of its own."""
        split = []
        for name, rows, *_ in parts:
            type, _, _, data = self._part(cols, (name, count * rows), exact=False)
            split += [(type, rows, cols, expert) for expert in np.split(data, count)]
        return self._pack(split, parts)

    def _pack(self, packed: list[Part], parts: tuple[Rows, ...]) -> Matrix:
        matrix = self._ops.pack(packed)
        for name, *_ in parts:
            self._file.release(name)
            self._advance(self._file.tensors[name].nbytes)
        return matrix

    def vector(self, *parts: Rows) -> Array:
        """One-dimensional tensors, one after the other, in float32."""
        values = [self._floats(name)[where[0] if where else slice(None)]
                  for name, _, *where in parts]  # fmt: skip
        return self._ops.vector(np.concatenate(values))

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A small tensor on the host, in float32."""
        return self._floats(name)

    def _floats(self, name: str) -> NDArray[np.float32]:
        tensor = self._file.tensors[name]
        self._advance(tensor.nbytes)
        return dequantize(self._file.data(name), tensor.type, tensor.shape)

    def _part(self, cols: int, part: Rows, exact: bool) -> Part:
        """Rows of a matrix as they will be packed."""
        name, rows, *where = part
        tensor = self._file.tensors[name]
        data = self._file.data(name)
        if where:
            data = np.ascontiguousarray(data.reshape(rows, -1)[where[0]])
            rows = len(data)
        type = tensor.type if exact else loaded_type(name, tensor, self._quantize)
        if type != tensor.type:
            data = _requantized(data.reshape(rows, -1), tensor.type, cols, type)
        return int(type), rows, cols, data.reshape(-1)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self._total)


def loaded_type(name: str, tensor: TensorFacts, quantize: str | None) -> GGMLType:
    """The type a matrix has in memory: rows that are not whole blocks stay floats."""
    if quantize is None or tensor.type not in _FLOATS or len(tensor.shape) < 2:
        return tensor.type
    wanted = GGMLType.Q8_0 if name in _SPARED else GGMLType[quantize.upper()]
    return wanted if tensor.shape[-1] % wanted.block_size == 0 else tensor.type


def loaded_bytes(file: WeightFile, quantize: str | None) -> int:
    """About how much the weights of a file will take in memory."""
    ahead = blocks_ahead(file)
    return sum(
        loaded_type(name, tensor, quantize).nbytes(tensor.shape) if tensor.shape else tensor.nbytes
        for name, tensor in file.tensors.items()
        if not name.startswith(ahead)
    )


def _requantized(
    rows: NDArray[np.uint8], stored: GGMLType, cols: int, type: GGMLType
) -> NDArray[np.uint8]:
    """Rows of floats as blocks, some at a time so that few floats are held at once."""
    out = np.empty((len(rows), type.nbytes((cols,))), np.uint8)
    step = max(_CHUNK // cols, 1)
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        out[at : at + step] = _WRITERS[type](dequantize(some.ravel(), stored, (len(some), cols)))
    return out


def _flat(tensor: TensorFacts) -> tuple[int, int]:
    return prod(tensor.shape[:-1]), tensor.shape[-1]
