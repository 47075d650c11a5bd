"""Finds special tokens in text, before anything else looks at it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_SPACES = " \t\n\v\f\r"
_PREFIX = 3


@dataclass(frozen=True)
class SpecialToken:
    """A token that is matched as a whole, with the white space it swallows on either side."""

    id: int
    text: str
    always: bool  # user-defined: matched even where control tokens are plain text
    lstrip: bool = False
    rstrip: bool = False


class SpecialTokens:
    """Cuts text at special tokens: the longest token first, then from left to right."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        ordered = sorted(tokens, key=lambda token: -len(token.text.encode()))
        # Grouped by how they begin, so that most of a few thousand tokens are ruled out at once.
        self._groups: dict[str, list[tuple[int, SpecialToken]]] = {}
        for rank, token in enumerate(ordered):
            self._groups.setdefault(token.text[:_PREFIX], []).append((rank, token))

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """The text as pieces of text and token ids, in order."""
        present = [
            (rank, token)
            for prefix, group in self._groups.items()
            if prefix in text
            for rank, token in group
            if (parse_special or token.always) and token.text in text
        ]
        if not present:
            return [text] if text else []
        taken = bytearray(len(text))
        found: list[tuple[int, int, int]] = []
        for _, token in sorted(present, key=lambda entry: entry[0]):
            _claim(text, token, taken, found)
        return _assemble(text, found)


def _claim(
    text: str, token: SpecialToken, taken: bytearray, found: list[tuple[int, int, int]]
) -> None:
    """Takes every occurrence of one token that no earlier token has a part of."""
    start = text.find(token.text)
    while start >= 0:
        end = start + len(token.text)
        blocked = taken.find(1, start, end)
        if blocked >= 0:
            free = taken.find(0, blocked)
            start = text.find(token.text, free) if free >= 0 else -1
            continue
        while token.lstrip and start > 0 and not taken[start - 1] and text[start - 1] in _SPACES:
            start -= 1
        while token.rstrip and end < len(text) and not taken[end] and text[end] in _SPACES:
            end += 1
        taken[start:end] = b"\1" * (end - start)
        found.append((start, end, token.id))
        start = text.find(token.text, end)


def _assemble(text: str, found: list[tuple[int, int, int]]) -> list[str | int]:
    pieces: list[str | int] = []
    at = 0
    for start, end, id in sorted(found):
        if start > at:
            pieces.append(text[at:start])
        pieces.append(id)
        at = end
    if at < len(text):
        pieces.append(text[at:])
    return pieces
