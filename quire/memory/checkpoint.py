"""Named tables that stay as they are, and how long it took to make, use and drop them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.errors import RequestError
from quire.memory.tiers.parking import Parked


@dataclass
class Checkpoint:
    """A sequence as it was: holding its pages is all that keeps it."""

    name: str
    seq: int
    """The sequence it was taken of."""
    tables: tuple[Any, ...]
    """One for each group."""
    cached: bool = False
    """Whether the prefix index keeps it, which gives way to whoever needs the room."""
    parked: Parked | None = None
    """Where its own pages are while they lie in a tier."""


@dataclass
class Timing:
    """How often something was done and how long it took; p99 is of the last thousand."""

    count: int = 0
    total_ns: int = 0
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=1000))

    def add(self, ns: int) -> None:
        """One more time."""
        self.count += 1
        self.total_ns += ns
        self._recent.append(ns)

    @property
    def mean_us(self) -> float:
        """Mean duration in microseconds."""
        return self.total_ns / self.count / 1000 if self.count else 0.0

    @property
    def p99_us(self) -> float:
        """Duration in microseconds that 99 in 100 stay below."""
        return float(np.percentile(self._recent, 99)) / 1000 if self._recent else 0.0


class Checkpoints:
    """Checkpoints by name, in the order they were saved."""

    def __init__(self) -> None:
        self.by_name: dict[str, Checkpoint] = {}
        done = ("save", "restore", "delete", "to_bytes", "from_bytes")
        self.timings = {what: Timing() for what in done}
        self._made = 0

    def new_name(self, name: str | None) -> str:
        """The name for a new checkpoint; refuses one that is taken."""
        if name is None:
            while name is None or name in self.by_name:
                self._made += 1
                name = f"checkpoint-{self._made}"
        elif name in self.by_name:
            raise RequestError(f"there is a checkpoint {name!r} already; delete it first")
        return name

    def get(self, name: str) -> Checkpoint:
        """The checkpoint of this name."""
        if name not in self.by_name:
            raise RequestError(f"there is no checkpoint {name!r}; there are {list(self.by_name)}")
        return self.by_name[name]
