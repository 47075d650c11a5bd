"""What an answer has to fit, as flags say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import RequestError
from quire.text.gbnf import gbnf_to_lark
from quire.types import Constraint, Grammar, Json, Regex


def constraint_from(options: dict[str, Any]) -> Constraint | None:
    """What the answer has to fit; takes its own options out of them."""
    names = ("json_schema", "grammar", "grammar_file", "regex")
    given = {name: value for name in names if (value := options.pop(name)) is not None}
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RequestError(f"{flags} exclude each other; give one")
    for name, value in given.items():
        match name:
            case "json_schema":
                return Json(value if value.lstrip().startswith(("{", "[")) else _read(value))
            case "grammar":
                return Grammar(gbnf_to_lark(value))
            case "grammar_file":
                return Grammar(gbnf_to_lark(_read(value)))
            case "regex":
                return Regex(value)
    return None


def structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """The same for a server."""
    match constraint:
        case Json(str(schema)):
            try:
                return {"json": json.loads(schema)}
            except (ValueError, RecursionError) as error:
                raise RequestError(f"--json-schema is not valid JSON: {error}") from error
        case Regex(pattern):
            return {"regex": pattern}
        case Grammar(text):
            return {"grammar": text}
    raise AssertionError(constraint)


def _read(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{name}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{name} is not UTF-8: {error}") from error
