"""What a model is given in one step, on whatever device it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.handles import Array
from quire.ops.table import Ops


@dataclass(frozen=True)
class GroupPages:
    """One group's memory in this step: its pages, and where in a page each layer's parts lie."""

    pages: Any
    """`Pages`, or the `States` of a recurrent group."""
    offsets: Mapping[int, tuple[int, int]]
    """Offsets of K and V, or of state and log, by a layer's number in the model."""


def cross(x: Array, source: Ops, target: Ops) -> Array:
    """An array of one device as one of another; itself where they are the same."""
    return x if source is target else target.array(source.numpy(x))


@dataclass(frozen=True)
class Batch:
    """Tokens of one or more sequences, row by row, and the memory they read and write."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    groups: dict[str, GroupPages]
