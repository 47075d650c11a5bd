"""The end of the process: no step is under way then.

The interpreter ends threads where they stand, and one that computes takes the process down with it.
"""

from __future__ import annotations

import atexit
from typing import Protocol
from weakref import ref


class Kept(Protocol):
    """What nobody may use any more when the process ends."""

    def keep(self) -> None:
        """Keeps others from it, once whoever uses it now is done."""


_ALL: list[ref[Kept]] = []  # no WeakSet: an interrupt in what that calls would be lost


def keep_at_exit(one: Kept) -> None:
    """Has something kept from others at the end, if it is still there."""
    _ALL[:] = [*(known for known in _ALL if known() is not None), ref(one)]


@atexit.register
def _keep_all() -> None:
    for known in _ALL:
        if (one := known()) is not None:
            one.keep()
