"""Open GGUF model files: little-endian, versions 2 and 3, mapped into memory.

The file is not trusted: `gguf_format` checks all of it but the weights while it is opened, so that
every tensor is known to lie inside the file, aligned, and to overlap no other.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import GGUFError
from quire.weights.gguf_format import Reader, TensorInfo, Value, quote
from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray

__all__ = ["GGUF", "REQUIRED", "GGMLType", "Required", "StringArray", "TensorInfo", "Value"]

T = TypeVar("T")


class _Required(Enum):
    REQUIRED = "required"


REQUIRED: Final = _Required.REQUIRED
"""The default of a key that must be there."""
Required: TypeAlias = Literal[_Required.REQUIRED]


class GGUF:
    """An open GGUF file: its metadata, its tensors, and views of their bytes.

    Views stay valid after `close`: the mapping goes when the last of them does.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping: mmap.mmap | None = mapping
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)
        reader = Reader(path, self._bytes)
        self.version, tensor_count, entry_count = reader.header()
        self.metadata, self.alignment = reader.metadata(entry_count)
        self.tensors = reader.tensors(tensor_count, self.alignment)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUF:
        """Map a file and check all of it except the weights themselves."""
        path = Path(path)
        try:
            status = os.stat(path)  # before opening: opening a pipe would wait for its other end
            if not stat.S_ISREG(status.st_mode):
                raise GGUFError(f"{path}: not a regular file; pass the path of a .gguf file")
            if status.st_size == 0:
                raise GGUFError(f"{path}: the file is empty; fetch it again")
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise GGUFError(f"{path}: cannot be opened: {error.strerror}") from error
        except ValueError as error:  # a NUL in the path, or a file that just became empty
            raise GGUFError(f"{path!r}: cannot be opened: {error}") from error
        return cls(path, mapping)

    def __enter__(self) -> GGUF:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapping; metadata stays, `data` and `release` are no longer possible."""
        self._mapping = None
        self._bytes = np.empty(0, dtype=np.uint8)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the file, not a copy."""
        info, _ = self._locate(name)
        return self._bytes[info.offset : info.offset + info.nbytes]

    def release(self, name: str) -> None:
        """Drop a tensor's pages from this process's memory; reading them again maps them anew.

        Only pages that lie wholly inside the tensor go, since its neighbours share the others.
        """
        info, mapping = self._locate(name)
        page = mmap.PAGESIZE
        first = -(-info.offset // page) * page
        last = (info.offset + info.nbytes) // page * page
        if sys.platform != "win32" and last > first:
            mapping.madvise(mmap.MADV_DONTNEED, first, last - first)

    def get_int(
        self,
        key: str,
        default: T | Required = REQUIRED,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int | T:
        """An integer of the metadata; the limits hold for what the file says."""
        value = self.metadata.get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self._wrong_type(key, value, "an integer")
        self._check_limits(key, value, minimum, maximum)
        return value

    def get_float(
        self,
        key: str,
        default: T | Required = REQUIRED,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> float | T:
        """A finite floating-point number of the metadata."""
        value = self.metadata.get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, float):
            self._wrong_type(key, value, "a floating-point number")
        if not math.isfinite(value):
            raise GGUFError(f"{self.path}: {quote(key)} is {value}, it must be finite")
        self._check_limits(key, value, minimum, maximum)
        return value

    def get_str(self, key: str, default: T | Required = REQUIRED) -> str | T:
        """A string of the metadata."""
        value = self.metadata.get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, str):
            self._wrong_type(key, value, "a string")
        return value

    def get_bool(self, key: str, default: T | Required = REQUIRED) -> bool | T:
        """A truth value of the metadata."""
        value = self.metadata.get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, bool):
            self._wrong_type(key, value, "true or false")
        return value

    def get_array(
        self, key: str, default: T | Required = REQUIRED
    ) -> NDArray[Any] | StringArray | T:
        """An array: numbers as an aligned copy with the file's element type, strings undecoded."""
        value = self.metadata.get(key)
        if value is None:
            return self._default(key, default)
        if isinstance(value, StringArray):
            return value
        if not isinstance(value, np.ndarray):
            self._wrong_type(key, value, "an array")
        return value.copy()

    def get_strings(self, key: str, default: T | Required = REQUIRED) -> list[str] | T:
        """An array of strings, decoded now; `StringArray` says what becomes of invalid UTF-8."""
        value = self.metadata.get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, StringArray):
            self._wrong_type(key, value, "an array of strings")
        return value.to_list()

    def _default(self, key: str, default: T | Required) -> T:
        if default is REQUIRED:
            raise GGUFError(f"{self.path}: the metadata has no {quote(key)}, which is needed")
        return default

    def _wrong_type(self, key: str, value: Value, wanted: str) -> NoReturn:
        if isinstance(value, str):
            found = f"the string {quote(value)}"
        elif isinstance(value, StringArray):
            found = f"an array of {len(value)} strings"
        elif isinstance(value, np.ndarray):
            found = f"an array of {len(value)} {value.dtype} values"
        else:
            found = f"the {type(value).__name__} {value}"
        raise GGUFError(f"{self.path}: {quote(key)} is {found}, it must be {wanted}")

    def _check_limits(
        self, key: str, value: float, minimum: float | None, maximum: float | None
    ) -> None:
        if minimum is not None and value < minimum:
            raise GGUFError(f"{self.path}: {quote(key)} is {value}, it must be at least {minimum}")
        if maximum is not None and value > maximum:
            raise GGUFError(f"{self.path}: {quote(key)} is {value}, it must be at most {maximum}")

    def _locate(self, name: str) -> tuple[TensorInfo, mmap.mmap]:
        if self._mapping is None:
            raise GGUFError(f"{self.path}: the file was closed, its tensors cannot be read")
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: there is no tensor {quote(name)}")
        return info, self._mapping
