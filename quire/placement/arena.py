"""How devices hold the bytes of arrays: what a trace of takes and gives comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Event = tuple[int, int]
"""A number for the array, and its floats when it is taken; 0 when it is given back."""
Trace = tuple[Event, ...]
_MOST_KEPT = 128 << 20


class Arena:
    """As csrc/arena.cpp does it: blocks of a few sizes, which are kept when they are free."""

    def __init__(self) -> None:
        self.held = self._kept = 0
        self._free: Counter[int] = Counter()
        self._taken: dict[int, int] = {}

    def take(self, key: int, floats: int) -> None:
        """An array is made."""
        size = block_bytes(floats)
        self._taken[key] = size
        if self._free[size]:
            self._free[size] -= 1
            self._kept -= size
        else:
            self.held += size

    def give(self, key: int) -> None:
        """An array is gone."""
        size = self._taken.pop(key)
        if self._kept + size > _MOST_KEPT:
            self.held -= size + self._kept
            self._kept = 0
            self._free.clear()
        else:
            self._free[size] += 1
            self._kept += size

    def run(self, traces: Iterable[Trace]) -> None:
        """One trace after the other."""
        for trace in traces:
            for key, floats in trace:
                self.take(key, floats) if floats else self.give(key)


def block_bytes(floats: int) -> int:
    """Bytes of the block that an array of so many floats gets: four sizes for a power of two."""
    step = 64
    while step * 8 < floats * 4:
        step *= 2
    return max(-(-floats * 4 // step), 1) * step


def peak_bytes(traces: Iterable[Trace], rounding: int) -> int:
    """The most that is held at once where nothing is kept, each array rounded up."""
    taken: dict[int, int] = {}
    now = most = 0
    for trace in traces:
        for key, floats in trace:
            size = -(-floats * 4 // rounding) * rounding
            now += size if floats else -taken.pop(key)
            if floats:
                taken[key] = size
            most = max(most, now)
    return most
