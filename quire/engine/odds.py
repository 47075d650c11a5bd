"""How often drafts are right, and what a step costs: from these follows how far to draft."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

_FADE = 0.93  # what a draft of long ago still counts, per draft since
_WEIGHT = 2.0  # drafts that the guess at the start stands for
_OWN, _OTHERS = 0.3, 0.2  # how far a measured step moves its own size's cost, and others'
_STALE = 64  # steps after which it is measured again what a step without drafts costs
_UNKNOWN = 0.1  # what a token more is taken to cost before it was tried, as a share of the step
_FIRST_PROBE, _LAST_PROBE = 16, 256  # steps without a draft after which one is tried again
_LASTS = 64  # drafts that are likely to follow a first one
_HOPELESS = 0.03  # chance below which a token is not thought about
_PAUSE = 3  # steps after which a draft that did not pay is thought about again
_PROBE = 2  # tokens of such a draft
_PROBE_PRICE = 60  # steps that must pass, too, for each step that trying again costs


class Odds:
    """The chance of each place in a draft to be right, given that all before it were.

    They begin as those of all generations before, where there are any (`elder`). When drafting
    does not pay, it is tried again after some steps, and ever more rarely: for `burst` steps, as
    some ways to draft need a few to get going.
    """

    def __init__(self, start: float, burst: int = 1, elder: Odds | None = None) -> None:
        self._start = elder.reach(1)[0] if elder else start
        self._elder = elder
        self._right: list[float] = []
        self._tried: list[float] = []
        self._burst = burst
        self._trying = 0  # steps of a burst that are left
        self._pause = 0  # steps that it is not asked
        self._put_off = _FIRST_PROBE // 2  # steps of the last pause for want of room
        self._rest: int = elder._rest if elder else 0  # steps since the last draft
        self._probe_after: int = elder._probe_after if elder else _FIRST_PROBE

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
        if self._elder:
            self._elder.learn(drafted, right)
        while len(self._right) < drafted:
            self._right.append(0.0)
            self._tried.append(0.0)
        for place in range(min(right + 1, drafted)):
            self._right[place] = self._right[place] * _FADE + (place < right)
            self._tried[place] = self._tried[place] * _FADE + 1
        self._rest = 0
        if right:
            self._probe_after = max(self._probe_after // 2, _FIRST_PROBE)

    def skip_this_step(self) -> bool:
        """True where a draft would not have paid a moment ago; counts the step as one without."""
        if self._pause == 0:
            return False
        self._pause -= 1
        self._rest += 1
        return True

    def pause(self) -> None:
        """It would not have paid just now."""
        self._pause = _PAUSE

    def put_off(self) -> None:
        """There was no room for a draft: it is not asked for some steps, each time for more."""
        self._put_off = min(2 * self._put_off, _LAST_PROBE)
        self._pause = self._put_off

    def rested(self, price: float) -> bool:
        """A step goes without a draft of this kind; True where it is time to try one again.

        `price` is what trying costs, in steps.
        """
        if self._trying:
            self._trying -= 1
            return True
        self._rest += 1
        if self._elder:
            self._elder._rest = self._rest
        if self._rest <= self._burst * max(self._probe_after, price * _PROBE_PRICE):
            return False
        self._rest, self._trying = 0, self._burst - 1
        self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
        if self._elder:
            self._elder._probe_after = self._probe_after
        return True


def smooth(before: float, now: float) -> float:
    """A measured time that leans on earlier ones; 0 stands for none."""
    return (before or now) * 0.8 + now * 0.2


class Costs:
    """Seconds of a step by its number of tokens, as measured lately on this machine.

    A machine gets slower and faster for reasons of its own. So when steps of one size take longer
    than they did, those of all other sizes are believed to do so as well, if less firmly.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._rising: list[float] = []
        self._seen: dict[int, int] = {}
        self._steps = 0

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._steps += 1
        at = bisect_left(self._sizes, tokens)
        if tokens not in self._seen:
            self._sizes.insert(at, tokens)
            self._seconds.insert(at, seconds)
        ratio = min(max(seconds / self._seconds[at], 0.5), 2.0)  # one pause must not mean much
        self._seen[tokens] = self._steps
        others = ratio**_OTHERS
        self._seconds = [seconds * others for seconds in self._seconds]
        self._seconds[at] *= ratio ** (_OWN - _OTHERS)
        self._rising = _rising(self._seconds)

    def of(self, tokens: int) -> float:
        """What such a step takes, or a guess from sizes next to it; 0 before any was measured."""
        sizes, seconds = self._sizes, self._rising
        if not sizes:
            return 0.0
        at = bisect_left(sizes, tokens)
        if at == len(sizes):
            return seconds[-1] * (1 + _UNKNOWN * (tokens - sizes[-1]))
        if sizes[at] == tokens or at == 0:
            return seconds[at]
        share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def is_guess(self, tokens: int) -> bool:
        """Whether nothing near such a step was measured yet."""
        return not self._sizes or tokens > 2 * self._sizes[-1]

    def stale(self, tokens: int) -> bool:
        """Whether such a step was not measured for long, or none as small as it ever."""
        if not self._sizes or tokens < self._sizes[0]:
            return True
        return self._steps - self._seen.get(tokens, 0) > _STALE


def _rising(seconds: list[float]) -> list[float]:
    """The same, where a larger step seems to take less than a smaller one: the mean of both."""
    most = list(accumulate(seconds, max))
    least = list(accumulate(reversed(seconds), min))[::-1]
    return [(a + b) / 2 for a, b in zip(most, least, strict=True)]


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
    seconds_once: float = 0.0
    """What the first draft costs and later ones do not."""
    sequence: object = field(default_factory=object)
    """Of several choices for one sequence, one is taken."""

    def seconds(self, n: int) -> float:
        """What drafting so many tokens takes."""
        return self.seconds_at_all + n * self.seconds_per_token + self.seconds_once / _LASTS


def lengths(choices: Seq[Choice], n_tokens: int, n_gain: int, costs: Costs) -> list[int]:
    """How far each is to draft, so that a step of `n_tokens` gains most tokens per second.

    `n_gain` is what the step gains anyway. The likeliest token is added first, whoever's it is.
    Where a sequence has several choices, the one that would gain most alone is taken.
    """
    if costs.stale(n_tokens):
        return [0] * len(choices)
    contenders = dict(_contenders(choices, n_tokens, n_gain, costs))
    ladder = [
        (reach, -place, who)
        for who, choice in contenders.items()
        for place, reach in enumerate(choice.odds.reach(choice.most), 1)
    ]
    ladder.sort(reverse=True)
    start, taken = n_tokens, [0] * len(choices)
    drafting: dict[object, float] = {}
    gain = float(n_gain)
    best, best_rate = list(taken), gain / max(costs.of(n_tokens), 1e-9)
    for reach, place, who in ladder:
        if reach < _HOPELESS:
            break
        choice = choices[who]
        taken[who] = -place
        n_tokens += 1 + (choice.extra if place == -1 else 0)
        gain += reach
        seconds = max(drafting.get(choice.source, 0.0), choice.seconds(-place))
        drafting[choice.source] = seconds
        rate = gain / max(costs.of(n_tokens) + sum(drafting.values()), 1e-9)
        if rate > best_rate:
            best, best_rate = list(taken), rate
    for who, choice in enumerate(choices):
        if best[who]:
            continue
        if choice.odds.rested(_probe_price(choice, start, costs)):
            _take_instead(best, choices, who)
        elif who in contenders:
            choice.odds.pause()
    return best


def _take_instead(lengths: list[int], choices: Seq[Choice], who: int) -> None:
    """Tries a short draft of a choice, whatever else its sequence could draft."""
    for other, rival in enumerate(choices):
        if rival.sequence == choices[who].sequence:
            lengths[other] = 0
    lengths[who] = min(_PROBE, choices[who].most)


def _contenders(
    choices: Seq[Choice], n_tokens: int, n_gain: int, costs: Costs
) -> Iterable[tuple[int, Choice]]:
    """The best choice of each sequence, by what it would gain if nobody else drafted."""
    by_sequence: dict[object, list[tuple[int, Choice]]] = {}
    for who, choice in enumerate(choices):
        by_sequence.setdefault(choice.sequence, []).append((who, choice))

    def rate(found: tuple[int, Choice]) -> float:
        _, choice = found
        gains = accumulate(choice.odds.reach(choice.most), initial=float(n_gain))
        next(gains)
        return max(
            gain / max(costs.of(n_tokens + n + choice.extra) + choice.seconds(n), 1e-9)
            for n, gain in enumerate(gains, 1)
        )

    for found in by_sequence.values():
        yield found[0] if len(found) == 1 else max(found, key=rate)


def _probe_price(choice: Choice, n_tokens: int, costs: Costs) -> float:
    """How much longer a step takes with a short draft, in steps without."""
    plain = costs.of(n_tokens)
    drafting = choice.seconds_at_all + choice.seconds_once + _PROBE * choice.seconds_per_token
    size = n_tokens + _PROBE + choice.extra
    # A guess must not keep it from being measured: how dear it is may be all that matters.
    longer = drafting if costs.is_guess(size) else costs.of(size) - plain + drafting
    return longer / plain if plain else 0.0
