"""Token ids of a sequence: one growing array, which forks share until they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from quire.memory.groups.layout import Int32

_LEAST = 64


class _Buffer:
    """Room for tokens. What lies before `used` is somebody's and never changes."""

    __slots__ = ("array", "ints", "used")

    def __init__(self, array: Int32, used: int) -> None:
        self.array = array
        self.ints = array.data  # the same integers, one by one faster
        self.used = used


class Tokens:
    """The first `len` tokens of a buffer.

        buffer   [ 7 3 9 4 2 | 5 5 | ....... ]      used = 7
        fork A   [ 7 3 9 4 2   5 5 )                len = 7: writes on in place
        fork B   [ 7 3 9 4 2 )                      len = 5: copies before it writes (copy-on-write)

    So a fork costs the same however long the past is, and so does going back.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self, tokens: Sequence[int] | Int32 = ()) -> None:
        given = np.asarray(tokens, np.int32)
        self._length = len(given)
        self._buffer = _Buffer(_room(given, self._length), self._length)

    def fork(self) -> Tokens:
        """The same tokens; the two go their own ways from here."""
        twin = Tokens.__new__(Tokens)
        twin._buffer, twin._length = self._buffer, self._length
        return twin

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            tokens: list[int] = self._buffer.array[: self._length][at].tolist()
            return tokens
        index = at + self._length if at < 0 else at
        if not 0 <= index < self._length:
            raise IndexError(f"token {at} of {self._length}")
        return self._buffer.ints[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        return self._length == other._length and self.common(other.array()) == self._length

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tokens({self[:]})"

    def array(self, start: int = 0, stop: int | None = None) -> Int32:
        """Some of them without a copy; they never change, whatever happens to the sequence."""
        end = self._length if stop is None else min(stop, self._length)
        return self._buffer.array[start:end]

    def common(self, others: Int32) -> int:
        """How many first tokens are the same."""
        n = min(self._length, len(others))
        if n == 0:
            return 0
        differ = self._buffer.array[:n] != others[:n]
        first = int(differ.argmax())
        return first if differ[first] else n

    def append(self, token: int) -> None:
        """One more."""
        buffer, end = self._buffer, self._length
        if buffer.used != end or end == len(buffer.array):
            buffer = self._buffer = _Buffer(_room(buffer.array[:end], end + 1), end)
        buffer.ints[end] = token
        buffer.used = self._length = end + 1

    def replace_last(self, token: int) -> None:
        """Another token in the last place, which nobody else has seen yet."""
        assert self._length == self._buffer.used > 0
        self._buffer.ints[self._length - 1] = token

    def extend(self, tokens: Sequence[int] | Int32) -> None:
        """Several more."""
        buffer, start = self._buffer, self._length
        end = start + len(tokens)
        if buffer.used != start or end > len(buffer.array):
            buffer = self._buffer = _Buffer(_room(buffer.array[:start], end), start)
        buffer.array[start:end] = tokens
        buffer.used = self._length = end

    def truncate(self, length: int) -> None:
        """Keeps the first `length`."""
        assert 0 <= length <= self._length
        self._length = length

    def remove(self, start: int, stop: int) -> None:
        """Takes some out of the middle."""
        kept = self._buffer.array[stop : self._length].copy()
        self._length = start
        self.extend(kept)


def _room(tokens: Int32, length: int) -> Int32:
    """An array of its own that begins with these, with room to grow."""
    array: Int32 = np.empty(max(2 * length, _LEAST), np.int32)
    array[: len(tokens)] = tokens
    return array
