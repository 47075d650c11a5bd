"""One object of a tokenizer.json, read so that nothing in it goes unnoticed."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final, NoReturn

from quire.errors import TokenizerError
from quire.weights.gguf_format import quote

_MOST_BYTES: Final = 64_000_000
_MOST_VALUES: Final = 8_000_000  # of the largest vocabularies there are 2.5 million
_MOST_PARTS: Final = 32


class Part:
    """An object whose every field must be known; `where` is what errors call it."""

    def __init__(self, where: str, value: object) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise TokenizerError(f"{where} must be an object, it is {_brief(value)}")
        self._values: dict[str, Any] = value
        self._known = {"type"}

    @property
    def kind(self) -> str:
        """What the object says it is."""
        kind = self._values.get("type")
        if not isinstance(kind, str):
            raise TokenizerError(f"{self.where} must have a type, it has {_brief(kind)}")
        return kind

    def get(self, key: str, kind: type, *default: Any) -> Any:
        """A field of this type; a missing one, or null, is the default if there is one."""
        self._known.add(key)
        value = self._values.get(key)
        if value is None and default:
            return default[0]
        if type(value) is not kind:
            self.refuse(f"{key} is {_brief(value)}, it must be of type {kind.__name__}")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuses a field that says anything but these, of which one may be None: missing."""
        self._known.add(key)
        value = self._values.get(key)
        if not any(value is known or (type(value), value) == (type(known), known)
                   for known in allowed):  # fmt: skip
            known = ", ".join(map(_brief, allowed))
            self.refuse(f"{key} is {_brief(value)}; known is {known}")

    def skip(self, *keys: str) -> None:
        """Fields that may say what they like."""
        self._known.update(keys)

    def part(self, key: str) -> Part | None:
        """An object inside; None where there is none."""
        self._known.add(key)
        value = self._values.get(key)
        return None if value is None else Part(f"{self.where} {key}", value)

    def sequence(self, key: str) -> list[Part]:
        """The parts of a field that is one, several as a Sequence, or null; Sequences may nest."""
        lists = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers",
                 "post_processor": "processors", "decoder": "decoders"}  # fmt: skip
        first = self.part(key)
        waiting = [] if first is None else [first]
        parts: list[Part] = []
        count = 0
        while waiting:
            part = waiting.pop()
            count += 1
            if part.kind != "Sequence":
                parts.append(part)
                continue
            inside = part.get(lists[key], list)
            part.finish()
            if count + len(inside) > _MOST_PARTS:
                part.refuse(f"it has more than {_MOST_PARTS} parts")
            waiting.extend(Part(f"{self.where} {key}", value) for value in reversed(inside))
        return parts

    def finish(self) -> None:
        """Refuses fields that nobody asked for."""
        unknown = sorted(set(self._values) - self._known)
        if unknown:
            named = ", ".join(map(quote, unknown[:4]))
            self.refuse(f"what {named} means here is not known")

    def refuse(self, fault: str) -> NoReturn:
        """An error about this object."""
        kind = self._values.get("type")
        name = f" {quote(kind)}" if isinstance(kind, str) else ""
        raise TokenizerError(f"{self.where}{name}: {fault}")


def parse(text: bytes, name: str) -> Part:
    """A file as an object; what it would take in memory is bounded before it is parsed."""
    if len(text) > _MOST_BYTES:
        raise TokenizerError(f"{name}: has {len(text)} bytes, at most {_MOST_BYTES} are read")
    values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise TokenizerError(f"{name}: has {values} values, at most {_MOST_VALUES} are read")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise TokenizerError(f"{name}: {quote(twice)} appears twice")
        return out

    try:
        return Part(f"{name}:", json.loads(text, object_pairs_hook=unique))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name}: not a tokenizer: not JSON: {error}") from error


def _brief(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return quote(value) if isinstance(value, str) else quote(repr(value))
