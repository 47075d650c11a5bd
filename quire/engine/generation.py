"""One request at work on a sequence: how its tokens are chosen, and what ends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quire.engine.host_sampler import HostSampler
from quire.ops import Ops
from quire.types import FinishReason, Sampling

if TYPE_CHECKING:
    from quire.engine.constrain import Matcher
    from quire.engine.drafter import Drafter

_MASK = 2**64 - 1
TokensWith = Callable[[Seq[str]], frozenset[int]]
"""The tokens that have one of some texts in theirs."""


class TextDecoder(Protocol):
    """Turns tokens into text, one by one."""

    stopped: str | None
    """The stop string that is complete, if one is."""

    def push(self, id: int) -> str:
        """The text that is certain now that this token has come."""

    def flush(self) -> str:
        """The rest of the text, at the end."""


class Transcript:
    """The text of a generation, as far as its tokens were read."""

    def __init__(self, decoder: TextDecoder, watch: bool = False) -> None:
        self.watch = watch  # whether there are stop strings to look for
        self.pieces: list[str] = []
        self._decoder = decoder
        self._read = 0

    def read(self, token_ids: Seq[int], hidden: frozenset[int] = frozenset()) -> bool:
        """Takes in the tokens since the last call; whether a stop string is complete."""
        for token in token_ids[self._read :]:
            if token not in hidden:
                self.pieces.append(self._decoder.push(token))
        self._read = len(token_ids)
        return self._decoder.stopped is not None

    def end(self) -> None:
        """No more tokens will come."""
        self.pieces.append(self._decoder.flush())


@dataclass(frozen=True)
class StopRules:
    """What ends a generation, besides its constraint."""

    ids: frozenset[int]
    """Tokens that end it."""
    most: int
    """Tokens that it may have."""
    text: Transcript | None = None
    """Where stop strings are found."""


def make_sampler(ops: Ops, sampling: Sampling, tokens_with: TokensWith) -> Any:
    """A sampler for these settings: the device's, or one that edits its rows on the host."""
    if sampling.on_host:
        breakers = sampling.dry_sequence_breakers if sampling.dry_multiplier > 0 else ()
        return HostSampler(sampling, ops.sampler(sampling.temperature), tokens_with(breakers))
    bias = sampling.logit_bias
    named: tuple[Any, ...] = ()
    if bias:
        named = (
            np.fromiter(bias.keys(), np.int32, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )
    return ops.sampler(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, *named,
    )  # fmt: skip


class Generation:
    """The sampler, the constraint and the stop rules of a request, and what it made so far."""

    def __init__(
        self, sampling: Sampling, sampler: Any, matcher: Matcher | None, rules: StopRules,
        drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        self.sampling = sampling
        self.sampler = sampler
        self.matcher = matcher
        self.rules = rules
        self.drafter = drafter
        self.token_ids: list[int] = []
        self.random = sampling.temperature > 0
        self.on_host = sampling.on_host
        self.hidden = frozenset() if sampling.ignore_eos else rules.ids  # tokens without text
        self.plain = not (drafter or matcher or self.on_host)
        """Whether a device chooses its tokens by itself: by logits, what was said, and chance."""
        s = sampling
        penalties = (s.repetition_penalty != 1, s.presence_penalty != 0, s.frequency_penalty != 0)
        self._observes = self.on_host or any(penalties)
        self._watched = rules.text if rules.text and rules.text.watch else None
        seed = sampling.seed
        self._seed = int.from_bytes(os.urandom(8)) if seed is None else seed

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.rules.most - len(self.token_ids)

    @property
    def looks_back(self) -> bool:
        """Whether a token's chances depend on the output before it, beyond the model's logits."""
        return self.matcher is not None or self._observes

    def take(self, token: int) -> FinishReason | None:
        """One more token; says whether it is the last one, and why."""
        self.token_ids.append(token)
        if self._observes:
            self.sampler.observe(np.array([token], np.int32))
        if self.matcher and token not in self.rules.ids:
            self.matcher.consume(token)
            if self.matcher.finished:
                return "stop"
        if token in self.hidden:
            return "stop"
        if self._watched and self._watched.read(self.token_ids, self.hidden):
            return "stop"
        return "length" if len(self.token_ids) >= self.rules.most else None

    def uniform(self, ahead: int = 0) -> float:
        """The random number of a token to come: it depends on seed and place, on nothing else."""
        x = (self._seed + (len(self.token_ids) + ahead + 1) * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53
