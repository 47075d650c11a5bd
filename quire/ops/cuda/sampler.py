"""A generation's sampler: what it wants of its samples, and the tokens it has seen.

    host      counts ── once, when it comes ──▶ counts         bias ── once ──▶ ids | values
    GPU                                            ▲
                          each step adds the token that it was given

Counts follow on the GPU by one token a step, so nothing but an address is sent; a step that follows
one whose tokens nobody has read takes its token from there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quire.ops import Int32, Sampler, count_bytes
from quire.ops.cuda.machine import Machine, need

_UNKNOWN = -1
Kind = tuple[bool, bool, bool, bool]
"""What drawing takes: chance, a top_k, a top_p, edits."""
NOTHING: Kind = (False, False, False, False)


class Wish(NamedTuple):
    """What one generation wants of its samples; 0 turns top_k off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias: tuple[tuple[int, float], ...]

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens were there."""
        flat = self.presence_penalty == 0 and self.frequency_penalty == 0
        return not (flat and self.repetition_penalty == 1)


class Edit(NamedTuple):
    """What a row's logits are edited by, for kernels: see kernels/edits.py."""

    counts: int = 0
    biases: int = 0
    lengths: int = 0
    news: int = _UNKNOWN
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


class CudaSampler:
    """What one generation wants of its samples, and the tokens it has seen."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self._penalises = wish.penalises
        self.edits = self._penalises or bool(wish.bias)
        """Whether logits are changed before a token is drawn."""
        hot = wish.temperature > 0
        self.kind: Kind = hot, hot and wish.top_k > 0, hot and wish.top_p < 1, self.edits
        self._counts: dict[int, int] = {}
        self._prompt: set[int] = set()
        self._seen, self._latest = 0, _UNKNOWN
        self._on_gpu: torch.Tensor | None = None
        self._counted: int | None = None  # how many tokens of those seen the GPU has counted
        self._bias: torch.Tensor | None = None

    def observe(self, ids: Int32) -> None:
        """Counts tokens for the penalties."""
        if not self._penalises:
            return
        tokens = ids.tolist()
        need(min(tokens, default=0) >= 0, "a token that cannot be observed")
        for token in tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._latest = token
        self._seen += len(tokens)

    def observe_prompt(self, ids: Int32) -> None:
        """Notes tokens for the repetition penalty alone."""
        if not self._penalises:
            return
        need((ids >= 0).all(), "a token that cannot be observed")
        self._prompt.update(ids.tolist())
        self.recount()

    def unobserve(self, ids: Int32) -> None:
        """Takes back what was observed."""
        if not self._penalises:
            return
        for token in ids.tolist():
            need(self._counts.get(token, 0) > 0, f"token {token} was not observed")
            self._counts[token] -= 1
        self._seen -= len(ids)
        self.recount()

    def recount(self) -> None:
        """What the GPU has counted is not what was seen, or may not be."""
        self._counted = None

    def edit(self, machine: Machine, vocab: int, source: int = _UNKNOWN) -> Edit:
        """What kernels are told of the next token; they are launched, or it is counted anew.

        With a source there is one more token than was seen: the one that the step before drew for
        that row.
        """
        wish = self.wish
        if wish.bias and self._bias is None:
            self._bias = _bias(machine, wish.bias, vocab)
        biases = 0 if self._bias is None else self._bias.data_ptr()
        if not self._penalises:
            return Edit(biases=biases, lengths=len(wish.bias))
        wanted, counted = self._seen + (source >= 0), self._counted
        if self._on_gpu is None or counted is None or not wanted - 1 <= counted <= wanted:
            self._on_gpu, counted = self._count(machine, vocab), self._seen
        new = _UNKNOWN
        if counted < wanted:
            new = -2 - source if source >= 0 else self._latest
            need(new < vocab, "a token outside the vocabulary")
        self._counted = wanted
        return Edit(
            self._on_gpu.data_ptr(), biases, len(wish.bias), new, wish.repetition_penalty,
            wish.frequency_penalty, wish.presence_penalty,
        )  # fmt: skip

    def _count(self, machine: Machine, vocab: int) -> torch.Tensor:
        """Counts of all that was seen, on the GPU."""
        words = dict.fromkeys(self._prompt, 1)
        for token, n in self._counts.items():
            if n > 0:
                words[token] = words.get(token, 0) + 2 * n
        need(max(words, default=0) < vocab, "a token outside the vocabulary")
        counts = self._on_gpu
        if counts is None:
            counts = machine.empty(count_bytes(vocab) // 4, dtype=torch.int32)
        counts.zero_()
        if words:
            ids, values = machine.upload(np.array([list(words), list(words.values())], np.int64))
            counts[ids] = values.int()
        return counts


def _bias(machine: Machine, bias: tuple[tuple[int, float], ...], vocab: int) -> torch.Tensor:
    """Ids, then values as bare integers."""
    need(max(token for token, _ in bias) < vocab, "a token outside the vocabulary")
    ids = np.array([token for token, _ in bias], np.int32)
    values = np.array([value for _, value in bias], np.float32)
    return machine.upload(np.concatenate([ids, values.view(np.int32)]))


def sampler_of(sampler: Sampler) -> CudaSampler:
    """A sampler that this device made."""
    if not isinstance(sampler, CudaSampler):
        raise TypeError(f"{type(sampler).__name__} is not a sampler of the GPU")
    return sampler
