"""Texts as vectors: what the layers make of their tokens, pooled; nothing of them stays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.engine.engine import Engine
from quire.engine.room import Rank
from quire.engine.runner import for_callers
from quire.memory.batch import SeqTokens
from quire.memory.groups.layout import Int32
from quire.types import Pooling


@dataclass
class _Text:
    number: int
    tokens: Int32
    seq: int = -1  # of memory, while some of it is computed
    done: int = 0


class Embedding:
    """Some texts on their way through the layers, a step's worth of tokens at a time."""

    def __init__(self, engine: Engine, texts: Seq[Int32], pooling: Pooling) -> None:
        self._engine = engine
        self._texts = [_Text(i, tokens) for i, tokens in enumerate(texts)]
        self._pooling = pooling
        self._sums = np.zeros((len(texts), engine.runner.model.width))

    @property
    def vectors(self) -> NDArray[np.float32]:
        """A row for each text."""
        return self._sums.astype(np.float32)

    @property
    def done(self) -> bool:
        """Whether all texts are vectors."""
        return not self._texts

    def step(self) -> None:
        """Computes as much as one step may; between the steps of others."""
        engine = self._engine
        engine.check_open()
        part = self._fitting(self._next())
        tokens = [SeqTokens(one.seq, one.tokens[one.done : one.done + n]) for one, n in part]
        with for_callers(), engine.memory.reserve(tokens) as lease:
            x = engine.runner.run(lease.ubatch)
            rows, counts = self._rows(part)
            hidden = engine.runner.model.hidden(engine.runner.rows(x, rows))
            self._pool(part, engine.ops.numpy(hidden), counts)
            lease.commit({one.seq: n for one, n in part})
        for one, n in part:
            one.done += n
            if one.done == len(one.tokens):
                if self._pooling == "mean":
                    self._sums[one.number] /= one.done
                self._texts.remove(one)
                engine.memory.seq_free(one.seq)
        engine.compute.pay(engine.room)

    def close(self) -> None:
        """Gives the pages of what is not done back."""
        for one in self._texts:
            if one.seq >= 0 and not self._engine.closed:
                self._engine.memory.seq_free(one.seq)
        self._texts = []

    def _next(self) -> list[tuple[_Text, int]]:
        """The next texts, and how many tokens of each."""
        left, part = self._engine.scheduler.max_tokens, []
        for one in self._texts:
            n = min(left, len(one.tokens) - one.done)
            if n:
                part.append((one, n))
                left -= n
        for one, _ in part:
            if one.seq < 0:
                one.seq = self._engine.memory.seq_new()
        return part

    def _fitting(self, part: list[tuple[_Text, int]]) -> list[tuple[_Text, int]]:
        """As much of it as there is room for; where there is none, memory says best why."""
        engine = self._engine
        while True:
            fits = partial(engine.memory.fits, [(one.seq, n) for one, n in part])
            alone = len(part) == 1
            if engine.room.make(fits, None, Rank.RUNNING if alone else Rank.RESTING):
                return part
            if alone:
                one, n = part[0]
                if n == 1:
                    return part
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
                wanted = range(at, at + (one.done == 0))
            else:
                ends = one.done + n == len(one.tokens)
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
