"""Splits text into the words that byte pairs are merged in.

A variant is a sequence of patterns. The first splits the text into matches and the gaps between
them, the second splits each of those pieces again, and so on; merging never crosses a piece.

Patterns are written with `\\p{..}` classes. Python's `re` has none, so those patterns run on a
collapsed copy of the text in which every non-ASCII character is replaced by one stand-in for its
class. Patterns without classes see the real characters; both copies have the text's length, so
positions carry over. Only ASCII letters have a case here (`\\p{Lu}`, `\\p{Ll}`), and `\\s` and
`\\d` are ASCII, with other white space mapped to a vertical tab. These are llama.cpp's rules, which
decide what the vocabulary of a GGUF file means. The patterns of tokenizer.json files are `cased`:
all letters have their case, and real white space is looked at as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from quire.text.characters import LONG_S, STAND_INS, WIDE_SPACES, cased_stand_ins, stand_ins

_LETTER = STAND_INS["L"] + STAND_INS["H"]
_CLASSES = {
    "L": _LETTER + "A-Za-z",
    "Lu": _LETTER + "A-Z",
    "Ll": _LETTER + "a-z",
    "N": STAND_INS["N"] + "0-9",
    "M": STAND_INS["M"],
    "P": STAND_INS["P"] + r"!-#%-*,-/:;?@\[-\]_{}",
    "S": STAND_INS["S"] + r"$+<=>^`|~",
    "Han": STAND_INS["H"] + STAND_INS["U"],
    "NotHan": STAND_INS["L"] + "A-Za-z",
}

_CASED_CLASSES = _CLASSES | {
    "L": "".join(STAND_INS[kind] for kind in "LHABCD") + LONG_S + "A-Za-z",
    "Lu": STAND_INS["A"] + "A-Z",
    "Ll": STAND_INS["B"] + LONG_S + "a-z",
    "Lt": STAND_INS["C"],
    "Lm": STAND_INS["D"],
    "Lo": STAND_INS["L"] + STAND_INS["H"],
}

_UNSURE = 6
"""So many words before an end may be others if the text goes on, besides white space and digits."""
_DIGITS = STAND_INS["N"] + "0123456789"

# The parts of a pattern: a class, an escaped character, or any other single character.
_PATTERN_PARTS = re.compile(r"\\p\{(\w+)\}|\\.|.", re.DOTALL)

Splitter = Callable[[str], list[str]]


@dataclass(frozen=True)
class DigitGroups:
    """Cuts runs of digits into threes from the right, in time linear in the run.

    As a pattern this needs a look-ahead to the end of the run at every digit, which is quadratic.
    """

    run: str
    after: bool  # cuts after every group, and not before the first; else the other way round

    def splitter(self) -> Splitter:
        """The step as a function."""
        find = re.compile(_translate(self.run), re.ASCII).finditer

        def split(text: str) -> list[str]:
            cuts = [0]
            for run in find(text):
                start, end = run.span()
                first = start + (end - start) % 3
                if self.after and first == start:
                    first += 3
                cuts.extend(range(first, end + self.after, 3))
            cuts.append(len(text))
            return [text[a:b] for a, b in pairwise(cuts)]

        return split


@dataclass(frozen=True)
class PreTokenizer:
    """One variant: its steps, and what else llama.cpp decides by its name."""

    steps: tuple[str | DigitGroups, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever merges would give
    add_bos: bool = False  # where the file does not say
    whole_lines: bool = False  # the same for words of newlines only
    force_bos: bool = False  # even where the file says no: early files of the family were wrong
    byte_level: bool = True  # False: merges work on characters, spaces are written as U+2581
    cased: bool = False  # letters have their case, as in tokenizer.json


class WordSplitter:
    """Splits text into words by the steps of one variant."""

    def __init__(self, variant: PreTokenizer) -> None:
        self._steps = [_compiled(step, variant.cased) for step in variant.steps]
        self._cased = variant.cased
        self._wide_spaces = re.compile(f"[{WIDE_SPACES}]")

    def sure(self, text: str) -> list[str]:
        """The first words of a text that stand however it goes on; maybe none."""
        words = self.split(text)
        table = cased_stand_ins() if self._cased else stand_ins()
        # Which characters are digits is in the table: Python may not know the newest.
        while words and (words[-1].isspace() or not words[-1].translate(table).strip(_DIGITS)):
            words.pop()
        return words[:-_UNSURE]

    def split(self, text: str) -> list[str]:
        """All words at once."""
        if text.isascii():
            words = [text]
            for splitter, _ in self._steps:
                words = [part for word in words for part in splitter(word) if part]
            return words
        collapsed = text.translate(cased_stand_ins() if self._cased else stand_ins())
        real = text if self._cased else self._wide_spaces.sub(STAND_INS["W"], text)
        lengths = [len(text)]
        for splitter, on_collapsed in self._steps:
            pieces = _cut(collapsed if on_collapsed else real, lengths)
            lengths = [len(part) for piece in pieces for part in splitter(piece) if part]
        return _cut(text, lengths)


def _cut(text: str, lengths: list[int]) -> list[str]:
    pieces = []
    start = 0
    for length in lengths:
        pieces.append(text[start : start + length])
        start += length
    return pieces


@cache
def _compiled(step: str | DigitGroups, cased: bool) -> tuple[Splitter, bool]:
    """The step as a function, and whether it works on the collapsed text."""
    if isinstance(step, DigitGroups):
        return step.splitter(), r"\p{" in step.run
    on_collapsed = r"\p{" in step
    pattern = _translate(step, cased)
    if cased and not on_collapsed:
        assert r"\S" not in pattern, pattern
        pattern = pattern.replace(r"\s", rf"[\s{WIDE_SPACES}]")
    return _splitter(pattern), on_collapsed


def _splitter(pattern: str) -> Splitter:
    """Cuts a text into what a pattern finds and what lies between."""
    find = re.compile(pattern, re.ASCII).findall
    cut = re.compile(f"({pattern})", re.ASCII).split

    def split(text: str) -> list[str]:
        found = find(text)  # mostly there is nothing between
        return found if sum(map(len, found)) == len(text) else cut(text)

    return split


def _translate(pattern: str, cased: bool = False) -> str:
    """Replaces `\\p{..}` by the stand-ins and ASCII characters of the class."""
    classes = _CASED_CLASSES if cased else _CLASSES
    parts = []
    in_set = False
    for part in _PATTERN_PARTS.finditer(pattern):
        name = part[1]
        if name is None:
            in_set = part[0] == "[" or (in_set and part[0] != "]")
            parts.append(part[0])
        else:
            parts.append(classes[name] if in_set else f"[{classes[name]}]")
    return "".join(parts)
