"""Open .safetensors files: a JSON header, then the tensors' bytes.

The file is not trusted: before any tensor is read, the header is held against the file's size and
the tensors must fill what follows it exactly, without gap or overlap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.errors import SafetensorsError
from quire.weights.fingerprint import sample, sample_of
from quire.weights.gguf_format import quote
from quire.weights.open_file import OpenFile, Stored

_LENGTH_BYTES: Final = 8
_MAX_HEADER: Final = 100_000_000  # the format's own limit
_MAX_DIMS: Final = 8
_DTYPE: Final = re.compile(r"(?:BOOL|[A-Z]+(8|16|32|64))(?:_\w+)?")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Safetensors:
    """One open file: its tensors by name, and copies of their bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = OpenFile(path, SafetensorsError, ".safetensors")
        self._samples: dict[str, bytes] = {}
        start, entries = self._header()
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(
            {name: self._tensor(name, entry, start) for name, entry in entries.items()}
        )
        self._check_places(start)

    def data(self, name: str) -> NDArray[np.uint8]:
        """A copy of the bytes of a tensor."""
        tensor = self.tensors[name]
        data = self._file.read(tensor.offset, tensor.nbytes, f"tensor {quote(name)}")
        if name not in self._samples:
            self._samples[name] = sample_of(data)
        return data

    def stored(self, name: str) -> Stored:
        """The bytes of a tensor where they lie."""
        tensor = self.tensors[name]
        return Stored(self._file, tensor.offset, tensor.nbytes, f"tensor {quote(name)}")

    def sample(self, name: str) -> bytes:
        """A hash of samples of a tensor, taken when it was read, or now."""
        if name not in self._samples:
            tensor, what = self.tensors[name], f"tensor {quote(name)}"
            self._samples[name] = sample(
                lambda start, length: self._file.read(tensor.offset + start, length, what),
                tensor.nbytes,
            )
        return self._samples[name]

    def close(self) -> None:
        """Let go of the file; tensors can no longer be read."""
        self._file.close()

    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the tensors' bytes begin, and the entry of each tensor."""
        size = self._file.size
        if size < _LENGTH_BYTES:
            self._fail(f"the header's length takes {_LENGTH_BYTES} bytes, the file has {size}")
        first = self._file.read(0, _LENGTH_BYTES, "the header's length")
        length = int.from_bytes(first.tobytes(), "little")
        if length > min(size - _LENGTH_BYTES, _MAX_HEADER):
            self._fail(
                f"a header of {length} bytes, the file has {size} and a header "
                f"at most {_MAX_HEADER}"
            )
        entries = parse_object(
            self._file.read(_LENGTH_BYTES, length, "the header").tobytes(),
            f"{self.path}: the header",
        )
        notes = entries.pop("__metadata__", {})
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            self._fail("'__metadata__' must be an object of strings")
        return _LENGTH_BYTES + length, entries

    def _tensor(self, name: str, entry: object, start: int) -> StoredTensor:
        what = f"tensor {quote(name)}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            self._fail(f"{what} must have dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        width = _DTYPE.fullmatch(dtype) if isinstance(dtype, str) else None
        if width is None:
            self._fail(f"{what} has the unknown dtype {quote(str(dtype))}")
        if not _counts(shape) or len(shape) > _MAX_DIMS:
            self._fail(f"{what} has the shape {quote(str(shape))}")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail(f"{what} has the data_offsets {quote(str(offsets))}")
        begin, end = offsets
        needed = prod(shape) * int(width[1] or 8) // 8
        if end - begin != needed:
            self._fail(f"{what} of {dtype} {shape} takes {needed} bytes, not {end - begin}")
        return StoredTensor(dtype, tuple(shape), start + begin, end - begin)

    def _check_places(self, start: int) -> None:
        """The tensors lie one after the other, from the header to the end of the file."""
        at = start
        # One without elements may share its place with the one behind it.
        in_order = sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
        for name, tensor in in_order:
            if tensor.offset != at:
                fault = "overlaps the one before it" if tensor.offset < at else "follows a gap"
                self._fail(f"tensor {quote(name)} at byte {tensor.offset} {fault}, due at {at}")
            at += tensor.nbytes
        if at != self._file.size:
            self._fail(f"the tensors end at byte {at}, the file has {self._file.size}")

    def _fail(self, fault: str) -> NoReturn:
        raise SafetensorsError(f"{self.path}: {fault}")


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object in which no key appears twice, at any depth; `what` is what errors call it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise SafetensorsError(f"{what}: key {quote(key)} appears twice")
            out[key] = value
        return out

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SafetensorsError(f"{what} must be a JSON object")
    return value


def _counts(value: object) -> bool:
    """Whether this is a list of whole numbers from 0 on."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)
