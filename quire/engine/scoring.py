"""How likely a model finds the tokens of a prompt, one after the other.

All of them are computed, whatever is cached: pages keep no logits. What was computed stays in the
sequence, so that whoever goes on from the prompt computes nothing of it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np

from quire.engine.constrain import Matcher
from quire.engine.engine import Engine
from quire.engine.generation import Transcript
from quire.engine.loop import Job, Loop
from quire.engine.request import Request
from quire.engine.room import Rank
from quire.engine.runner import for_callers
from quire.engine.sequence import LOST, PARKED
from quire.errors import RequestError
from quire.memory.batch import SeqTokens
from quire.memory.groups.layout import Int32
from quire.types import TokenLogprob

_LEAST, _MOST = 16, 128
"""Tokens of a step, all of which have logits."""
_MOST_BYTES = 16 << 20
"""Of those logits."""


class Scoring:
    """A prompt on its way through the layers, some tokens at a time, between the steps of others.

    It gives way to whatever else needs room, and starts over then; so there is one at a time.
    """

    def __init__(self, engine: Engine, tokens: Seq[int], top: int, salt: str = "") -> None:
        self._engine = engine
        engine.check_tokens(0, tokens)
        if not len(tokens):
            raise RequestError("there is nothing to score: the prompt has no tokens")
        self.sequence = engine.new_sequence(salt)
        self.sequence.extend(tokens)
        self._top = top
        self._started = time.perf_counter()
        self.logprobs: list[TokenLogprob] = []
        """Of all tokens but the first, which nothing comes before."""
        self._given = False

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
        at = sequence.computed
        self._compute(sequence.tokens.array(at, at + count))
        if pace := engine.scheduler.pace:
            pace.took(running, count, time.perf_counter() - begun)
        return True

    def _room(self, running: int) -> int:
        """How many tokens a step may have, as if they were any prompt's."""
        engine = self._engine
        most = max(min(_MOST, _MOST_BYTES // (4 * engine.n_vocab)), _LEAST)
        pace = engine.scheduler.pace
        count = most if pace is None else pace.prompt_tokens(running, most)
        return min(max(count, _LEAST), self.sequence.pending)

    def _compute(self, part: Int32) -> None:
        engine, sequence, ops = self._engine, self.sequence, self._engine.ops
        n, at = len(part), sequence.computed
        with for_callers(), engine.memory.reserve([SeqTokens(sequence.id, part)]) as lease:
            logits = engine.runner.forward_rows(lease, np.arange(n, dtype=np.int32))
            follow = sequence.tokens.array(at + 1, at + n + 1)
            known = len(self.logprobs) - at  # by a step before it had to start over
            if len(follow) > known:
                rows = ops.take_rows(logits, np.arange(known, len(follow), dtype=np.int32))
                chosen, ids, values = ops.logprobs(rows, follow[known:], self._top)
                for i, token in enumerate(follow[known:].tolist()):
                    top = tuple(zip(ids[i].tolist(), values[i].tolist(), strict=True))
                    self.logprobs.append(TokenLogprob(token, float(chosen[i]), top))
            last = ops.numpy(ops.take_rows(logits, np.array([n - 1], np.int32)))[0].copy()
            lease.commit({sequence.id: n})
        sequence.advance(n)
        if self.done:
            sequence.know_logits(last)
        engine.compute.pay(engine.room)

    def start(
        self, loop: Loop, request: Request, transcript: Transcript, matcher: Matcher | None
    ) -> Job:
        """Goes on from the prompt; the request has no tokens of its own."""
        self._given = True
        job = loop.start(self.sequence, request, transcript, matcher, keep=False)
        return self._told(job)

    def end(self, loop: Loop, request: Request, transcript: Transcript) -> Job:
        """Goes on with nothing: a job that is over."""
        job = Job(loop, self.sequence, request, transcript, lambda: None)
        job.cancel()
        job.finish_reason = "length"
        self.close()
        return self._told(job)

    def _told(self, job: Job) -> Job:
        job.started = self._started
        self.sequence.count_cached(0, "scored")
        return job

    def close(self) -> None:
        """Gives everything back, unless somebody goes on from it; once is enough."""
        if not self._given and not self._engine.closed:
            self._given = True
            self._engine.end(self.sequence)
