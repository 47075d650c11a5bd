"""What a model is made from: names of tensors, their bytes, and facts about them.

Whatever holds the weights, models see GGUF's names and conventions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, NoReturn, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import FileError
from quire.weights.gguf_format import Value, quote
from quire.weights.gguf_write import encode_entry
from quire.weights.open_file import Stored
from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray

T = TypeVar("T")


class _Required(Enum):
    REQUIRED = "required"


REQUIRED: Final = _Required.REQUIRED
"""The default of a key that must be there."""
Required: TypeAlias = Literal[_Required.REQUIRED]


class TensorFacts(Protocol):
    """What is known of a tensor without reading it; `shape` has rows before columns."""

    @property
    def type(self) -> GGMLType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class WeightFile(ABC):
    """An open model: metadata under GGUF's keys, tensors under GGUF's names."""

    error: ClassVar[type[FileError]] = FileError
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorFacts]
    asked: set[str]
    """Keys that somebody has asked for."""
    whole: bool = True
    """Whether all tensors can be read; else only what is known of them."""

    @abstractmethod
    def data(self, name: str) -> NDArray[np.uint8]:
        """A copy of the bytes of a tensor."""

    def stored(self, name: str) -> Stored | None:
        """The bytes of a tensor where they lie; None where no file has them as they are."""
        return None

    @abstractmethod
    def samples(self, name: str) -> Iterator[bytes]:
        """Hashes of samples of what a tensor is made of, taken when it was read, or now."""

    def entry(self, key: str) -> bytes:
        """An entry of the metadata as a GGUF file writes it."""
        return encode_entry(key, self.metadata[key])

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; the metadata stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def get_int(
        self,
        key: str,
        default: T | Required = REQUIRED,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int | T:
        """An integer of the metadata; the limits hold for what the file says."""
        value = self._get(key)
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
        value = self._get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, float):
            self._wrong_type(key, value, "a floating-point number")
        if not math.isfinite(value):
            raise self.error(f"{self.path}: {quote(key)} is {value}, it must be finite")
        self._check_limits(key, value, minimum, maximum)
        return value

    def get_str(self, key: str, default: T | Required = REQUIRED) -> str | T:
        """A string of the metadata."""
        value = self._get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, str):
            self._wrong_type(key, value, "a string")
        return value

    def get_bool(self, key: str, default: T | Required = REQUIRED) -> bool | T:
        """A truth value of the metadata."""
        value = self._get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, bool):
            self._wrong_type(key, value, "true or false")
        return value

    def get_array(
        self, key: str, default: T | Required = REQUIRED
    ) -> NDArray[Any] | StringArray | T:
        """An array: numbers as an aligned copy with the file's element type, strings undecoded."""
        value = self._get(key)
        if value is None:
            return self._default(key, default)
        if isinstance(value, StringArray):
            return value
        if not isinstance(value, np.ndarray):
            self._wrong_type(key, value, "an array")
        return value.copy()

    def get_strings(self, key: str, default: T | Required = REQUIRED) -> list[str] | T:
        """An array of strings, decoded now; `StringArray` says what becomes of invalid UTF-8."""
        value = self._get(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, StringArray):
            self._wrong_type(key, value, "an array of strings")
        return value.to_list()

    def _get(self, key: str) -> Value | None:
        self.asked.add(key)
        return self.metadata.get(key)

    def _default(self, key: str, default: T | Required) -> T:
        if default is REQUIRED:
            raise self.error(f"{self.path}: the metadata has no {quote(key)}, which is needed")
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
        raise self.error(f"{self.path}: {quote(key)} is {found}, it must be {wanted}")

    def _check_limits(
        self, key: str, value: float, minimum: float | None, maximum: float | None
    ) -> None:
        if minimum is not None and value < minimum:
            raise self.error(f"{self.path}: {quote(key)} is {value}, it must be at least {minimum}")
        if maximum is not None and value > maximum:
            raise self.error(f"{self.path}: {quote(key)} is {value}, it must be at most {maximum}")
