"""Texts as vectors: what the layers make of their tokens, pooled; nothing of them stays."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.engine.aside import LEAST
from quire.engine.engine import Engine
from quire.engine.room import Rank
from quire.engine.runner import for_callers
from quire.engine.sequence import LOST, PARKED, Sequence
from quire.memory.batch import SeqTokens
from quire.memory.groups.layout import Int32
from quire.types import Pooling


@dataclass
class _Text:
    number: int
    tokens: Int32
    sequence: Sequence


class Embedding:
    """Some texts on their way through the layers, a step's worth of tokens at a time.

    They give way to whatever else needs room, and start over then.
    """

    def __init__(self, engine: Engine, texts: Seq[Int32], pooling: Pooling) -> None:
        self._engine = engine
        self._left = list(enumerate(texts))
        self._texts: list[_Text] = []
        """Those of which some may be computed."""
        self._pooling = pooling
        self._sums = np.zeros((len(texts), engine.runner.model.width))

    @property
    def vectors(self) -> NDArray[np.float32]:
        """A row for each text."""
        return self._sums.astype(np.float32)

    @property
    def done(self) -> bool:
        """Whether all texts are vectors."""
        return not self._texts and not self._left

    def step(self) -> bool:
        """Computes as much as one step may; False where others, who run, have no room to spare."""
        engine = self._engine
        engine.check_open()
        part = self._fitting(self._next())
        if not part:
            return False
        begun, running = time.perf_counter(), len(engine.scheduler.active)
        tokens = []
        for one, n in part:
            at = one.sequence.computed
            tokens.append(SeqTokens(one.sequence.id, one.tokens[at : at + n]))
        with for_callers(), engine.memory.reserve(tokens) as lease:
            x = engine.runner.run(lease.ubatch)
            rows, counts = self._rows(part)
            hidden = engine.runner.model.hidden(engine.runner.rows(x, rows))
            self._pool(part, engine.ops.numpy(hidden), counts)
            lease.commit({one.sequence.id: n for one, n in part})
        for one, n in part:
            one.sequence.advance(n)
            if not one.sequence.pending:
                if self._pooling == "mean":
                    self._sums[one.number] /= len(one.tokens)
                self._end(one)
        engine.compute.pay(engine.room)
        if pace := engine.scheduler.pace:
            pace.took(running, sum(n for _, n in part), time.perf_counter() - begun)
        return True

    def close(self) -> None:
        """Gives the pages of what is not done back."""
        self._left = []
        while self._texts:
            self._end(self._texts[0])

    def _end(self, one: _Text) -> None:
        self._texts.remove(one)
        if not self._engine.closed:
            one.sequence.fail()  # nothing of it is kept for others
            self._engine.end(one.sequence)

    def _next(self) -> list[tuple[_Text, int]]:
        """The next texts, and how many tokens of each."""
        room, part = self._room(), list[tuple[_Text, int]]()
        for one in self._texts:
            self._bring_back(one)
        while room and (self._texts[len(part) :] or self._left):
            if len(part) == len(self._texts):
                self._begin(*self._left.pop(0))
            one = self._texts[len(part)]
            n = min(room, one.sequence.pending)
            part.append((one, n))
            room -= n
        return part

    def _room(self) -> int:
        """How many tokens a step may have, as if they were any prompt's."""
        scheduler = self._engine.scheduler
        most, pace = scheduler.max_tokens, scheduler.pace
        return most if pace is None else max(pace.prompt_tokens(len(scheduler.active), most), LEAST)

    def _begin(self, number: int, tokens: Int32) -> None:
        sequence = self._engine.new_sequence()
        sequence.extend(tokens)
        self._texts.append(_Text(number, tokens, sequence))

    def _bring_back(self, one: _Text) -> None:
        """One that gave way starts over."""
        if one.sequence.status is PARKED:
            self._engine.room.lose(one.sequence)
        if one.sequence.status is LOST:
            one.sequence.adopt(0, None)
            self._sums[one.number] = 0

    def _fitting(self, part: list[tuple[_Text, int]]) -> list[tuple[_Text, int]]:
        """As much of it as there is room for.

        Where there is none it is nothing while others run; else memory says best why.
        """
        engine = self._engine
        while True:
            fits = partial(engine.memory.fits, [(one.sequence.id, n) for one, n in part])
            alone = len(part) == 1
            first = part[0][0].sequence  # only of the first is something computed
            if engine.room.make(fits, first, Rank.MARKS if alone else Rank.RESTING):
                return part
            if alone:
                one, n = part[0]
                if n == 1:
                    return [] if engine.scheduler.active else part
                part = [(one, n // 2)]
            else:
                part = part[: len(part) // 2]

    def _rows(self, part: list[tuple[_Text, int]]) -> tuple[Int32, list[int]]:
        """Rows of the step that count, and how many of each text."""
        rows: list[int] = []
        counts: list[int] = []
        at = 0
        for one, n in part:
            if self._pooling == "mean":
                wanted = range(at, at + n)
            elif self._pooling == "cls":
                wanted = range(at, at + (one.sequence.computed == 0))
            else:
                ends = n == one.sequence.pending
                wanted = range(at + n - ends, at + n)
            rows += wanted
            counts.append(len(wanted))
            at += n
        return np.array(rows, np.int32), counts

    def _pool(
        self, part: list[tuple[_Text, int]], hidden: NDArray[np.float32], counts: list[int]
    ) -> None:
        """Adds up token by token, so that it makes no difference where a text was cut."""
        at = 0
        for (one, _), count in zip(part, counts, strict=True):
            sums = self._sums[one.number]
            for row in hidden[at : at + count]:
                sums += row
            at += count
