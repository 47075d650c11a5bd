"""Writes small GGUF files for tests, and the pieces of broken ones.

    write_gguf(path, {"general.architecture": "llama", "llama.block_count": 2},
               {"token_embd.weight": np.zeros((8, 4), np.float32)})

Values take the usual types: int is uint32 (int32 when negative, 64 bits when it must be), float is
float32, a list is an array. `Typed(ValueType.UINT8, 3)` or `Typed(ValueType.INT64, [1, 2])` says
another. A tensor is a float32 or float16 array, or `(GGMLType, its bytes, its shape)`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.weights.quant import GGMLType


class ValueType(IntEnum):
    """The value types of GGUF metadata."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


@dataclass(frozen=True)
class Typed:
    """A value, or a list of values, of a type that is given rather than guessed."""

    type: ValueType
    value: Any


Tensor: TypeAlias = NDArray[Any] | tuple[GGMLType, NDArray[np.uint8], Sequence[int]]
_CODES = dict(zip(ValueType, "BbHhIif?  Qqd", strict=True))


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a GGUF file and return its path."""
    path.write_bytes(gguf_bytes(metadata, tensors, version, alignment))
    return path


def write_split(
    folder: Path, name: str, count: int, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[Path]:
    """Write a model in parts, as llama.cpp splits them; the last holds what the others do not."""
    names = list(tensors)
    cuts = [*range(count), len(names)]
    paths = []
    for i in range(count):
        keys = {
            "split.no": Typed(ValueType.UINT16, i),
            "split.count": Typed(ValueType.UINT16, count),
            "split.tensors.count": Typed(ValueType.INT32, len(names)),
        }
        held = {key: tensors[key] for key in names[cuts[i] : cuts[i + 1]]}
        path = folder / f"{name}-{i + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, {**(metadata if i == 0 else {}), **keys}, held))
    return paths


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The bytes of a GGUF file; every tensor is padded to the alignment, the last one too."""
    metadata = dict(metadata)
    if alignment != 32:
        metadata.setdefault("general.alignment", alignment)
    described = b""
    data = b""
    for name, tensor in (tensors or {}).items():
        type, raw, shape = _tensor(tensor)
        described += encode_tensor(name, shape, type, len(data))
        data += raw.tobytes()
        data += bytes(-len(data) % alignment)
    head = header(version, len(tensors or {}), len(metadata))
    head += b"".join(encode_entry(key, value) for key, value in metadata.items()) + described
    return head + (bytes(-len(head) % alignment) + data if tensors else b"")


def header(version: int, tensor_count: int, entry_count: int) -> bytes:
    """The first 24 bytes of a file."""
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count)


def encode_string(text: str | bytes) -> bytes:
    """A length and the string's bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def encode_entry(key: str | bytes, value: Any) -> bytes:
    """A key with its type and value."""
    typed = value if isinstance(value, Typed) else _guess(value)
    if not isinstance(typed.value, list):
        return encode_string(key) + struct.pack("<I", typed.type) + _encode(typed)
    head = struct.pack("<IIQ", ValueType.ARRAY, typed.type, len(typed.value))
    items = b"".join(_encode(Typed(typed.type, item)) for item in typed.value)
    return encode_string(key) + head + items


def encode_tensor(name: str, shape: Sequence[int], type: int, offset: int) -> bytes:
    """A tensor's description; `shape` is in NumPy's order."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return encode_string(name) + sizes + struct.pack("<IQ", type, offset)


def _encode(typed: Typed) -> bytes:
    if typed.type == ValueType.STRING:
        return encode_string(typed.value)
    return struct.pack("<" + _CODES[typed.type], typed.value)


def _guess(value: Any) -> Typed:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ValueError("an empty list has no type: use Typed")
    if all(isinstance(item, str | bytes) for item in items):
        return Typed(ValueType.STRING, value)
    if all(isinstance(item, bool) for item in items):
        return Typed(ValueType.BOOL, value)
    if not all(isinstance(item, int) for item in items):
        return Typed(ValueType.FLOAT32, value)
    low, high = min(items), max(items)
    if low < 0:
        small = low >= -(2**31) and high < 2**31
        return Typed(ValueType.INT32 if small else ValueType.INT64, value)
    return Typed(ValueType.UINT32 if high < 2**32 else ValueType.UINT64, value)


def _tensor(tensor: Tensor) -> tuple[GGMLType, NDArray[np.uint8], Sequence[int]]:
    if isinstance(tensor, tuple):
        type, raw, shape = tensor
        assert raw.nbytes == type.nbytes(shape), (raw.nbytes, type, shape)
        return type, raw, shape
    types = {np.dtype(np.float32): GGMLType.F32, np.dtype(np.float16): GGMLType.F16}
    return types[tensor.dtype], np.frombuffer(tensor.tobytes(), dtype=np.uint8), tensor.shape
