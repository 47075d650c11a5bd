"""How many tokens of prompts a step may have, by time: somebody may be reading.

A step with a chunk of a prompt takes longer than one without. While sequences generate, such a step
takes `reading_s` at most, or 2.5 times what it takes without if that is more, for many readers are
slow by themselves; a chunk alone never takes more than `reading_s`. Steps without chunks come in
between, so that readers keep a share of the speed they would have alone; short prompts may go ahead
on credit. When nobody generates, `alone_s` bounds a step: whoever leaves or comes is noticed
between steps.
"""

from __future__ import annotations

from math import ceil

_LEAST = 32  # tokens of a chunk, however slow: a prompt's wait is bounded
_CREDIT = 16  # steps that may be owed before no chunk is taken
_SHARE = 0.45  # of their own speed that readers keep beside a prompt
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
        if going and self._owed > _CREDIT:
            return 0
        if not self._token_s:
            return min(most, _LEAST)  # nothing is known yet
        seconds = self._chunk_s() if going else self.alone_s
        return max(min(int(seconds / self._token_s), most), min(_LEAST, most))

    def _chunk_s(self) -> float:
        """Seconds that a chunk may take beside those who generate."""
        decode_s = self._decode_s
        return max(self.reading_s - decode_s, min(1.5 * decode_s, self.reading_s))

    def took(self, going: int, tokens: int, seconds: float) -> None:
        """A step with so many that generate and tokens of prompts took so long."""
        if not tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            self._owed = max(self._owed - 1, 0)
            return
        beside = self._decode_s if going else 0.0
        self._token_s = _mean(self._token_s, max(seconds - beside, seconds / 4) / tokens)
        decode_s = self._decode_s or seconds
        due = ceil((_SHARE * seconds / decode_s - 1) / (1 - _SHARE))
        self._owed = max(self._owed + due, 0) if going else 0


def _mean(before: float, now: float) -> float:
    return now if not before else (1 - _NEW) * before + _NEW * now
