"""Lookahead: the model guesses several places ahead at once, and its guesses become n-grams.

A window of W columns holds guesses for the next W places, each N-1 levels deep. In every step the
model continues all columns by one token (Jacobi iteration); a column's tokens are then an n-gram
for the pool. N-grams of the pool that begin with the last token are tried as drafts, up to G.

    position        +1        +2        +3         column j runs as   last · row 0 up to j · below j
    row 0          x00 ─────▶ x01 ─────▶ x02
    row 1                 ╲        ╲        ╲
                           x10      x11      x12

All of it runs in one batch. Each column and each n-gram but the first is a fork of the sequence:
it shares every page. The fork that was right becomes the sequence, the others are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.engine.drafter import Draft, Drafter, DraftRequest, Offer, Source, Speculator, Target
from quire.engine.odds import Odds
from quire.engine.plan import Accepted, Branch
from quire.engine.sequence import Sequence
from quire.errors import RequestError
from quire.memory.memory import Memory
from quire.speculate.common import check_whole

_START = 0.3  # how sure a draft is taken to be at first
_BURST = 4  # steps that it takes until the pool has anything


@dataclass(frozen=True)
class Lookahead(Speculator):
    """Jacobi iteration over `window` columns, n-grams of `ngram` tokens, `pool` of them tried."""

    window: int = 4
    ngram: int = 3
    pool: int = 3

    def __post_init__(self) -> None:
        for name in ("window", "ngram", "pool"):
            check_whole(f"Lookahead's {name}", getattr(self, name))
        if not (1 <= self.window <= 16 and 2 <= self.ngram <= 8 and 1 <= self.pool <= 16):
            raise RequestError(
                "Lookahead takes a window of 1 to 16, n-grams of 2 to 8 tokens and a pool of 1 to "
                f"16, not {self.window}, {self.ngram} and {self.pool}"
            )

    def start(self, target: Target, sequence: Sequence) -> Drafter:
        """A drafter with a window and a pool of its own."""
        source = target.sources.setdefault(Lookahead, Forks(target.memory))
        return LookaheadDrafter(source, self, target.odds(self, _START, _BURST))


class Pool:
    """N-grams by their first token; of each, the latest few."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_first: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """An n-gram that the model made."""
        known = self._by_first.setdefault(first, OrderedDict())
        known[rest] = None
        known.move_to_end(rest)
        if len(known) > self._most:
            known.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What may follow a token, the latest first."""
        return list(reversed(self._by_first.get(token, ())))


class LookaheadDrafter(Drafter):
    """The window and the pool of one generation."""

    def __init__(self, source: Source, settings: Lookahead, odds: Odds) -> None:
        self._source = source
        self._settings = settings
        self._pool = Pool(settings.pool)
        self._rows: list[list[int]] = []
        self._odds = odds

    def offer(self, sequence: Sequence, most: int) -> Offer | None:
        """N-grams of the pool, with what it takes to fill it."""
        s = self._settings
        if not self._rows:  # any tokens will do to begin with
            past = sequence.tokens[-s.window - s.ngram :]
            self._rows = [
                [past[(r + j) % len(past)] for j in range(s.window)] for r in range(s.ngram - 1)
            ]
        columns = sum(map(len, self.columns(sequence)))
        others = len(self._pool.after(sequence.tokens[-1])[1:]) * s.ngram
        most = min(most, s.ngram - 1)
        return Offer(self._source, most, self._odds, extra=columns + others, drafter=self)

    def candidates(self, sequence: Sequence, most: int) -> list[tuple[int, ...]]:
        """N-grams that begin with the last token, without it."""
        found = [rest[:most] for rest in self._pool.after(sequence.tokens[-1])]
        return list(dict.fromkeys(found))

    def columns(self, sequence: Sequence) -> list[tuple[int, ...]]:
        """What each column runs."""
        last, (first, *below) = sequence.tokens[-1], self._rows
        return [
            (last, *first[: j + 1], *(row[j] for row in below))
            for j in range(self._settings.window)
        ]

    def learn(self, made: Seq[int]) -> None:
        """What the model says behind each column: n-grams for the pool, and the next window."""
        for column, token in enumerate(made):
            first, *rest = (row[column] for row in self._rows)
            self._pool.add(first, (*rest, token))
        if len(made) == self._settings.window:
            self._rows = [*self._rows[1:], list(made)]


class Forks(Source):
    """Makes the forks of a step, and lets the right one take over."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._forks: list[int] = []
        self._drafters: dict[Sequence, LookaheadDrafter] = {}

    def draft(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """The first n-gram in the sequence itself; the others, and all columns, in forks."""
        return [self._draft(one) for one in requests]

    def _draft(self, one: DraftRequest) -> Draft:
        sequence, drafter = one.sequence, one.offer.drafter
        assert isinstance(drafter, LookaheadDrafter)
        self._drafters[sequence] = drafter
        first, *others = drafter.candidates(sequence, one.n) or [()]
        last = sequence.tokens[-1]
        tries = [self._branch(sequence, (last, *tokens), False) for tokens in others]
        columns = [self._branch(sequence, tokens, True) for tokens in drafter.columns(sequence)]
        return Draft(first, branches=(*tries, *columns))

    def _branch(self, sequence: Sequence, tokens: tuple[int, ...], guess: bool) -> Branch:
        fork = self._memory.seq_new()
        self._forks.append(fork)
        self._memory.seq_cp(sequence.id, fork, 0, -1)
        return Branch(sequence, fork, tokens, guess)

    def settle(self, accepted: Seq[Accepted]) -> None:
        """The fork that was right becomes the sequence: its table changes hands."""
        for one in accepted:
            drafter = self._drafters.get(one.sequence)
            if drafter:
                drafter.learn(one.guesses)
                if one.branch is not None:
                    self._memory.seq_rm(one.sequence.id, 0, -1)
                    self._memory.seq_cp(one.branch, one.sequence.id, 0, -1)
        self.cancel()

    def cancel(self) -> None:
        """All forks go."""
        self._drafters = {}
        while self._forks:
            self._memory.seq_free(self._forks.pop())
