"""GBNF, llama.cpp's notation for grammars, turned into the notation that llguidance reads.

GBNF speaks of characters, while llguidance first cuts text into the longest words that a grammar
knows. So every character becomes a word of its own here: then both accept the same texts.
"""

from __future__ import annotations

import re
from typing import NoReturn

from quire.errors import RequestError

__all__ = ["as_lark", "gbnf_to_lark"]

_MOST_REPEATS = 2000  # llama.cpp's limit
_MOST_NESTED = 100
_NAME = re.compile(r"[A-Za-z0-9-]+")
_SPACE = re.compile(r"(?:\s++|#[^\n]*+)*+")  # what it took it keeps: nothing is tried twice
_RULE = re.compile(rf"({_NAME.pattern}){_SPACE.pattern}::=")
_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_TOKEN = re.compile(r"<(?:\[\d+\]|[^<>\s]+)>")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}


def gbnf_to_lark(grammar: str) -> str:
    """The same grammar in Lark's notation; what is wrong is named with its line."""
    return _Reader(grammar).lark()


def as_lark(grammar: str) -> str:
    """A grammar of either notation in Lark's; GBNF is known by its first rule, `name ::= …`."""
    space = _SPACE.match(grammar)
    assert space
    return gbnf_to_lark(grammar) if _RULE.match(grammar, space.end()) else grammar


class _Reader:
    """Reads a grammar from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._nested = 0
        self._numbers: dict[str, int] = {}  # by name, as they are first met
        self._rules: dict[str, str] = {}
        self._used: dict[str, int] = {}  # where a rule is first spoken of

    def lark(self) -> str:
        self._skip()
        while self._at < len(self._text):
            self._rule()
        if "root" not in self._rules:
            known = ", ".join(self._rules) or "none"
            raise RequestError(f"the grammar has no rule 'root', where it begins; it has {known}")
        for name, at in self._used.items():
            if name not in self._rules:
                self._at = at
                self._refuse(f"there is no rule {name!r}")
        lines = [f"{self._alias(name)}: {body}" for name, body in self._rules.items()]
        return "\n".join([f"start: {self._alias('root')}", *lines]) + "\n"

    def _rule(self) -> None:
        begin = _RULE.match(self._text, self._at)
        if not begin:
            self._refuse("a rule begins like this: name ::= …")
        name = begin[1]
        if name in self._rules:
            self._refuse(f"there is a rule {name!r} already")
        self._at = begin.end()
        self._skip()
        self._rules[name] = self._choice()
        if self._at < len(self._text) and not _RULE.match(self._text, self._at):
            self._refuse(f"{self._text[self._at]!r} belongs to nothing")

    def _choice(self) -> str:
        """Sequences with bars between them; any may be empty."""
        self._nested += 1
        if self._nested > _MOST_NESTED:
            self._refuse(f"parentheses are nested deeper than {_MOST_NESTED}")
        ways = [self._sequence()]
        while self._peek() == "|":
            self._step()
            ways.append(self._sequence())
        self._nested -= 1
        return " | ".join(ways)

    def _sequence(self) -> str:
        parts: list[str] = []
        while self._peek() not in ("", "|", ")") and not _RULE.match(self._text, self._at):
            parts.append(self._repeated(self._item()))
        return " ".join(parts) or '""'

    def _item(self) -> str:
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case "(":
                self._step()
                inside = self._choice()
                if self._peek() != ")":
                    self._refuse("a parenthesis is not closed")
                self._step()
                return f"({inside})"
            case ".":
                self._step()
                return "/(?s:.)/"
            case "<":
                return self._take(_TOKEN, "a token is written <name> or <[number]>")
            case "!":
                self._refuse("tokens that must not come (!<…>) are not known here")
        at, name = self._at, self._take(_NAME, f"{self._peek()!r} is not expected here")
        self._used.setdefault(name, at)
        return self._alias(name)

    def _repeated(self, item: str) -> str:
        """An item with what follows it: *, +, ? or a count, any number of times."""
        while (sign := self._peek()) in ("*", "+", "?", "{"):
            if sign != "{":
                self._step()
                item = f"({item}){sign}"
                continue
            found = _COUNT.match(self._text, self._at)
            if not found or not (found[1] or found[3]):
                self._refuse("a count is written {3}, {3,}, {,5} or {3,5}")
            low, high = int(found[1] or 0), int(found[3]) if found[3] else None
            if not found[2]:
                high = low
            if max(low, high or 0) > _MOST_REPEATS or (high is not None and high < low):
                self._refuse(f"the count {found[0]} is backwards, or above {_MOST_REPEATS}")
            self._at = found.end()
            self._skip()
            item = f"({item}){{{low},{'' if high is None else high}}}"
        return item

    def _literal(self) -> str:
        self._at += 1
        letters = []
        while (letter := self._char('"')) is not None:
            letters.append(_regex([(letter, letter)]))
        self._skip()
        return f"({' '.join(letters)})" if letters else '""'

    def _class(self) -> str:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges = []
        while (low := self._char("]")) is not None:
            high: str | None = low
            dash = self._text.startswith("-", self._at)
            if dash and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = self._char("")
            if high is None or high < low:
                self._refuse("a range goes from a lower character to a higher one")
            ranges.append((low, high))
        self._skip()
        if not ranges:
            return "/(?s:.)/" if negated else self._refuse("a class of no characters fits nothing")
        return _regex(ranges, negated)

    def _char(self, end: str) -> str | None:
        """The next character of a text or class, escapes undone; None at its end."""
        if self._at >= len(self._text):
            self._refuse(f"the end is missing: {end or 'a character'}")
        char = self._text[self._at]
        self._at += 1
        if char == end:
            return None
        if char != "\\":
            return char
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _HEX:
            digits = self._text[self._at : self._at + _HEX[kind]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
                self._refuse(f"\\{kind} needs {_HEX[kind]} hexadecimal digits")
            self._at += len(digits)
            if int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) <= 0xDFFF:
                self._refuse(f"\\{kind}{digits} is no character")
            return chr(int(digits, 16))
        if kind not in _ESCAPES:
            self._refuse(f"there is no escape \\{kind}")
        return _ESCAPES[kind]

    def _alias(self, name: str) -> str:
        """A name that Lark allows."""
        number = self._numbers.setdefault(name, len(self._numbers))
        return f"r{number}_{name.lower().replace('-', '_')}"

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _step(self) -> None:
        self._at += 1
        self._skip()

    def _skip(self) -> None:
        """Past white space and comments."""
        found = _SPACE.match(self._text, self._at)
        assert found
        self._at = found.end()

    def _take(self, pattern: re.Pattern[str], otherwise: str) -> str:
        found = pattern.match(self._text, self._at)
        if not found:
            self._refuse(otherwise)
        self._at = found.end()
        self._skip()
        return found[0]

    def _refuse(self, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        raise RequestError(f"the grammar is wrong in line {line}: {reason}")


def _regex(ranges: list[tuple[str, str]], negated: bool = False) -> str:
    """One character of these ranges, as a regular expression between slashes."""
    inside = "".join(
        _plain(low) if low == high else f"{_plain(low)}-{_plain(high)}" for low, high in ranges
    )
    return f"/[{'^' * negated}{inside}]/"


def _plain(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
