"""A sequence: its tokens, how many of them memory holds, and what it is generating."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.constrain import Matcher
from quire.errors import QuireError
from quire.types import FinishReason, Request, TokenLogprob

_MASK = 2**64 - 1


class Generation:
    """One request at work on a sequence: its sampler, its constraint, what it made so far."""

    def __init__(self, request: Request, sampler: Any, matcher: Matcher | None) -> None:
        self.request = request
        self.sampling = request.sampling
        self.sampler = sampler
        self.matcher = matcher
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        seed = request.sampling.seed
        self._seed = int.from_bytes(os.urandom(8)) if seed is None else seed

    def uniform(self) -> float:
        """The random number for the next token: it depends on seed and place, on nothing else."""
        x = (self._seed + (len(self.token_ids) + 1) * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53


class Sequence:
    """Tokens [0, computed) are in memory, [computed, len(tokens)) wait to be computed.

    `logits` are those after the last token, kept where the last step ended on it.
    """

    def __init__(self, id: int, tokens: Seq[int] = ()) -> None:
        self.id = id
        self.tokens: list[int] = list(tokens)
        self.computed = 0
        self.logits: NDArray[np.float32] | None = None
        self.salt = ""
        self.moved = False  # whether tokens were taken out of its middle
        self.parked = False  # whether its pages lie in a tier
        self.preempted = False  # whether it gave way and has not run since
        self.cached = 0  # tokens of the current request that were in memory when it came
        self.branch_at: int | None = None  # where its prompt leaves one that is known already
        self.waits_for: tuple[Sequence, int] | None = None  # who computes our first tokens too
        self.generation: Generation | None = None
        self.error: QuireError | None = None

    @property
    def generating(self) -> bool:
        """Whether its prompt is done and it goes on token by token."""
        return self.pending == 1 and self.computed > 0

    @property
    def waiting(self) -> bool:
        """Whether another sequence is still computing tokens that this one will share."""
        return self.waits_for is not None

    @property
    def until_branch(self) -> int:
        """How many tokens come before the place where its prompt leaves a known one, or all."""
        at = self.branch_at
        return self.pending if at is None or at <= self.computed else at - self.computed

    @property
    def pending(self) -> int:
        """How many tokens wait to be computed."""
        return len(self.tokens) - self.computed


@dataclass
class Accepted:
    """What one sequence keeps of a step: its first `kept` tokens, and what follows them.

    A generating sequence gets a token; one that was only to be computed gets its last logits.
    """

    sequence: Sequence
    kept: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    logits: NDArray[np.float32] | None = None
