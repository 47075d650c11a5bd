"""Copies between a device's pages and the host, as tiers ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Copy(Protocol):
    """A copy between device and host that was started."""

    def wait(self) -> None:
        """Until it is done."""

    def seconds(self) -> float | None:
        """How long it took; None while it is under way."""


class Copier(Protocol):
    """Copies between a device's pages and the host while both go on with other things.

    A copy comes after all that the device was told before it, and before all that it is told
    after: no page is read too early, or written too soon.
    """

    def room(self, size: int) -> Bytes:
        """Host memory that is copied at full speed; MemoryError if there is none."""

    def free(self, room: Bytes) -> None:
        """Returns a room."""

    def out(self, rooms: Sequence[Bytes], pages: Sequence[int]) -> Copy:
        """Starts to copy pages, by their addresses, into rooms."""

    def back(self, rooms: Sequence[Bytes], pages: Sequence[int]) -> Copy:
        """Starts to copy rooms into pages."""
