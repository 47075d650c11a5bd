"""Ollama's `keep_alive`: how long a model stays in memory."""

from __future__ import annotations

import math
import re

from quire.server.errors import ApiError
from quire.server.models import ServedModel

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"\d{1,9}(?:\.\d{0,9})?"
_PART = re.compile(rf"({_NUMBER})(ms|s|m|h|)")
# Each number of several has its unit: where it could end anywhere, matching would take for ever.
_DURATION = re.compile(rf"[+-]?(?:{_NUMBER}|(?:{_NUMBER}(?:ms|s|m|h))+)")


def keep(model: ServedModel, said: float | str | None) -> None:
    """Sets how long a model stays once nobody uses it: seconds, or a text such as `1h30m`.

    Below zero it stays for ever; without a word, as long as was said before.
    """
    if said is None:
        return
    if isinstance(said, str):
        if not _DURATION.fullmatch(said):
            raise ApiError(
                400, f"keep_alive is seconds, or a text such as '5m', not {said!r:.80}",
                param="keep_alive",
            )  # fmt: skip
        parts = _PART.findall(said)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        said = -seconds if said.startswith("-") else seconds
    model.keep_s = math.inf if said < 0 else said
