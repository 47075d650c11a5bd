"""From logits to tokens: what samplers and constraints make of a row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.sequence import Generation
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


def sample(
    ops: Ops, logits: Array, rows: Seq[tuple[int, Generation, int]],
    masks: NDArray[np.uint32] | None = None,
) -> list[int]:  # fmt: skip
    """A token for each (row of the logits, generation, how far ahead of its next token)."""
    picked = ops.sample(
        logits,
        np.array([row for row, _, _ in rows], np.int32),
        [generation.sampler for _, generation, _ in rows],
        np.array([generation.uniform(ahead) for _, generation, ahead in rows]),
        masks,
    )
    tokens: list[int] = picked.tolist()
    return tokens


def logprob(ops: Ops, logits: Array, row: int, token: int, top: int) -> TokenLogprob:
    """A token's log-probability in a row, with the `top` likeliest."""
    one = ops.take_rows(logits, np.array([row], np.int32))
    chosen, ids, values = ops.logprobs(one, np.array([token], np.int32), top)
    pairs = tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True))
    return TokenLogprob(token, float(chosen[0]), pairs)
