"""Finds the added tokens of a tokenizer.json in text: leftmost first, then the longest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import TokenizerError
from quire.text.characters import WIDE_SPACES

_SPACES = re.compile(rf"[ \t-\r{WIDE_SPACES}]*")
_SPACE = re.compile(rf"[ \t-\r{WIDE_SPACES}]")
_MOST_LENGTHS = 256


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in the text before words are; it may swallow white space beside it."""

    id: int
    text: str
    lstrip: bool
    rstrip: bool
    normalized: bool  # looked for in normalized text, written as normalization leaves it
    special: bool


class AddedTokens:
    """Cuts text at tokens, each given with how it is written there."""

    def __init__(self, tokens: Iterable[tuple[str, AddedToken]], name: str) -> None:
        self._tokens: dict[str, AddedToken] = {}
        for text, token in tokens:
            self._tokens.setdefault(text, token)
        # The lengths that are possible after two characters, or one that is a token by itself.
        self._lengths: dict[str, list[int]] = {}
        for text in self._tokens:
            self._lengths.setdefault(text[:2], []).append(len(text))
        for lengths in self._lengths.values():
            lengths[:] = sorted(set(lengths), reverse=True)
            if len(lengths) > _MOST_LENGTHS:
                raise TokenizerError(
                    f"{name}: {len(lengths)} added tokens begin alike and differ in length, "
                    f"at most {_MOST_LENGTHS} may"
                )
        first = "".join(map(re.escape, sorted({text[0] for text in self._tokens})))
        self._first = re.compile(f"[{first}]") if first else None

    def split(self, text: str, parse_special: bool) -> list[tuple[str | int, int]]:
        """The text as pieces of text and token ids, each with where it starts.

        Without `parse_special` a special token is part of the text around it.
        """
        pieces: list[tuple[str | int, int]] = []
        done = looked = 0
        for found in self._first.finditer(text) if self._first else ():
            start = found.start()
            if start < looked:
                continue
            token, length = self._at(text, start)
            if token is None:
                continue
            end = looked = start + length
            if token.special and not parse_special:
                continue
            if token.lstrip:
                start = _end_of_word(text, start, done)
            if token.rstrip:
                spaces = _SPACES.match(text, end)
                end = spaces.end() if spaces else end
            if done < start:
                pieces.append((text[done:start], done))
            pieces.append((token.id, start))
            done = end
        if done < len(text):
            pieces.append((text[done:], done))
        return pieces

    def _at(self, text: str, start: int) -> tuple[AddedToken | None, int]:
        """The longest token that begins here, and how long it is as it is written."""
        two = text[start : start + 2]
        for prefix in (two, two[:1]) if len(two) == 2 else (two,):
            for length in self._lengths.get(prefix, ()):
                token = self._tokens.get(text[start : start + length])
                if token is not None:
                    return token, length
        return None, 0


def is_space(character: str) -> bool:
    """Whether added tokens may swallow this character."""
    return _SPACE.match(character) is not None


def _end_of_word(text: str, at: int, least: int) -> int:
    """Where the white space before a place begins, from `least` on."""
    while at > least and is_space(text[at - 1]):
        at -= 1
    return at
