"""What callers pass, checked where it comes in: an odd value is told by its name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from quire.engine.session_saving import check_notes
from quire.errors import RequestError
from quire.types import Behind, Constraint, Grammar, Json, Regex, Sampling, SamplingFields

Stop: TypeAlias = str | Seq[str] | None
"""Texts that end an answer: one, several, or none."""
_USUAL = Sampling()
_LONGEST_SALT = 1024


def check_salt(salt: str) -> str:
    """A tenant's salt, if it is one."""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt is a text, not {salt!r:.80}", "cache_salt")
    if len(salt) > _LONGEST_SALT:  # it stays in memory for as long as what it is for
        have = f"{len(salt):,} characters; at most {_LONGEST_SALT:,}"
        raise RequestError(f"cache_salt has {have}", "cache_salt")
    return salt


def sampling_of(sampling: Sampling | None, fields: SamplingFields) -> Sampling:
    """How tokens are chosen: as configured, with these fields instead."""
    if sampling is None:
        sampling = _USUAL
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling is a quire.Sampling, not {sampling!r:.80}")
    known = Sampling.__dataclass_fields__
    if unknown := [name for name in fields if name not in known]:
        raise RequestError(
            f"unknown argument {', '.join(unknown)}; there are stop, speculate, constraint, for a "
            f"prompt n, best_of, cache_salt, and for sampling {', '.join(sorted(known))}"
        )
    return sampling.replace(**fields)


def constraint_of(constraint: Constraint | None) -> Constraint | None:
    """A constraint, if it is one."""
    if constraint is None or isinstance(constraint, (Json, Regex, Grammar, Behind)):
        return constraint
    raise RequestError(
        f"constraint is a quire.Json, quire.Regex or quire.Grammar, not {constraint!r:.80}"
    )


def listed(given: object) -> list[Any] | None:
    """What several things are given as, once: an iterator has them no second time."""
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, bytearray, Mapping)):
        return None
    try:
        return list(given)
    except TypeError:  # an array without an axis
        return None


def stops_of(stop: object) -> list[str]:
    """Stop strings: one text, several, or none."""
    if stop is None:
        return []
    found = [stop] if isinstance(stop, str) else listed(stop)
    if found is None or not all(isinstance(one, str) for one in found):
        raise RequestError(f"stop is a text or a list of texts, not {stop!r:.80}")
    return found


def messages_of(messages: object) -> list[dict[str, Any]]:
    """The messages of a conversation."""
    found = listed(messages)
    if found is None or not all(isinstance(message, Mapping) for message in found):
        said = messages if isinstance(messages, str) else "Hi"
        raise RequestError(
            "a conversation is a list of messages, such as "
            f"[{{'role': 'user', 'content': {said!r:.40}}}], not {messages!r:.80}"
        )
    return [_with_objects(with_text(message, number)) for number, message in enumerate(found)]


def with_text(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message whose content is one text, which every template takes, where it came in parts."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    return {**message, "content": "".join(_part(part, number) for part in content)}


def _part(part: object, number: int) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise RequestError(
        f"messages[{number}] has a part of type {kind!r:.80}; this model reads text only",
        "messages",
    )


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls as objects, which is how templates take them, where they are JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")  # of a call without any
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def template_options_of(options: object) -> dict[str, Any]:
    """What a chat template is told besides the conversation."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise RequestError(f"template_options are values by their names, not {options!r:.80}")
    if taken := sorted(options.keys() & {"messages", "tools"}):
        raise RequestError(f"template_options has {', '.join(taken)}, an argument of its own")
    return dict(options)


def copied_notes(notes: object) -> dict[str, Any]:
    """A session's notes for another session."""
    plain = check_notes(notes)
    try:
        return deepcopy(plain)
    except RecursionError:
        raise RequestError("the notes are nested too deeply to be copied") from None
    except TypeError as error:
        raise RequestError(f"a session's notes must be plain JSON: {error}") from error


def path_of(path: str | os.PathLike[str]) -> Path:
    """The path of a session file."""
    try:
        found = os.fspath(path)
        if isinstance(found, str):
            os.fsencode(found)
            return Path(found)
    except (TypeError, ValueError):
        pass
    raise RequestError(f"a session is saved under a path that a file can have, not {path!r:.80}")


def check_span(start: object, stop: object, n: int) -> tuple[int, int]:
    """Two positions; refuses what is no part of so many tokens, or all of them."""
    first, end = whole_number(start), whole_number(stop)
    if first is None or end is None:
        raise RequestError(f"remove takes two whole numbers, not {start!r:.40} and {stop!r:.40}")
    if not 0 <= first < end <= n or end - first == n:
        raise RequestError(f"remove takes a part of the {n} tokens, not {start} to {stop}")
    return first, end


def whole_number(given: object) -> int | None:
    """A whole number, NumPy's too; None for anything else."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return int(given)
    return None


def check_pin(pin: object, ttl_s: object) -> None:
    """Refuses a pin that is neither on nor off, and a time that is none."""
    if not isinstance(pin, bool):
        raise RequestError(f"pin is True or False, not {pin!r:.80}")
    whole = whole_number(ttl_s) or 0
    number = isinstance(ttl_s, (int, float)) and not isinstance(ttl_s, bool)
    if ttl_s is not None and not (number and abs(whole) < 2**63):
        raise RequestError(f"ttl_s is a number of seconds, not {ttl_s!r:.80}")
