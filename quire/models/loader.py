"""Takes a model's tensors out of a file and packs them for a device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.ops import Array, Heads, Matrix, Ops, Rope, RopeHandle
from quire.ops import Part as RowsPart
from quire.weights.file import TensorFacts, WeightFile
from quire.weights.quant import GGMLType, dequantize
from quire.weights.quantize import quantize

ProgressFn = Callable[[int, int], None]
Rows = tuple[str, int] | tuple[str, int, slice | NDArray[np.intp]]
"""A tensor's name, the rows it must have, and which of them are meant if not all.

A tensor has as many rows as all its dimensions but the last hold together: experts [n, rows, cols]
are n * rows rows, and a single dimension is one row."""

QUANTIZE: Final = ("q8_0", "q4_0")
"""What matrices of floats can be turned into while they are loaded."""
_FLOATS: Final = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
# With four bits these lose most, and llama.cpp's tools spare them as well.
_SPARED: Final = ("token_embd.weight", "output.weight")
_CHUNK: Final = 1 << 22


EMBEDDING: Final = "embedding"
OUTPUT: Final = "output"
MIXER: Final = "mixer"
NETWORK: Final = "network"
EXPERTS: Final = "experts"
DOWN: Final = "experts' down"
"""The last matrix of experts, which may be on another device than their first ones."""


class Part(NamedTuple):
    """What of a model is on one device as a whole: one of its ends, or one of these of a layer."""

    kind: str
    layer: int = -1


class Place(NamedTuple):
    """Where a part is: a device by name, and its operations."""

    name: str
    ops: Ops


class Loader(Protocol):
    """How a model asks for its tensors."""

    def on(self, ops: Ops) -> Loader:
        """The same for a part of the model that is on another device."""

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


@dataclass(frozen=True)
class Kit:
    """What a model is built with: operations, tensors, and how K and V are stored.

    A model on several devices is told by `place` where each of its parts is.
    """

    ops: Ops
    load: Loader
    type_k: str
    type_v: str
    place: Callable[[Part], Place] | None = None
    name: str = ""
    """The device that this kit is for, where there are several."""
    _ropes: dict[tuple[int, int], tuple[Rope, RopeHandle]] = field(default_factory=dict)

    def at(self, kind: str, layer: int = -1) -> Kit:
        """The kit for a part of the model."""
        if self.place is None:
            return self
        name, ops = self.place(Part(kind, layer))
        return replace(self, ops=ops, load=self.load.on(ops), name=name)

    def group(self, name: str) -> str:
        """What a group of memory is called: layers on different devices share no pages."""
        return f"{name} on {self.name}" if self.name else name

    def rope(self, rope: Rope) -> RopeHandle:
        """The handle of a rotary embedding, one for all layers on a device."""
        key = id(self.ops), id(rope)
        if key not in self._ropes:
            self._ropes[key] = rope, self.ops.rope(rope)
        return self._ropes[key][1]

    def heads(self, shape: Heads, q_norm: Array | None, k_norm: Array | None, eps: float) -> Any:
        """The handle of a layer's attention; the norms are per head and may be None."""
        return self.ops.heads(shape, self.type_k, self.type_v, q_norm, k_norm, eps)


class TensorLoader:
    """Packs tensors for a device, one matrix after the other.

    With `quantize`, matrices of floats become blocks of that type on the way. With `stored`, a
    device is told where bytes lie, and reads them by itself.
    """

    def __init__(
        self, file: WeightFile, ops: Ops, total: int, progress: ProgressFn | None,
        quantize: str | None = None, stored: bool = False,
    ) -> None:  # fmt: skip
        self._file, self._stored = file, stored
        self._ops = ops
        self._total = total
        self._done = [0]  # of all devices together
        self._progress = progress
        self._quantize = quantize

    def on(self, ops: Ops) -> TensorLoader:
        """The same for a part of the model that is on another device."""
        twin = copy.copy(self)
        twin._ops = ops
        return twin

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
            size = data.size // count
            split += [(type, rows, cols, data[i * size : (i + 1) * size]) for i in range(count)]
        return self._pack(split, parts)

    def _pack(self, packed: list[RowsPart], parts: tuple[Rows, ...]) -> Matrix:
        matrix = self._ops.pack(packed)
        for name, *_ in parts:
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

    def _part(self, cols: int, part: Rows, exact: bool) -> RowsPart:
        """Rows of a matrix as they will be packed."""
        name, rows, *where = part
        tensor = self._file.tensors[name]
        if self._stored and not where and loaded_type(name, tensor, self._quantize) == tensor.type:
            stored: Any = self._file.stored(name)
            if stored is not None:
                return int(tensor.type), rows, cols, stored
        data = self._file.data(name)
        if where:
            data = np.ascontiguousarray(data.reshape(rows, -1)[where[0]])
            rows = len(data)
        type = tensor.type if exact else loaded_type(name, tensor, self._quantize)
        if type != tensor.type:
            data = _requantized(data.reshape(rows, -1), tensor.type, cols, type)
        return int(type), rows, cols, data.reshape(-1)

    def _advance(self, nbytes: int) -> None:
        self._done[0] += nbytes
        if self._progress:
            self._progress(self._done[0], self._total)


def loaded_type(name: str, tensor: TensorFacts, quantize: str | None) -> GGMLType:
    """The type a matrix has in memory: rows that are not whole blocks stay floats."""
    if quantize is None or tensor.type not in _FLOATS or len(tensor.shape) < 2:
        return tensor.type
    wanted = GGMLType.Q8_0 if name in _SPARED else GGMLType[quantize.upper()]
    return wanted if tensor.shape[-1] % wanted.block_size == 0 else tensor.type


def _requantized(
    rows: NDArray[np.uint8], stored: GGMLType, cols: int, type: GGMLType
) -> NDArray[np.uint8]:
    """Rows of floats as blocks, some at a time so that few floats are held at once."""
    out = np.empty((len(rows), type.nbytes((cols,))), np.uint8)
    step = max(_CHUNK // cols, 1)
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        out[at : at + step] = quantize(dequantize(some.ravel(), stored, (len(some), cols)), type)
    return out
