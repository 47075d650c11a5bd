"""Where a prefix can be taken from: retained places in order, and sequences that still run.

A *place* is a root (16 bytes that stand for salt, model and layout) followed by tokens of four
bytes each. Retained places are sorted as byte strings:

    root·7 3          ┐
    root·7 3 9 1      │ begin with "7 3 9"
    root·7 3 9 4 4    ┘◀── root·7 3 9 4 2 would stand before this one: 4 tokens in common
    root·8

The order is that of a walk through a radix tree of all places, without the tree. What has most in
common with a string stands next to where it would stand, and everything that has n tokens in common
with it stands side by side. So the longest match takes one binary search and two comparisons, at
any token, and a match *is* a comparison of tokens: no key can collide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.errors import OutOfMemory, RequestError
from quire.memory.groups.layout import Int32
from quire.memory.memory import Memory
from quire.memory.tokens import Tokens

ROOT_BYTES = 16
TOKEN_BYTES = 4
_ROOT_WORDS = ROOT_BYTES // TOKEN_BYTES
_ONE = ROOT_BYTES + TOKEN_BYTES
_BEHIND = b"\xff" * TOKEN_BYTES  # sorts behind every token, since tokens are not negative


def make_place(root: bytes, tokens: Sequence[int] | Int32) -> bytes:
    """The place of these tokens under a root."""
    words = np.asarray(tokens, np.int32)
    if words.min(initial=0) < 0:
        raise RequestError(f"token ids start at 0; {words.min()} cannot be looked up")
    return root + words.tobytes()


def length_of(place: bytes) -> int:
    """How many tokens a place has."""
    return len(place) // TOKEN_BYTES - _ROOT_WORDS


def tokens_of(place: bytes) -> Int32:
    """The tokens of a place."""
    return np.frombuffer(place, np.int32, offset=ROOT_BYTES)


def common(a: bytes, b: bytes) -> int:
    """How many first tokens two places have in common; none when their roots differ."""
    if a[:_ONE] != b[:_ONE]:  # not even the first token, as most
        return 0
    n = min(len(a), len(b)) // TOKEN_BYTES
    differ = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
    first = int(differ.argmax())
    return max((first if differ[first] else n) - _ROOT_WORDS, 0)


class Giver(ABC):
    """Whoever can give a prefix."""

    __slots__ = ("used",)

    used: int
    """When it was used last, counted in uses of the index."""

    @abstractmethod
    def give(self, memory: Memory, seq: int, n: int) -> bool:
        """Makes an empty sequence hold the first n tokens; False, and no change, if it cannot."""


@dataclass(slots=True, eq=False)
class Entry(Giver):
    """A retained place: a checkpoint, and what it is worth."""

    name: str
    """The checkpoint's."""
    place: bytes
    pinned_until: float = float("-inf")
    refused: int = 0
    """Memory cannot cut it back to so many tokens, nor to fewer; what it holds never changes."""
    length: int = field(init=False)
    """Its number of tokens."""

    def __post_init__(self) -> None:
        self.length = length_of(self.place)

    def give(self, memory: Memory, seq: int, n: int) -> bool:
        if n <= self.refused or not memory.checkpoint_fits(self.name):
            return False
        try:
            memory.checkpoint_restore(seq, self.name)
        except OutOfMemory:  # a tier that cannot be read
            return False
        if n == self.length or memory.seq_rm(seq, n, -1):
            return True
        memory.seq_rm(seq, -1, -1)
        self.refused = n
        return False


@dataclass(slots=True, eq=False)
class Live(Giver):
    """A sequence that still runs: its tokens as they grow; memory may hold fewer yet."""

    seq: int
    root: bytes
    tokens: Tokens

    def give(self, memory: Memory, seq: int, n: int) -> bool:
        try:
            memory.seq_cp(self.seq, seq, 0, n)
        except RequestError:
            return False
        return True


class Entries:
    """Entries in the order of their places, no place twice."""

    def __init__(self) -> None:
        self._places: list[bytes] = []
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def find(self, place: bytes) -> Entry | None:
        """The entry of exactly this place."""
        at = bisect_left(self._places, place)
        found = at < len(self._places) and self._places[at] == place
        return self._entries[at] if found else None

    def add(self, entry: Entry) -> None:
        """One more; its place is not there yet."""
        at = bisect_left(self._places, entry.place)
        self._places.insert(at, entry.place)
        self._entries.insert(at, entry)

    def remove(self, entry: Entry) -> None:
        """One less."""
        at = bisect_left(self._places, entry.place)
        assert self._entries[at] is entry
        del self._places[at], self._entries[at]

    def under(self, root: bytes) -> list[Entry]:
        """All entries of a root."""
        return self._entries[slice(*self._range(root, len(self._places), 0))]

    def matches(self, place: bytes, least: int) -> Iterator[tuple[int, Entry]]:
        """Every entry with `least` first tokens or more in common, and how many; most first.

        Among equals the one that ends there comes first, for it needs no cutting; then those
        that need the least.
        """
        start = end = bisect_left(self._places, place)  # what lies between has been offered
        while True:
            n = max(self._common_at(start - 1, place), self._common_at(end, place))
            if n < least:
                return
            prefix = place[: ROOT_BYTES + n * TOKEN_BYTES]
            low, high = self._range(prefix, start, end)
            level = self._entries[low:start] + self._entries[end:high]
            start, end = low, high
            yield n, level[0]
            for entry in sorted(level[1:], key=lambda entry: entry.length):
                yield n, entry

    def cost(self, entry: Entry, cuts_back: bool) -> int:
        """How many tokens would have to be computed again without an entry.

        Memory that cuts back gives them from any entry with the same beginning; other memory
        only from one that ends within it.
        """
        for n, other in self.matches(entry.place, 1):
            if other is not entry and (cuts_back or other.length <= n):
                return entry.length - n
        return entry.length

    def _range(self, prefix: bytes, last_start: int, first_end: int) -> tuple[int, int]:
        """Where the places with this beginning start and end."""
        return (
            bisect_left(self._places, prefix, 0, last_start),
            bisect_left(self._places, prefix + _BEHIND, first_end),
        )

    def _common_at(self, at: int, place: bytes) -> int:
        return common(self._places[at], place) if 0 <= at < len(self._places) else 0
