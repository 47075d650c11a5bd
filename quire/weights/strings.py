"""String arrays of GGUF files, checked at once and decoded only when they are used.

A vocabulary is an array of 50,000 to 300,000 strings, each a 64-bit length and its bytes. Where
one string ends, the next begins, so the lengths must be followed one after the other; a plain
loop over them would take longer than everything else in the file together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["StringArray", "find_strings"]

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

_LENGTH: Final = Struct("<Q")
_LENGTH_BYTES: Final = _LENGTH.size
_WINDOW: Final = 1 << 17
_GENEROUS: Final = 64  # more bytes than most strings take, so that a short array is a short look


class StringArray(Sequence[str]):
    """The strings of one array, decoded on use; nothing is kept, so hold on to `to_list()`.

    Bytes that are not UTF-8 come out as lone surrogates: `text.encode()` raises for such a string,
    and `text.encode("utf-8", "surrogateescape")` gives the bytes of the file.
    """

    def __init__(self, data: Bytes, starts: Positions) -> None:
        self._data = data  # the whole array: every length and every string
        self._starts = starts  # where in it each length begins

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        begin = int(self._starts[index]) + _LENGTH_BYTES
        last = index + 1 == len(self)
        end = len(self._data) if last else int(self._starts[index + 1])
        return self._data[begin:end].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)} strings>"

    def to_list(self) -> list[str]:
        """Every string, decoded in one go."""
        if not len(self):
            return []
        # Each length becomes one NUL, so that one decode and one split do the work.
        text = self._data.copy()
        text[self._starts] = 0
        keep = np.ones(len(text), dtype=np.bool_)
        for offset in range(1, _LENGTH_BYTES):
            keep[self._starts + offset] = False
        text = text[keep]
        if len(text) - np.count_nonzero(text) != len(self):  # a string has a NUL of its own
            return self[:]
        return text.tobytes().decode("utf-8", "surrogateescape").split("\0")[1:]


def find_strings(data: Bytes, start: int, count: int) -> tuple[Positions, int]:
    """Where each of `count` strings from `start` on begins, and where the last one ends.

    Raises ValueError, saying which string does not fit, when they run past the end of `data`.
    """
    found: list[Positions] = [np.empty(0, dtype=np.int64)]
    view = data.data
    done, at = 0, start
    while done < count:
        end = min(at + min(_WINDOW, (count - done) * _GENEROUS), len(data))
        starts, after = _follow(data[at:end], count - done)
        found.append(starts + at)
        done += len(starts)
        at += after
        # What the guess did not cover, one by one: long strings, strings that hold NULs.
        slow: list[int] = []
        while done < count and at <= end - _LENGTH_BYTES:
            slow.append(at)
            done += 1
            at += _LENGTH_BYTES + _LENGTH.unpack_from(view, at)[0]
        found.append(np.array(slow, dtype=np.int64))
        if at > len(data) or (done < count and at > len(data) - _LENGTH_BYTES):
            culprit = done if at > len(data) else done + 1
            raise ValueError(f"string {culprit} of {count} runs past the end of the file")
    return np.concatenate(found), at


def _follow(window: Bytes, most: int) -> tuple[Positions, int]:
    """The strings that follow one another from the window's start, and where they end.

    Guess and check: a length below 65,536 ends in six zero bytes, and text has no zeros, so the
    ends of runs of zeros are very likely all the lengths there are. Only those that form an
    unbroken chain from the start are taken, so a wrong guess costs time and nothing else.
    """
    zero = window == 0
    two = zero[:-1] & zero[1:]
    six = two[:-4] & two[2:-2] & two[4:]
    guess = np.flatnonzero(six[:-1] & ~zero[6:]) - 2
    if not len(guess) or guess[0] != 0:
        return guess[:0], 0
    lengths = window[guess] + window[guess + 1] * np.int64(256)
    after = guess + _LENGTH_BYTES + lengths
    breaks = np.flatnonzero(guess[1:] != after[:-1])
    taken = min(most, int(breaks[0]) + 1 if len(breaks) else len(guess))
    return guess[:taken], int(after[taken - 1])
