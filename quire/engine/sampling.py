"""From logits to tokens: what samplers and constraints make of a row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.sequence import Generation
from quire.errors import ModelError, QuireError, RequestError
from quire.ops import Array, Ops, Refused
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
) -> list[int | QuireError]:  # fmt: skip
    """A token for each (row of the logits, generation, how far ahead of its next token).

    Where a row has none to give, the error says why; it is for that generation alone.
    """
    try:
        return [*_sample(ops, logits, rows, masks)]
    except Refused as error:
        if len(rows) == 1:
            return [_no_token(ops, logits, rows[0][0], error)]
        alone = [None if masks is None else masks[i : i + 1] for i in range(len(rows))]
        return [sample(ops, logits, [row], alone[i])[0] for i, row in enumerate(rows)]


def _no_token(ops: Ops, logits: Array, row: int, error: Refused) -> QuireError:
    if np.isnan(ops.numpy(logits)[row]).any():
        return ModelError(
            "the model's logits are not numbers (NaN): its weights are damaged, or too large for "
            "what it computes with them"
        )
    return RequestError(str(error))


def _sample(
    ops: Ops, logits: Array, rows: Seq[tuple[int, Generation, int]],
    masks: NDArray[np.uint32] | None,
) -> list[int]:  # fmt: skip
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
