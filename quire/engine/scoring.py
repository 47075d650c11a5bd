"""How likely a model finds the tokens of a prompt, one after the other.

All of them are computed, whatever is cached: pages keep no logits. What was computed stays in the
sequence, so that whoever goes on from the prompt computes nothing of it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np

from quire.engine.aside import LEAST, Reading
from quire.engine.constrain import Matcher
from quire.engine.engine import Engine
from quire.engine.generation import Transcript
from quire.engine.loop import Loop
from quire.engine.request import Request
from quire.engine.work import Job
from quire.errors import RequestError
from quire.ops import Array
from quire.types import TokenLogprob

_MOST = 128
"""Tokens of a step, all of which have logits."""
_MOST_BYTES = 16 << 20
"""Of those logits."""


class Scoring(Reading):
    """A prompt whose tokens are scored; what was computed of it serves who goes on from it."""

    def __init__(self, engine: Engine, tokens: Seq[int], top: int, salt: str = "") -> None:
        if not len(tokens):
            raise RequestError("there is nothing to score: the prompt has no tokens")
        most = max(min(_MOST, _MOST_BYTES // (4 * engine.n_vocab)), LEAST)
        super().__init__(engine, tokens, most, self._score, salt)
        self._top = top
        self._started = time.perf_counter()
        self.logprobs: list[TokenLogprob] = []
        """Of all tokens but the first, which nothing comes before."""

    def _score(self, at: int, count: int, logits: Array) -> None:
        ops, follow = self._engine.ops, self.sequence.tokens.array(at + 1, at + count + 1)
        known = len(self.logprobs) - at  # by a step before it had to start over
        if len(follow) > known:
            rows = ops.take_rows(logits, np.arange(known, len(follow), dtype=np.int32))
            chosen, ids, values = ops.logprobs(rows, follow[known:], self._top)
            for i, token in enumerate(follow[known:].tolist()):
                top = tuple(zip(ids[i].tolist(), values[i].tolist(), strict=True))
                self.logprobs.append(TokenLogprob(token, float(chosen[i]), top))

    def start(
        self, loop: Loop, request: Request, transcript: Transcript, matcher: Matcher | None
    ) -> Job:
        """Goes on from the prompt; the request has no tokens of its own."""
        self._ended = True
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
        if not self._ended and not self._engine.closed:
            self._ended = True
            self._engine.end(self.sequence)
