"""Damages files: bytes, texts and JSON, by a seed, so that what failed can be done again."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "a", "\0", "\ud800", "\u2581", "a" * 5000, "../x", "/dev/zero",
    "(a+)+b", [], {}, [[]], [None], {"": None}, {"type": "Sequence"}, list(range(100)),
]  # fmt: skip
_EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**50, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """A few flips, overwrites, insertions, removals and copies of its own parts."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randint(0, 5):
            case 0:
                new = rng.randbytes(rng.randint(1, 4))
                data = data[:at] + new + data[at + len(new) :]
            case 1:
                width = rng.choice((4, 8))
                new = (rng.choice(_EXTREMES) % (1 << 8 * width)).to_bytes(width, "little")
                data = data[:at] + new + data[at + width :]
            case 2:
                data = data[:at]
            case 3:
                data = data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]
            case 4:
                data = data[:at] + data[at + rng.randint(1, 64) :]
            case _:
                source = rng.randint(0, len(data))
                data = data[:at] + data[source : source + 64] + data[at:]
    return data


def mutate_text(rng: Random, text: str, words: list[str]) -> str:
    """Parts removed, repeated, swapped, and words from elsewhere put in."""
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randint(0, len(text)) for _ in range(2))
        match rng.randint(0, 3):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:end] + text[at:end] * rng.choice((1, 2, 50)) + text[end:]
            case 2:
                text = text[:at] + rng.choice(words) + text[at:]
            case _:
                text = text[:at] + rng.choice(words) + text[end:]
        text = text[:100_000]
    return text


def mutate_json(rng: Random, value: Any) -> Any:
    """Some values replaced by odd ones, by others of the same file, removed, nested or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        place, other = _place(rng, value), _place(rng, value)
        if place is None or other is None:
            return copy.deepcopy(rng.choice(ODD))
        inside, key = place
        match rng.randint(0, 5):
            case 0 | 1:
                inside[key] = copy.deepcopy(rng.choice(ODD))
            case 2:
                inside[key] = copy.deepcopy(other[0][other[1]])
            case 3:
                del inside[key]
            case 4:
                for _ in range(rng.choice((1, 50))):
                    inside[key] = [inside[key]] if rng.random() < 0.5 else {"x": inside[key]}
            case _:
                if isinstance(inside, dict):
                    inside[str(rng.choice(ODD))[:99]] = inside.pop(key)
                else:
                    inside.extend([copy.deepcopy(inside[key])] * rng.choice((1, 100)))
    return value


def json_bytes(rng: Random, value: Any) -> bytes:
    """A damaged value as a file, whose bytes are now and then damaged as well."""
    data = json.dumps(value).encode()
    return mutate_bytes(rng, data) if rng.random() < 0.3 else data


def _place(rng: Random, value: Any) -> tuple[Any, Any] | None:
    """Something that can be replaced, at any depth: what holds it, and where."""
    found = None
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        found = value, key
        value = value[key]
        if rng.random() < 0.25:
            break
    return found
