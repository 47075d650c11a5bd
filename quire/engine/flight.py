"""A step whose tokens the device chooses by itself: they are read when the next step runs.

    host     launch n+1   read n      launch n+2   read n+1
    device   ── step n ──▶ ──── step n+1 ────▶ ──── step n+2 ──▶

One token of each sequence flies, if the device can choose it: by its logits, bias and penalties for
what was said, and chance. What a constraint, a draft or a sampler of the host has a say in waits.
What ends a generation early is seen one step late; the token that was computed meanwhile is one of
the sequence's own, and what follows it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from quire.engine.choose import take_drawn
from quire.engine.generation import Generation
from quire.engine.plan import Accepted, Plan
from quire.engine.sequence import RUNNING, Sequence
from quire.memory.groups.layout import Int32
from quire.ops import Drawn


@dataclass(frozen=True)
class Flight:
    """Who is in such a step, with what they were generating when it was launched."""

    drawn: Drawn
    riders: list[tuple[Sequence, Generation]]

    @staticmethod
    def of(plan: Plan, drawn: Drawn) -> Flight | None:
        """The flight of a plan; None where somebody needs more than that."""
        riders: list[tuple[Sequence, Generation]] = []
        for entry in plan.entries:
            sequence, generation = entry.sequence, entry.sequence.generation
            if entry.count != 1 or sequence.computed < 2 or generation is None:
                return None
            if sequence.edited:  # its last token cannot always be taken back
                return None
            if not (entry.ends and generation.plain):
                return None
            riders.append((sequence, generation))
        return Flight(drawn, riders)

    def going(self, active: Seq[Sequence]) -> tuple[list[Sequence], Int32]:
        """Who goes on behind it whatever it brings, and their rows; nobody if others came."""
        going: list[Sequence] = []
        rows: list[int] = []
        staying = 0
        for row, (sequence, generation) in enumerate(self.riders):
            if sequence.generation is not generation:
                continue
            staying += 1
            if generation.left >= 2 and sequence.status is RUNNING and not sequence.preempted:
                going.append(sequence)
                rows.append(row)
        if staying != len(active):
            return [], np.empty(0, np.int32)
        return going, np.array(rows, np.int32)

    def land(self, accepted: list[Accepted]) -> None:
        """What follows each of those who still want it."""
        for row, token in enumerate(self.drawn.read().tolist()):
            sequence, generation = self.riders[row]
            if sequence.generation is generation:
                one = Accepted(sequence, 1)
                accepted.append(one)
                take_drawn(one, generation, token, row, self.drawn)
