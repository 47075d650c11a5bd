"""What a drafter is, to the engine and to those who write one.

Speculator ──start──▶ Drafter (one per generation) ──offer──▶ Offer ──source──▶ Source
settings              knows its sequence           how far,   who drafts for all sequences
                                                   how sure   of a step that asked it
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from quire.devices.budget import Budget
from quire.engine.constrain import Constrainer
from quire.engine.odds import Odds
from quire.engine.plan import Accepted, Branch
from quire.engine.runner import Runner
from quire.engine.sequence import Sequence
from quire.memory.memory import Memory


class Target(Protocol):
    """What drafters may see of the engine that they draft for."""

    runner: Runner
    memory: Memory
    constrainer: Constrainer

    def odds(self, key: object, start: float, burst: int = 1) -> Odds:
        """Odds for a new generation, from what is known of those with the same key."""

    @property
    def sources(self) -> dict[object, Source]:
        """Those who draft for it, by what they were made from."""


@dataclass(frozen=True)
class Draft:
    """What one sequence tries in one step."""

    tokens: tuple[int, ...] = ()
    exits: bool = False
    """The step itself fills the tokens in, from the model's first layers."""
    branches: tuple[Branch, ...] = ()
    """Other tokens, tried in forks."""


@dataclass(frozen=True)
class Offer:
    """How far a drafter could go now, and how sure it may be of that."""

    source: Source
    most: int
    odds: Odds
    tokens: tuple[int, ...] = ()
    """Those who know what they will say, say it here."""
    extra: int = 0
    """Tokens that have to be computed besides the draft."""
    seconds_once: float = 0.0
    """What it takes to get ready, which later drafts will not need again."""
    drafter: Drafter | None = None
    """Who offers, for sources that ask back."""


@dataclass(frozen=True)
class DraftRequest:
    """A draft that is to be made: at most `n` tokens of what was offered."""

    sequence: Sequence
    offer: Offer
    n: int


class Source:
    """Drafts for every sequence of a step at once."""

    seconds_per_token = 0.0
    """What one more token of the longest draft takes, as measured."""
    seconds_at_all = 0.0
    """What it takes before the first."""
    seconds_inside = 0.0
    """What of the last step's time went into drafts, for those who draft within it."""
    exit_after = 0
    """Layers after which drafts are made within the step; 0: before it."""

    def draft(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft for each; an empty one where it turned out that there is none."""
        raise NotImplementedError

    def settle(self, accepted: Seq[Accepted]) -> None:
        """The step is done: what was right of the drafts, for those who keep something of them."""

    def cancel(self) -> None:
        """The step failed, or is over: nothing of it may stay behind. It may come twice."""

    def give_way(self, budget: Budget) -> bool:
        """Frees memory of a budget that drafts could do without; False when there is none."""
        return False


class Drafter:
    """Drafts for one generation."""

    def offer(self, sequence: Sequence, most: int) -> Offer | None:
        """What it could draft now, at most so many tokens; None for nothing."""
        raise NotImplementedError

    def offers(self, sequence: Sequence, most: int) -> list[Offer]:
        """All that it could draft, of which one is taken; of equal ones, the first."""
        offer = self.offer(sequence, most)
        return [offer] if offer else []

    def close(self) -> None:
        """The generation is over; whatever was kept for it goes."""


class Speculator:
    """The settings of a way to draft: what `speculate=` takes."""

    def start(self, target: Target, sequence: Sequence) -> Drafter:
        """A drafter for what this sequence is about to generate; or RequestError."""
        raise NotImplementedError
