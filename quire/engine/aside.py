"""What is computed between the steps of others, outside of the scheduler, and gives way to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

import numpy as np

from quire.engine.engine import Engine
from quire.engine.room import Rank
from quire.engine.runner import for_callers
from quire.engine.sequence import LOST, PARKED
from quire.memory.batch import SeqTokens
from quire.ops import Array

LEAST = 16
"""Tokens of a step, however slow."""


class Aside(Protocol):
    """Something that is computed step by step, on the loop. One at a time: see `Loop.beside`."""

    @property
    def done(self) -> bool:
        """Whether all of it is computed."""

    def step(self) -> bool:
        """Computes some of it; False where others, who run, have no room to spare now."""

    def close(self) -> None:
        """Gives back what it holds; once is enough."""


Take = Callable[[int, int, Array], None]
"""Is given the logits after so many tokens from a position on; again, where it all starts over."""


class Reading:
    """Tokens on their way through the layers, some at a time, each of which has logits.

    They give way to whatever else needs room, and start over then. Nothing of them stays.
    """

    def __init__(
        self, engine: Engine, tokens: Seq[int], most: int, take: Take, salt: str = ""
    ) -> None:  # fmt: skip
        self._engine = engine
        engine.check_tokens(0, tokens)
        self.sequence = engine.new_sequence(salt)
        self.sequence.extend(tokens)
        self._most = most
        self._take = take
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether all tokens are computed."""
        return self.sequence.pending == 0

    def step(self) -> bool:
        """Computes some tokens; False where others, who run, have no room to spare now."""
        engine, sequence = self._engine, self.sequence
        engine.check_open()
        if sequence.status is PARKED:
            engine.room.lose(sequence)
        if sequence.status is LOST:
            sequence.adopt(0, None)
        running = len(engine.scheduler.active)
        count = self._room(running)
        fits = partial(engine.memory.fits, [(sequence.id, count)])
        if not engine.room.make(fits, sequence, Rank.MARKS) and running:
            return False
        begun = time.perf_counter()
        self._compute(count)
        if pace := engine.scheduler.pace:
            pace.took(running, count, time.perf_counter() - begun)
        return True

    def _room(self, running: int) -> int:
        """How many tokens a step may have, as if they were any prompt's."""
        pace, most = self._engine.scheduler.pace, self._most
        count = most if pace is None else pace.prompt_tokens(running, most)
        return min(max(count, LEAST), self.sequence.pending)

    def _compute(self, count: int) -> None:
        engine, sequence, ops = self._engine, self.sequence, self._engine.ops
        at = sequence.computed
        tokens = SeqTokens(sequence.id, sequence.tokens.array(at, at + count))
        with for_callers(), engine.memory.reserve([tokens]) as lease:
            logits = engine.runner.forward_rows(lease, np.arange(count, dtype=np.int32))
            self._take(at, count, logits)
            last = ops.numpy(ops.take_rows(logits, np.array([count - 1], np.int32)))[0].copy()
            lease.commit({sequence.id: count})
        sequence.advance(count)
        if self.done:
            sequence.know_logits(last)
        engine.compute.pay(engine.room)

    def close(self) -> None:
        """Gives everything back; once is enough."""
        if not self._ended and not self._engine.closed:
            self._ended = True
            self.sequence.fail()  # nothing of it is kept for others
            self._engine.end(self.sequence)
