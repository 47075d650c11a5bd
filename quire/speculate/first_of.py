"""Several ways to draft, in turn: n-grams where they are likely, else somebody who always can."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from quire.engine.sequence import Sequence
from quire.errors import RequestError
from quire.speculate.interface import Drafter, Offer, Speculator, Target

_SURE: Final = 0.5  # chance of the first token from which on nobody else is asked


@dataclass(frozen=True, init=False)
class FirstOf(Speculator):
    """The first that is likely to be right, or else the last that has anything to say."""

    ways: tuple[Speculator, ...]

    def __init__(self, *ways: Speculator) -> None:
        if len(ways) < 2:
            raise RequestError(f"FirstOf takes two ways to draft or more, not {len(ways)}")
        object.__setattr__(self, "ways", ways)

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
    """Asks one after the other."""

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self._drafters = drafters

    def offer(self, sequence: Sequence, most: int) -> Offer | None:
        """Of the first that is sure enough; of the last otherwise."""
        found: Offer | None = None
        for drafter in self._drafters:
            found = drafter.offer(sequence, most) or found
            if found and found.odds.reach(1)[0] >= _SURE:
                break
        return found

    def close(self) -> None:
        """Ends them all."""
        for drafter in self._drafters:
            drafter.close()
