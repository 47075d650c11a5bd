"""How many tokens of prompts a step may have, by time: somebody may be reading.

A step with a chunk of a prompt takes longer than one without. While sequences generate, such a
step takes `reading_s` at most, or 2.5 times what it takes without if that is more, for many
readers are slow by themselves; a chunk alone never takes more than `reading_s`. While a crowd of
prompts waits, it is six times, up to twice `reading_s`: each of its steps computes a token for
everybody who reads, and with fewer of them all are answered sooner. What readers lose to chunks
they are owed: steps without chunks come in between, so that they keep a share of the speed they
would have alone. A prompt's first tokens go ahead on credit, so that many who come at once are all
answered soon; what comes behind them waits until nothing is owed. When nobody generates, `alone_s`
bounds a step: whoever leaves or comes is noticed between steps.
"""

from __future__ import annotations

_LEAST = 32  # tokens of a chunk, however slow: a prompt's wait is bounded
_FIRST = 512  # tokens of a prompt that go ahead on credit
_CROWD = 8  # prompts; while more wait, their chunks are longer
_CREDIT_S = 2.0  # seconds that readers may be owed before those wait too
_SHARE = 0.55  # of their own speed that steps leave readers beside a long prompt
_NEW = 0.3  # weight of the last step in what is known


class Pace:
    """What steps took so far, and what the next one may have."""

    def __init__(self, reading_s: float = 0.05, alone_s: float = 0.25) -> None:
        self.reading_s = reading_s
        self.alone_s = alone_s
        self._decode_s = 0.0  # of a step without prompts, for so many that generate
        self._decoding = 0
        self._token_s = 0.0  # of a token of a prompt
        self._chunks = 0
        self._owed_s = 0.0  # of steps without prompts that readers are due

    def lets(self, computed: int) -> bool:
        """Whether a prompt may have a chunk beside others that generate, by what it has had."""
        return self._owed_s <= (_CREDIT_S if computed < _FIRST else 0.0)

    def prompt_tokens(self, going: int, most: int, waiting: int = 1) -> int:
        """Tokens of so many prompts that a step may have beside so many that generate."""
        if not self._token_s:
            return min(most, _LEAST)  # nothing is known yet
        seconds = self._chunk_s(going, waiting) if going else self.alone_s
        return max(min(int(seconds / self._token_s), most), min(_LEAST, most))

    def _chunk_s(self, going: int, waiting: int) -> float:
        """Seconds that a chunk may take beside those who generate."""
        decode_s = self._without(going)
        times, most_s = 1.5, self.reading_s
        if waiting > _CROWD:
            times, most_s = 5.0, max(2 * self.reading_s - decode_s, self.reading_s)
        return max(self.reading_s - decode_s, min(times * decode_s, most_s))

    def _without(self, going: int) -> float:
        """Seconds of a step without prompts; one who generates costs like two tokens of those."""
        more_s = 2 * self._token_s * (going - self._decoding)
        return max(self._decode_s + more_s, self._decode_s / 4) if self._decode_s else 0.0

    def took(self, going: int, tokens: int, seconds: float) -> None:
        """A step with so many that generate and tokens of prompts took so long."""
        if not tokens:
            self._decode_s = _mean(self._without(going), seconds)
            self._decoding = going
            self._owed_s = max(self._owed_s - seconds, 0.0)
            return
        beside_s = self._without(going) if going else 0.0
        self._chunks += 1
        before = self._token_s if self._chunks > 2 else 0.0  # the first one finds caches cold
        self._token_s = _mean(before, max(seconds - beside_s, seconds / 4) / tokens)
        # With so many seconds more they would have had their share of the whole.
        due_s = (_SHARE * seconds - beside_s) / (1 - _SHARE)
        self._owed_s = max(self._owed_s + due_s, 0.0) if going else 0.0


def _mean(before: float, now: float) -> float:
    return now if not before else (1 - _NEW) * before + _NEW * now
