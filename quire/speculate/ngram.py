"""Prompt lookup: what followed the last tokens when they came before is likely to follow again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.engine.drafter import Drafter, Offer, Speculator, Target
from quire.engine.sequence import Sequence
from quire.errors import RequestError
from quire.speculate.common import check_whole, known_source
from quire.speculate.ngram_cache import NgramCache

_LONGEST = 16  # tokens that a match is followed back
_START: Final = {1: 0.2, 2: 0.4, 3: 0.55, 4: 0.7, 8: 0.85, _LONGEST: 0.95}
"""How sure a match is taken to be at first, by the tokens that match, at least."""

_CACHE_START: Final = 0.5


@dataclass(frozen=True)
class Ngram(Speculator):
    """Looks the last `max_n` … `min_n` tokens up in prompt and output, then in a cache file's."""

    max_n: int = 3
    min_n: int = 1
    most: int = 24
    """Tokens of the longest draft."""
    cache: NgramCache | None = None

    def __post_init__(self) -> None:
        for name in ("max_n", "min_n", "most"):
            check_whole(f"Ngram's {name}", getattr(self, name))
        if self.cache is not None and not isinstance(self.cache, NgramCache):
            raise RequestError(
                f"Ngram's cache is {self.cache!r:.80}; it takes what NgramCache.load or .build "
                "returns"
            )
        if not 1 <= self.min_n <= self.max_n <= _LONGEST:
            raise RequestError(
                f"Ngram needs 1 <= min_n <= max_n <= {_LONGEST}, not {self.min_n} and {self.max_n}"
            )
        if self.most < 1:
            raise RequestError(f"Ngram's most is {self.most}; a draft has at least 1 token")

    def start(self, target: Target, sequence: Sequence) -> Drafter:
        """A drafter with an index of its own."""
        n_vocab = target.runner.model.n_vocab
        if self.cache is not None and self.cache.n_vocab != n_vocab:
            raise RequestError(
                f"the n-gram cache is of a vocabulary of {self.cache.n_vocab} tokens, the model's "
                f"has {n_vocab}; build it from text of this model's tokenizer"
            )
        return NgramDrafter(self, target)


class Index:
    """Where the last tokens came before: one entry per length and token, the latest wins."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = range(max_n, min_n - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 0

    def extend(self, tokens: list[int]) -> None:
        """Takes in what came since the last call; what is at the very end has no sequel yet."""
        places, first = self._places, self._known
        for n in self._lengths:
            for at in range(max(first, n), len(tokens)):
                places[tuple(tokens[at - n : at])] = at
        self._known = len(tokens)

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """Where the sequel of the last tokens is, and how many tokens match; (0, 0) for nowhere."""
        for n in self._lengths:
            place = self._places.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if place is not None:
                while n < min(_LONGEST, place) and tokens[place - n - 1] == tokens[-n - 1]:
                    n += 1
                return place, n
        return 0, 0


class NgramDrafter(Drafter):
    """Follows one sequence."""

    def __init__(self, settings: Ngram, target: Target) -> None:
        self._settings = settings
        self._source = known_source(target)
        self._index = Index(settings.min_n, settings.max_n)
        self._known: list[int] = []  # the sequence's tokens: they only grow while it generates
        self._odds = {n: target.odds((Ngram, n), start) for n, start in _START.items()}
        self._cache_odds = target.odds(NgramCache, _CACHE_START)

    def offer(self, sequence: Sequence, most: int) -> Offer | None:
        """What followed the last time, and how often that was right with such a match."""
        tokens, most = self._known, min(most, self._settings.most)
        tokens += sequence.tokens[len(tokens) :]
        self._index.extend(tokens)
        place, matched = self._index.find(tokens)
        if place:
            draft = sequel(tokens, place, most)
            odds = self._odds[max(least for least in self._odds if least <= matched)]
            return Offer(self._source, len(draft), odds, draft)
        cache = self._settings.cache
        if cache is not None and (draft := cache.sequel(tokens, most)):
            return Offer(self._source, len(draft), self._cache_odds, draft)
        return None


def sequel(tokens: list[int], place: int, most: int) -> tuple[int, ...]:
    """`most` tokens from a place on; behind the end it goes on with what it has said itself."""
    draft = tokens[place : place + most]
    period = len(tokens) - place
    while len(draft) < most:
        draft.append(draft[len(draft) - period])
    return tuple(draft)
