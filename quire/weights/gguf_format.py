"""The GGUF format: header, metadata, descriptions of tensors, read in file order.

Every count and length is held against the bytes that remain before anything is allocated for it,
and whatever breaks the format raises GGUFError with the file, the field and the offset or value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.errors import GGUFError
from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray, find_strings

__all__ = ["Reader", "Short", "TensorInfo", "Value", "quote"]

Value: TypeAlias = bool | int | float | str | NDArray[Any] | StringArray

_HEADER: Final = Struct("<4sIQQ")
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_SCALARS: Final = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    _UINT32: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    _BOOL: Struct("<B"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
# The fields of a tensor that follow its name, by its number of dimensions: sizes, type, offset.
_TENSOR_FIELDS: Final = {n: Struct(f"<{n}QIQ") for n in (1, 2, 3, 4)}

_DEFAULT_ALIGNMENT: Final = 32
_MAX_NAME_BYTES: Final = 65_535
# The least bytes an entry of the metadata and a tensor's description take: an empty name and one
# byte of value or one dimension. They cap the counts in the header.
_LEAST_ENTRY: Final = 8 + 4 + 1
_LEAST_TENSOR: Final = 8 + 4 + 8 + 4 + 8

_TYPES: Final = {int(type): type for type in GGMLType}
_REMOVED_TYPES: Final = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file; `shape` is in NumPy's order, rows before columns."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def quote(text: str) -> str:
    """Text of a file as it may appear in a message: escaped, and not longer than a line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class Short(Exception):
    """The file goes on where the bytes at hand end: look again with more of them."""


class Reader:
    """A position in the first bytes of a file that only moves forward and never past the end.

    Claims are held against the `size` of the whole file; `Short` asks for more of its bytes.
    """

    def __init__(self, path: Path, data: NDArray[np.uint8], size: int, whole: bool = True) -> None:
        self._path = path
        self._whole = whole  # or weights may lie behind the end of the file
        self._data = data
        self._size = size
        self._view = data.data
        self._at = 0
        self.spans: dict[str, tuple[int, int]] = {}
        """Where each entry of the metadata begins and ends."""

    def header(self) -> tuple[int, int, int]:
        """The version, the number of tensors and the number of metadata entries."""
        head = bytes(self._view[:64])
        if head[:4] != b"GGUF":
            self._fail(f"not a GGUF file: {_what_it_looks_like(head)}")
        self._need(_HEADER.size, "the header")
        _, version, tensor_count, entry_count = _HEADER.unpack_from(self._view)
        if version and version & 0xFFFF == 0:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            self._fail(f"big-endian GGUF (version {swapped}); convert it to little-endian")
        if version not in (2, 3):
            advice = "a newer Quire may" if version > 3 else "convert the model again"
            self._fail(f"GGUF version {version}; Quire reads 2 and 3, {advice}")
        self._at = _HEADER.size
        self._need_items(entry_count, _LEAST_ENTRY, "metadata entries")
        self._need_items(tensor_count, _LEAST_TENSOR, "tensors")
        return version, tensor_count, entry_count

    def metadata(self, count: int) -> tuple[Mapping[str, Value], int]:
        """Every key with its value, and the alignment that one of them sets."""
        entries: dict[str, Value] = {}
        alignment = _DEFAULT_ALIGNMENT
        for index in range(count):
            start = self._at
            key = self._name(f"the key of metadata entry {index}")
            if key in entries:
                self._fail(f"key {quote(key)} appears twice")
            type_number = self._u32(f"the type of {quote(key)}")
            entries[key] = self._value(key, type_number)
            self.spans[key] = (start, self._at)
            if key == "general.alignment":
                alignment = self._alignment(entries[key], type_number)
        return MappingProxyType(entries), alignment

    def tensors(self, count: int, alignment: int) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in file order, with its place checked against the file's end."""
        described: dict[str, TensorInfo] = {}
        for index in range(count):
            name = self._name(f"the name of tensor {index}")
            if name in described:
                self._fail(f"tensor {quote(name)} appears twice")
            described[name] = self._tensor(name, alignment)
        start = -(-self._at // alignment) * alignment  # offsets in the file count from here
        placed = {
            name: TensorInfo(name, info.type, info.shape, start + info.offset, info.nbytes)
            for name, info in described.items()
        }
        self._check_places(placed.values())
        return MappingProxyType(placed)

    def _alignment(self, value: Value, type_number: int) -> int:
        if type_number != _UINT32 or not isinstance(value, int):
            self._fail("'general.alignment' must be a uint32")
        if value == 0 or value & (value - 1):
            self._fail(f"'general.alignment' is {value}, it must be a power of two")
        return value

    def _value(self, key: str, type_number: int) -> Value:
        what = f"the value of {quote(key)}"
        if type_number == _STRING:
            return self._string(what)
        if type_number == _ARRAY:
            return self._array(key)
        scalar = _SCALARS.get(type_number)
        if scalar is None:
            self._fail(f"{quote(key)} has the unknown value type {type_number}")
        self._need(scalar.size, what)
        value: int | float = scalar.unpack_from(self._view, self._at)[0]
        self._at += scalar.size
        if type_number != _BOOL:
            return value
        if value not in (0, 1):
            self._fail(f"{quote(key)} is a truth value of {value}, it must be 0 or 1")
        return value == 1

    def _array(self, key: str) -> NDArray[Any] | StringArray:
        item_type = self._u32(f"the element type of {quote(key)}")
        count = self._u64(f"the length of {quote(key)}")
        if item_type == _STRING:
            return self._string_array(key, count)
        if item_type == _ARRAY:
            self._fail(f"{quote(key)} is an array of arrays, which no model uses")
        scalar = _SCALARS.get(item_type)
        if scalar is None:
            self._fail(f"{quote(key)} is an array of the unknown value type {item_type}")
        self._need_items(count, scalar.size, f"elements of {quote(key)}")
        self._need(count * scalar.size, f"the elements of {quote(key)}")
        raw = self._data[self._at : self._at + count * scalar.size]
        self._at += len(raw)
        if item_type != _BOOL:
            return raw.view(scalar.format)
        if count and raw.max() > 1:
            self._fail(f"{quote(key)} has a truth value of {raw.max()}, it must be 0 or 1")
        return raw.view(np.bool_)

    def _string_array(self, key: str, count: int) -> StringArray:
        self._need_items(count, _U64.size, f"strings of {quote(key)}")
        try:
            starts, end = find_strings(self._data, self._at, count)
        except ValueError as error:
            if len(self._data) < self._size:
                raise Short from None
            self._fail(f"array {quote(key)} at offset {self._at}: {error}")
        begin, self._at = self._at, end
        return StringArray(self._data[begin:end], starts - begin)

    def _tensor(self, name: str, alignment: int) -> TensorInfo:
        """One description; its offset still counts from the start of the tensor data."""
        what = f"tensor {quote(name)}"
        fields = _TENSOR_FIELDS.get(dimensions := self._u32(f"the dimensions of {what}"))
        if fields is None:
            self._fail(f"{what} has {dimensions} dimensions, 1 to 4 are possible")
        self._need(fields.size, what)
        *sizes, type_number, offset = fields.unpack_from(self._view, self._at)
        self._at += fields.size
        type = _TYPES.get(type_number)
        if type is None:
            removed = _REMOVED_TYPES.get(type_number)
            known = f"{removed}, which ggml removed: quantize it again" if removed else "unknown"
            self._fail(f"{what} has type {type_number}, {known}")
        if 0 in sizes:
            self._fail(f"{what} has an empty dimension: {sizes}")
        if sizes[0] % type.block_size:
            self._fail(
                f"{what} has rows of {sizes[0]} weights, "
                f"{type.name} needs a multiple of {type.block_size}"
            )
        if offset % alignment:
            self._fail(f"{what} has offset {offset}, it must be a multiple of {alignment}")
        nbytes = prod(sizes) // type.block_size * type.type_size
        if nbytes > self._size and self._whole:
            self._too_large(what, nbytes)
        return TensorInfo(name, type, tuple(reversed(sizes)), offset, nbytes)

    def _check_places(self, tensors: Iterable[TensorInfo]) -> None:
        before: TensorInfo | None = None
        for info in sorted(tensors, key=lambda info: info.offset):
            if info.offset + info.nbytes > self._size and self._whole:
                self._too_large(f"tensor {quote(info.name)}", info.nbytes, info.offset)
            if before is not None and before.offset + before.nbytes > info.offset:
                self._fail(f"tensors {quote(before.name)} and {quote(info.name)} overlap")
            before = info

    def _too_large(self, what: str, nbytes: int, offset: int | None = None) -> NoReturn:
        where = "" if offset is None else f" from offset {offset} on"
        self._fail(
            f"{what} needs {nbytes} bytes{where}, file has {self._size}; "
            "it is damaged or incomplete: fetch it again"
        )

    def _name(self, what: str) -> str:
        return self._string(what, most=_MAX_NAME_BYTES)

    def _string(self, what: str, most: int | None = None) -> str:
        length = self._u64(f"the length of {what}")
        if most is not None and length > most:
            self._fail(f"{what} at offset {self._at} has {length} bytes, at most {most} may be")
        self._need(length, what)
        raw = bytes(self._view[self._at : self._at + length])
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8 at offset {self._at + error.start}")
        self._at += length
        return text

    def _u32(self, what: str) -> int:
        self._need(_U32.size, what)
        value: int = _U32.unpack_from(self._view, self._at)[0]
        self._at += _U32.size
        return value

    def _u64(self, what: str) -> int:
        self._need(_U64.size, what)
        value: int = _U64.unpack_from(self._view, self._at)[0]
        self._at += _U64.size
        return value

    def _need(self, nbytes: int, what: str) -> None:
        left = self._size - self._at
        if nbytes > left:
            self._fail(f"{what} at offset {self._at} needs {nbytes} bytes, file has {left} left")
        if nbytes > len(self._data) - self._at:
            raise Short

    def _need_items(self, count: int, least: int, what: str) -> None:
        left = self._size - self._at
        if count * least > left:
            self._fail(
                f"{count} {what} at offset {self._at} need at least {count * least} bytes, "
                f"file has {left} left"
            )

    def _fail(self, message: str) -> NoReturn:
        raise GGUFError(f"{self._path}: {message}")


def _what_it_looks_like(head: bytes) -> str:
    """What a file that is no GGUF seems to be, and what to do about it."""
    if head[:2] == b"PK":
        return "it looks like a zip or a PyTorch checkpoint; convert the model to GGUF"
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "it looks like a pickle, which can run code; get the model as GGUF or safetensors"
    if head[8:9] == b"{":
        return "it looks like safetensors; pass its folder, with config.json, instead"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it looks like a web page; the download went wrong, fetch it again"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the model itself; fetch the real file"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return "it is in the older GGML format; get the model as GGUF"
    return f"it begins with {head[:4]!r} instead of b'GGUF'"
