"""How often drafts are right, and what a step costs: from these follows how far to draft."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median

_FADE = 0.93  # what a draft of long ago still counts, per draft since
_WEIGHT = 2.0  # drafts that the guess at the start stands for
_SAMPLES = 7  # steps of one size that are remembered
_UNKNOWN = 0.1  # what a token more is taken to cost before it was tried, as a share of the step
_FIRST_PROBE, _LAST_PROBE = 16, 256  # steps without a draft after which one is tried again


class Odds:
    """The chance of each place in a draft to be right, given that all before it were.

    When drafting does not pay, it is tried again after some steps, and ever more rarely.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._right: list[float] = []
        self._tried: list[float] = []
        self._rest = 0  # steps since the last draft
        self._probe_after = _FIRST_PROBE

    def reach(self, most: int) -> list[float]:
        """The chance that the first 1, 2, … `most` tokens are all right.

        A place that was tried seldom leans on the one before it.
        """
        out: list[float] = []
        whole, chance = 1.0, self._start
        for place in range(most):
            if place < len(self._right):
                right, tried = self._right[place], self._tried[place]
                chance = (right + _WEIGHT * chance) / (tried + _WEIGHT)
            whole *= chance
            out.append(whole)
        return out

    def learn(self, drafted: int, right: int) -> None:
        """A draft of so many tokens had so many right ones in front."""
        while len(self._right) < drafted:
            self._right.append(0.0)
            self._tried.append(0.0)
        for place in range(min(right + 1, drafted)):
            self._right[place] = self._right[place] * _FADE + (place < right)
            self._tried[place] = self._tried[place] * _FADE + 1
        self._rest = 0
        if right:
            self._probe_after = max(self._probe_after // 2, _FIRST_PROBE)

    def rested(self) -> bool:
        """A step goes without a draft of this kind; True where it is time to try one again."""
        self._rest += 1
        if self._rest <= self._probe_after:
            return False
        self._rest, self._probe_after = 0, min(2 * self._probe_after, _LAST_PROBE)
        return True


def smooth(before: float, now: float) -> float:
    """A measured time that leans on earlier ones; 0 stands for none."""
    return (before or now) * 0.8 + now * 0.2


class Costs:
    """Seconds of a step by its number of tokens, as measured lately on this machine."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if tokens not in self._samples:
            self._samples[tokens] = deque(maxlen=_SAMPLES)
            at = bisect_left(self._sizes, tokens)
            self._sizes.insert(at, tokens)
            self._seconds.insert(at, 0.0)
        self._samples[tokens].append(seconds)
        self._seconds[bisect_left(self._sizes, tokens)] = median(self._samples[tokens])

    def of(self, tokens: int) -> float:
        """The median of such steps, or a guess from those next to it; 0 before any was measured."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 0.0
        at = bisect_left(sizes, tokens)
        if at == len(sizes):
            return seconds[-1] * (1 + _UNKNOWN * (tokens - sizes[-1]))
        if sizes[at] == tokens or at == 0:
            return seconds[at]
        share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


@dataclass(frozen=True)
class Choice:
    """One sequence that could draft: how far, with which odds, and what each token costs."""

    odds: Odds
    most: int
    seconds_per_token: float
    seconds_at_all: float
    source: object
    """Those of one source draft together: the longest draft is what it costs."""
    extra: int = 0
    """Tokens that come along with any draft."""


def lengths(choices: Seq[Choice], n_tokens: int, n_gain: int, costs: Costs) -> list[int]:
    """How far each is to draft, so that a step of `n_tokens` gains most tokens per second.

    `n_gain` is what the step gains anyway. The likeliest token is added first, whoever's it is.
    """
    ladder = [
        (reach, -place, who)
        for who, choice in enumerate(choices)
        for place, reach in enumerate(choice.odds.reach(choice.most), 1)
    ]
    ladder.sort(reverse=True)
    taken = [0] * len(choices)
    drafting: dict[object, float] = {}
    gain = float(n_gain)
    best, best_rate = list(taken), gain / max(costs.of(n_tokens), 1e-9)
    for reach, place, who in ladder:
        choice = choices[who]
        taken[who] = -place
        n_tokens += 1 + (choice.extra if place == -1 else 0)
        gain += reach
        seconds = choice.seconds_at_all - place * choice.seconds_per_token
        drafting[choice.source] = max(drafting.get(choice.source, 0.0), seconds)
        rate = gain / max(costs.of(n_tokens) + sum(drafting.values()), 1e-9)
        if rate > best_rate:
            best, best_rate = list(taken), rate
    for who, choice in enumerate(choices):
        if best[who] == 0 and choice.odds.rested():
            best[who] = min(2, choice.most)
    return best
