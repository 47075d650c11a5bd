"""JSON schemas, made ready for models to write by."""

from __future__ import annotations

import json
from typing import Any

_SCHEMAS = frozenset((
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items",
    "not", "oneOf", "prefixItems", "propertyNames", "then",
))  # fmt: skip
"""Words behind which is a schema, or a list of them."""
_BY_NAME = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)
"""Words behind which are schemas by name."""
_SHAPES = ("properties", "$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")
"""Words that say what an object has."""
_FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
))  # fmt: skip
"""Formats that texts can be held to."""


def closed(schema: Any) -> Any:
    """A schema whose objects have no members but those that it names, unless it says otherwise.

    Schemas let objects have any others, and small models make them up without end. What fits the
    closed schema fits the open one. One that says in two places what an object has stays as it is:
    what one of them names is unknown to the other.
    """
    schema = plain(schema)
    found = _all(schema)
    if not any(map(_combines, found)):
        for one in found:
            if _names_all(one):
                one.setdefault("additionalProperties", False)
    return schema


def plain(schema: Any) -> Any:
    """A copy without formats that nobody here knows: such ones are notes, as pydantic's `path`."""
    schema = json.loads(json.dumps(schema))
    for one in _all(schema):
        if isinstance(one.get("format"), str) and one["format"] not in _FORMATS:
            del one["format"]
    return schema


def _all(schema: Any) -> list[dict[str, Any]]:
    """A schema, and all those in it."""
    found: list[dict[str, Any]] = []
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            found.append(one)
            for word, value in one.items():
                if word in _SCHEMAS:
                    waiting += value if isinstance(value, list) else [value]
                elif word in _BY_NAME and isinstance(value, dict):
                    waiting += value.values()
    return found


def _combines(schema: dict[str, Any]) -> bool:
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    return sum(word in schema for word in _SHAPES) > 1


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether an object can do with the members that are named."""
    named, needed = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(needed, list):
        return False
    least = schema.get("minProperties", 0)
    return all(one in named for one in needed) and least in range(len(named) + 1)
