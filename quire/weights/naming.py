"""How a folder's tensors and settings are seen under GGUF's names and conventions.

An architecture's model file turns a `HFConfig` into a `Naming`; `Folder` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.weights.file import REQUIRED, Required
from quire.weights.gguf_format import Value, quote

Shape = tuple[int, ...]


def _same(shape: Shape) -> Shape:
    return shape


@dataclass(frozen=True)
class Change:
    """What becomes of a tensor on its way into a model.

    `apply` gets the elements as they are stored, whatever their type (bfloat16 as uint16), and may
    only move them; with `values` it gets float32 and gives float32. `shape` says, without reading
    anything, what shape will come out.
    """

    apply: Callable[[NDArray[Any]], NDArray[Any]]
    shape: Callable[[Shape], Shape] = _same
    values: bool = False


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: one stored tensor, or several stacked along a new first axis."""

    names: tuple[str, ...]
    change: Change | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Naming:
    """A folder as GGUF would have it."""

    metadata: dict[str, Value]
    tensors: dict[str, Source]
    """By GGUF's name; a tensor that is not stored is not there."""
    made: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Tensors that follow from the settings."""
    ignored: tuple[str, ...] = ()
    """Endings of the names of stored tensors that a model does not need."""
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of those that belong to parts which are not run."""
    otherwise: Mapping[str, Source] = field(default_factory=dict)
    """Where to look instead, by GGUF's name, if a tensor's own source is not stored."""


Namer = Callable[["HFConfig"], Naming]


def one(name: str, change: Change | None = None) -> Source:
    """A tensor that is stored under this name."""
    return Source((name,), change)


def stack(names: Iterable[str], change: Change | None = None) -> Source:
    """Tensors of one shape, such as experts, stacked along a new first axis; then changed."""
    return Source(tuple(names), change, stacked=True)


# ---- changes that several architectures need ------------------------------------------------

ADD_ONE = Change(lambda x: x + np.float32(1), values=True)
"""Norms that are stored as their difference from one."""
MINUS_EXP = Change(lambda x: -np.exp(x), values=True)
"""Decay rates that are stored as the logarithm of their magnitude."""
SQUEEZE_CONV = Change(lambda x: x.reshape(x.shape[0], -1), lambda s: (s[0], prod(s[1:])))
"""Depthwise convolutions [channels, 1, width] without the axis of one."""


def pair_up(n_heads: int) -> Change:
    """Rows of each head reordered so that those rotated against each other are neighbours."""

    def apply(x: NDArray[Any]) -> NDArray[Any]:
        halves = x.reshape(n_heads, 2, x.shape[0] // n_heads // 2, *x.shape[1:])
        return halves.swapaxes(1, 2).reshape(x.shape)

    return Change(apply)


def take_rows(rows: NDArray[np.intp], of: int) -> Change:
    """Some of a tensor's `of` rows, in this order; of one with other rows, none."""
    return Change(lambda x: x[rows], lambda s: (len(rows) if s[0] == of else 0, *s[1:]))


# ---- config.json ----------------------------------------------------------------------------


class HFConfig:
    """The settings in a config.json, each checked when it is asked for."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def whole(
        self, key: str, default: int | Required = REQUIRED, minimum: int = 1,
        maximum: int = 2**31 - 1,
    ) -> int:  # fmt: skip
        """A whole number within limits."""
        value = self._get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            self.refuse(key, f"must be a whole number from {minimum} to {maximum}")
        return value

    def number(
        self, key: str, default: float | Required = REQUIRED, least: float = -1e30,
        most: float = 1e30,
    ) -> float:  # fmt: skip
        """A finite number, whole or not, within limits."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not least <= value <= most:
            self.refuse(key, f"must be a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, default: str | Required = REQUIRED) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "must be a string")
        return value

    def strings(self, key: str, default: list[str] | Required = REQUIRED) -> list[str]:
        """A list of strings."""
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(key, "must be a list of strings")
        return value

    def section(self, key: str) -> HFConfig:
        """The settings of an object inside; those of an absent one are all absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "must be an object")
        return HFConfig(self.path, value)

    def expect(self, key: str, wanted: Any, default: Any = None) -> None:
        """Refuses a setting that has another value than the one Quire computes with."""
        if self._get(key, default) != wanted:
            self.refuse(key, f"only {wanted!r} is known")

    def refuse(self, key: str, need: str) -> NoReturn:
        """An error about this setting."""
        found = quote(str(self.values[key])) if key in self else "missing"
        raise ModelError(f"{self.path}: {quote(key)} is {found}; {need}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ModelError(f"{self.path}: there is no {quote(key)}, which is needed")
        return default
