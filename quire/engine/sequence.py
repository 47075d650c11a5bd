"""A sequence: its tokens, how many of them memory holds, and what it is generating."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.constrain import Matcher
from quire.errors import QuireError
from quire.types import FinishReason, Request, Speculation, TokenLogprob

if TYPE_CHECKING:
    from quire.speculate.interface import Drafter

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Ends:
    """What ends a generation, besides its constraint."""

    ids: frozenset[int]
    """Tokens that end it."""
    most: int
    """Tokens that it may have."""
    text: Callable[[int], bool] | None = None
    """Told every token in turn; says when a stop string is complete."""


class Generation:
    """One request at work on a sequence: its sampler, its constraint, what it made so far."""

    def __init__(
        self, request: Request, sampler: Any, matcher: Matcher | None, ends: Ends,
        drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        self.sampling = request.sampling
        self.sampler = sampler
        self.matcher = matcher
        self.ends = ends
        self.drafter = drafter
        self.token_ids: list[int] = []
        seed = request.sampling.seed
        self._seed = int.from_bytes(os.urandom(8)) if seed is None else seed

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.ends.most - len(self.token_ids)

    @property
    def looks_back(self) -> bool:
        """Whether a token's chances depend on the output before it, beyond the model's logits."""
        s = self.sampling
        penalties = (s.repetition_penalty != 1, s.presence_penalty != 0, s.frequency_penalty != 0)
        return self.matcher is not None or any(penalties)

    def take(self, token: int) -> FinishReason | None:
        """One more token; says whether it is the last one, and why."""
        self.token_ids.append(token)
        self.sampler.observe(np.array([token], np.int32))
        if self.matcher and token not in self.ends.ids:
            self.matcher.consume(token)
            if self.matcher.finished:
                return "stop"
        if token in self.ends.ids and not self.sampling.ignore_eos:
            return "stop"
        if self.ends.text and self.ends.text(token):
            return "stop"
        return "length" if self.left <= 0 else None

    def uniform(self, ahead: int = 0) -> float:
        """The random number of a token to come: it depends on seed and place, on nothing else."""
        x = (self._seed + (len(self.token_ids) + ahead + 1) * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53


class Sequence:
    """Tokens [0, computed) are in memory, [computed, len(tokens)) wait to be computed.

    `logits` are those after the last token, kept where the last step ended on it.
    """

    def __init__(self, id: int, tokens: Seq[int] = (), salt: str = "") -> None:
        self.id = id
        self.tokens: list[int] = list(tokens)
        self.computed = 0
        self.logits: NDArray[np.float32] | None = None
        self.salt = salt
        self.moved = False  # whether tokens were taken out of its middle
        self.parked = False  # whether its pages lie in a tier
        self.preempted = False  # whether it gave way and has not run since
        self.given_up = False  # whether it has to be computed again
        self.cached = 0  # tokens of the current request that were in memory when it came
        self.branch_at: int | None = None  # where its prompt leaves one that is known already
        self.waits_for: tuple[Sequence, int] | None = None  # who computes our first tokens too
        self.generation: Generation | None = None
        self.speculation: Speculation | None = None  # of the current or last request
        self.error: QuireError | None = None

    def end_generation(self) -> None:
        """Lets go of what it was generating, and of what was kept for that."""
        generation, self.generation = self.generation, None
        if generation and generation.drafter:
            generation.drafter.close()

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


@dataclass(frozen=True)
class Mark:
    """A place in a session to come back to."""

    name: str
    """What the session calls it."""
    tokens: tuple[int, ...]
    computed: int
    logits: NDArray[np.float32] | None
    moved: bool
    """Whether tokens had been taken out of the middle."""
    checkpoint: str
    """What memory calls it, where names are of all sessions."""
    memory: object
    """Who holds it."""

    @property
    def computed_tokens(self) -> tuple[int, ...]:
        """The tokens that memory holds."""
        return self.tokens[: self.computed]


@dataclass
class Accepted:
    """What one sequence keeps of a step: its first `kept` tokens, and what follows them.

    A generating sequence gets tokens: those of its draft that were right, and one more. One that
    was only to be computed gets its last logits.
    """

    sequence: Sequence
    kept: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logits: NDArray[np.float32] | None = None
    drafted: int = 0
    """Tokens of the draft that were computed."""
    branch: int | None = None
    """The fork that holds the tokens that were right, where it is not the sequence itself."""
    guesses: list[int] = field(default_factory=list)
    """What follows each of its branches that are no drafts."""

    @property
    def agreed(self) -> int:
        """Tokens of the draft that were right: all but the last, which is the model's own."""
        return max(len(self.tokens) - 1, 0)
