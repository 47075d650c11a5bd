"""What goes with saved state besides pages and tables, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag
from typing import Any

from numpy.typing import NDArray


class StateFlags(Flag):
    """How much of a sequence is written."""

    WHOLE = 0
    """Everything it holds."""
    PARTIAL = 1
    """Windows and recurrent states only: full attention is to be there when it is read."""


@dataclass(frozen=True)
class Extra:
    """What the caller keeps in the same file; memory does not look at it."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Whatever JSON holds without fractions."""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """int32 and float32 values."""


@dataclass(frozen=True)
class Found:
    """What a file has, once all of it but the pages was checked: nothing has changed yet."""

    ends: Mapping[int, int]
    """Where each sequence goes on, by its id in the file."""
    checkpoint_ends: Mapping[str, int]
    complete: bool
    """Whether full attention has each position up to the ends once, and none has yet to turn."""
    extra: Extra


@dataclass(frozen=True)
class StateRead:
    """What was read."""

    seqs: tuple[int, ...]
    """The sequences as they are numbered now."""
    checkpoints: Mapping[str, str]
    """Names of checkpoints: in the file, and now. One that was taken is made up anew."""
    extra: Extra
