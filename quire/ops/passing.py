"""How matrices pass through a device: two rooms, one filled while what is in the other is used.

host     bytes ──▶ pieces of pinned memory, in turn         a thread, beside what computes
device             └─▶ room 0 | room 1                      a stream of its own
device   ───────────── used ──┘                             behind it, on the usual one
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.ops.table import Ops

T = TypeVar("T")
ROOMS = 2
"""One is used, one is filled."""
PIECES, PIECE = 3, 8 << 20
"""Pieces of pinned memory that bytes pass through on their way to a GPU, and bytes of each."""
STAGED = PIECES * PIECE
"""Bytes of the host that this takes."""
UNPACKED = 12 * PIECE
"""Bytes of a GPU that it takes to turn a piece of a file into what is multiplied."""


class Source(Protocol):
    """Bytes that are not read yet."""

    @property
    def size(self) -> int:
        """How many."""

    def __getitem__(self, cut: slice) -> Source:
        """Some of them."""

    def read(self, start: int, into: NDArray[np.uint8]) -> None:
        """The bytes from one on, into an array; from any thread."""

    def with_next(self, other: Any) -> Source | None:
        """Both as one, if the other's come right behind these."""


class Passage(Protocol):
    """Two rooms of a device. One thread fills them, and one computes with what is there."""

    ops: Ops
    """What packs into the room that is filled, and computes with what is packed."""
    reads: bool
    """Whether it takes sources for bytes, and reads them by itself."""

    def fill(self, room: int, make: Callable[[], T]) -> T:
        """Calls `make`, and what that packs is in the room, behind what used it last.

        MemoryError if the device has no room.
        """

    def use(self, room: int) -> AbstractContextManager[None]:
        """What is computed within comes behind the filling of this room, and before the next."""

    def close(self) -> None:
        """Gives everything back, once nobody fills or uses any of it."""


class InPlace:
    """The passage of a device that computes when it is told: packing is all there is to it."""

    reads = False

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def fill(self, room: int, make: Callable[[], T]) -> T:
        """Calls `make`."""
        return make()

    def use(self, room: int) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to give back."""
