"""Writes GGUF files, version 3: entries of metadata, descriptions of tensors, then their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, BinaryIO, Final

import numpy as np

from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray

__all__ = ["Planned", "encode_entry", "write_gguf"]

ALIGNMENT: Final = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_UINT64, _INT64 = 10, 11
_NUMBERS: Final = {
    np.dtype(np.uint8): 0, np.dtype(np.int8): 1, np.dtype(np.uint16): 2, np.dtype(np.int16): 3,
    np.dtype(np.uint32): _UINT32, np.dtype(np.int32): _INT32, np.dtype(np.float32): _FLOAT32,
    np.dtype(np.bool_): _BOOL, np.dtype(np.uint64): _UINT64, np.dtype(np.int64): _INT64,
    np.dtype(np.float64): 12,
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes it takes."""
        return self.type.nbytes(self.shape)


def encode_entry(key: str, value: Any) -> bytes:
    """A key with its value: a number, a text, a NumPy array, or a list of texts."""
    if isinstance(value, StringArray):
        value = value.to_list()
    if isinstance(value, np.ndarray):
        head = pack("<IIQ", _ARRAY, _NUMBERS[value.dtype], len(value))
        return _string(key) + head + value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, list):
        head = pack("<IIQ", _ARRAY, _STRING, len(value))
        return _string(key) + head + b"".join(map(_string, value))
    return _string(key) + _scalar(value)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return pack("<Q", len(raw)) + raw


def _scalar(value: bool | int | float | str) -> bytes:
    if isinstance(value, str):
        return pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return pack("<IB", _BOOL, value)
    if isinstance(value, float):
        return pack("<If", _FLOAT32, value)
    if value < 0:
        return pack("<Ii", _INT32, value) if value >= -(2**31) else pack("<Iq", _INT64, value)
    return pack("<II", _UINT32, value) if value < 2**32 else pack("<IQ", _UINT64, value)


def write_gguf(
    out: BinaryIO, entries: Sequence[bytes], tensors: Mapping[Planned, Iterable[bytes]]
) -> None:
    """Writes a file; each tensor's bytes come in pieces, one tensor after the other."""
    described, at = b"", 0
    for tensor in tensors:
        sizes = pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        described += _string(tensor.name) + sizes + pack("<IQ", tensor.type, at)
        at += _padded(tensor.nbytes)
    head = b"GGUF" + pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + described
    out.write(head + bytes(_padded(len(head)) - len(head)))
    for tensor, pieces in tensors.items():
        written = sum(out.write(piece) for piece in pieces)
        assert written == tensor.nbytes, (tensor, written)
        out.write(bytes(_padded(written) - written))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
