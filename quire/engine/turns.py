"""In which order prompts are computed: fair between owners, and no wait without end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.engine.plan import Entry
from quire.engine.sequence import Sequence

_PATIENCE = 400
"""Steps after which a prompt goes before all others, whoever's it is."""


class Turns:
    """Who was served how much of late."""

    def __init__(self) -> None:
        self._served: Counter[str] = Counter()
        self._waited: Counter[int] = Counter()

    def in_order(self, prompts: list[Sequence]) -> list[Sequence]:
        """First whoever waited too long; then by priority, the owner served least, arrival."""
        if len(prompts) < 2:
            return prompts
        served, waited = self._served, self._waited

        def rank(sequence: Sequence) -> tuple[bool, int, int]:
            patient = waited[sequence.id] < _PATIENCE
            return (patient, sequence.priority, served[sequence.owner])

        return sorted(prompts, key=rank)  # stable: arrival decides between equals

    def took(self, entries: Seq[Entry], active: Iterable[Sequence]) -> None:
        """These were in a step; other prompts wait."""
        ran = {entry.sequence.id for entry in entries}
        for entry in entries:
            if entry.count > 1:
                self._served[entry.sequence.owner] += entry.count
        waiting = [s.id for s in active if s.pending > 1 and s.id not in ran]
        self._waited = Counter({id: self._waited[id] + 1 for id in waiting})
        if not waiting:
            self._served.clear()
