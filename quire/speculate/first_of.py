"""Several ways to draft: n-grams where they are likely, else somebody who always can."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.engine.drafter import Drafter, Offer, Speculator, Target
from quire.engine.sequence import Sequence
from quire.errors import RequestError
from quire.speculate.draft_model import Loaded
from quire.speculate.parse import speculator


@dataclass(frozen=True, init=False)
class FirstOf(Speculator):
    """In each step, whichever gains most; the first of those that gain the same."""

    ways: tuple[Speculator, ...]

    def __init__(self, *ways: Speculator | str | Loaded) -> None:
        if len(ways) < 2:
            raise RequestError(f"FirstOf takes two ways to draft or more, not {len(ways)}")
        object.__setattr__(self, "ways", tuple(speculator(way) for way in ways))

    def start(self, target: Target, sequence: Sequence) -> Drafter:
        """A drafter of each kind."""
        started: list[Drafter] = []
        try:
            for way in self.ways:
                started.append(way.start(target, sequence))
        except BaseException:
            for drafter in started:
                drafter.close()
            raise
        return FirstOfDrafter(started)


class FirstOfDrafter(Drafter):
    """Asks them all."""

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self._drafters = drafters

    def offers(self, sequence: Sequence, most: int) -> list[Offer]:
        """What each of them offers."""
        return [offer for drafter in self._drafters for offer in drafter.offers(sequence, most)]

    def close(self) -> None:
        """Ends them all."""
        for drafter in self._drafters:
            drafter.close()
