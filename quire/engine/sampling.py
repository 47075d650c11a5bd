"""From logits to tokens: the last word on what a step adds to each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.scheduler import Plan
from quire.engine.sequence import Accepted, Generation, Sequence
from quire.errors import QuireError
from quire.ops import Array, Ops
from quire.types import Sampling, TokenLogprob


def make_sampler(ops: Ops, sampling: Sampling) -> Any:
    """The device's sampler for these settings."""
    bias = sampling.logit_bias
    return ops.sampler(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
        np.fromiter(bias.keys(), np.int32, len(bias)),
        np.fromiter(bias.values(), np.float32, len(bias)),
    )  # fmt: skip


def verify(plan: Plan, logits: Array, ops: Ops) -> list[Accepted]:
    """Chooses each ending sequence's next token; plain sampling is a draft of length zero."""
    accepted = [Accepted(e.sequence, e.count) for e in plan.entries]
    choose([a for a, e in zip(accepted, plan.entries, strict=True) if e.ends], logits, ops)
    return accepted


def choose(rows: list[Accepted], logits: Array, ops: Ops) -> None:
    """Fills in what follows; row i of the logits belongs to entry i."""
    for i, entry in enumerate(rows):
        if entry.sequence.generation is None:
            entry.logits = ops.numpy(logits)[i].copy()
    masks = _masks(rows, ops.numpy(logits).shape[1])
    live = [
        (i, entry, entry.sequence.generation)
        for i, entry in enumerate(rows)
        if entry.sequence.generation is not None and entry.sequence.error is None
    ]
    if not live:
        return
    at = np.array([i for i, _, _ in live], np.int32)
    uniforms = np.array([g.uniform() for _, _, g in live])
    samplers = [g.sampler for _, _, g in live]
    picked = ops.sample(logits, at, samplers, uniforms, None if masks is None else masks[at])
    for (i, entry, generation), token in zip(live, picked.tolist(), strict=True):
        entry.token = token
        if generation.sampling.logprobs is not None:
            entry.logprob = _logprob(ops, logits, i, token, generation.sampling.logprobs)


def _masks(rows: list[Accepted], n_vocab: int) -> NDArray[np.uint32] | None:
    """Which tokens each row may choose, or None where nobody is constrained."""
    constrained: list[tuple[int, Sequence, Generation]] = [
        (i, entry.sequence, entry.sequence.generation)
        for i, entry in enumerate(rows)
        if entry.sequence.generation is not None and entry.sequence.generation.matcher
    ]
    if not constrained:
        return None
    masks = np.full((len(rows), (n_vocab + 31) // 32), 2**32 - 1, np.uint32)
    for i, sequence, generation in constrained:
        assert generation.matcher is not None
        try:
            generation.matcher.mask(masks[i])
        except QuireError as error:  # this request fails, the others go on
            sequence.error = error
    return masks


def _logprob(ops: Ops, logits: Array, row: int, token: int, top: int) -> TokenLogprob:
    one = ops.take_rows(logits, np.array([row], np.int32))
    chosen, ids, values = ops.logprobs(one, np.array([token], np.int32), top)
    pairs = tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True))
    return TokenLogprob(token, float(chosen[0]), pairs)
