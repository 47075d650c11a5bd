"""What a model is given in one step, on whatever device it runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops import Pages, States


@dataclass(frozen=True)
class GroupPages:
    """One group's memory in this step: its pages, and where in a page each layer's parts lie."""

    pages: Pages | States
    offsets: tuple[tuple[int, int], ...]
    """Offsets of K and V, or of state and log, for each layer of the group, in its order."""


@dataclass(frozen=True)
class Batch:
    """Tokens of one or more sequences, row by row, and the memory they read and write."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    groups: dict[str, GroupPages]
