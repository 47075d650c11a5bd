"""How many tokens of prompts a step may have, by time: somebody may be reading.

A step with a chunk of a prompt takes longer than one without. While sequences generate, chunks are
as large as `reading_s` allows, and steps without any come in between, so that readers keep a share
of the speed they would have alone. When nobody generates, `alone_s` bounds a step: whoever leaves
or comes is noticed between steps.
"""

from __future__ import annotations

from math import ceil

_LEAST = 32  # tokens of a chunk, however slow: a prompt's wait is bounded
_SHARE = 0.4  # of their own speed that readers keep beside a prompt
_NEW = 0.3  # weight of the last step in what is known


class Pace:
    """What steps took so far, and what the next one may have."""

    def __init__(self, reading_s: float = 0.06, alone_s: float = 0.25) -> None:
        self.reading_s = reading_s
        self.alone_s = alone_s
        self._decode_s = 0.0  # of a step without prompts
        self._token_s = 0.0  # of a token of a prompt
        self._owed = 0  # steps without prompts that readers are due

    def prompt_tokens(self, going: int, most: int) -> int:
        """Tokens of prompts that a step may have beside so many that generate."""
        if going and self._owed > 0:
            return 0
        if not self._token_s:
            return min(most, _LEAST)  # nothing is known yet
        seconds = self.reading_s - self._decode_s if going else self.alone_s
        return max(min(int(seconds / self._token_s), most), min(_LEAST, most))

    def took(self, going: int, tokens: int, seconds: float) -> None:
        """A step with so many that generate and tokens of prompts took so long."""
        if not tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            self._owed -= 1
            return
        beside = self._decode_s if going else 0.0
        self._token_s = _mean(self._token_s, max(seconds - beside, seconds / 4) / tokens)
        decode_s = self._decode_s or seconds
        self._owed = ceil((_SHARE * seconds / decode_s - 1) / (1 - _SHARE)) if going else 0


def _mean(before: float, now: float) -> float:
    return now if not before else (1 - _NEW) * before + _NEW * now
