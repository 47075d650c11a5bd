"""What sampling means, in plain NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.reference.matrices import Floats, Ints


@dataclass(frozen=True)
class Sampling:
    """What one sequence wants of its samples; 0 turns top_k off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


def edit_logits(
    logits: Floats, sampling: Sampling, counts: dict[int, int], allowed: NDArray[np.bool_] | None
) -> Floats:
    """Bias, penalties for the tokens counted, then minus infinity where not allowed.

    A count of 0 is a prompt's token, which only the repetition penalty is about.
    """
    x = logits.astype(np.float32)
    for token, value in sampling.bias:
        x[token] += np.float32(value)
    repetition = np.float32(sampling.repetition_penalty)
    for token, count in counts.items():
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        if count > 0:
            frequency = np.float32(sampling.frequency_penalty) * np.float32(count)
            x[token] -= frequency + np.float32(sampling.presence_penalty)
    if allowed is not None:
        x[~allowed] = -np.inf
    return x


def candidates(x: Floats, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that the filters leave, most likely first (ties by id), and their probabilities."""
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -np.inf]
    if sampling.temperature == 0:
        return order[:1], np.ones(1)
    if sampling.top_k:
        order = order[: sampling.top_k]
    y = x[order].astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.where(y == y[0], 1.0, np.exp((y - y[0]) / np.float32(sampling.temperature)))
    if sampling.top_p < 1:
        reached = np.cumsum(weights) >= sampling.top_p * weights.sum()
        keep = int(reached.argmax()) + 1 if reached.any() else len(order)
        order, weights = order[:keep], weights[:keep]
    keep = int((weights >= sampling.min_p).sum())
    order, weights = order[:keep], weights[:keep]
    return order, weights / weights.sum()


def probabilities(x: Floats, sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that a sample of edited logits is drawn from."""
    order, p = candidates(x, sampling)
    out = np.zeros(len(x))
    out[order] = p
    return out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def race(tokens: NDArray[np.int64], p: NDArray[np.float64], u: float) -> NDArray[np.float64]:
    """Scores in an exponential race: p / -log(u_i), with u_i hashed from u and the token's id."""
    key = _mix(np.array([u]).view(np.uint64))
    number = _mix(key + (tokens + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    u_i = (number >> np.uint64(11) | np.uint64(1)).astype(np.float64) * 2.0**-53
    score: NDArray[np.float64] = p / -np.log(u_i)
    return score


def sample(x: Floats, sampling: Sampling, u: float) -> int:
    """The token of the highest score in the race, ties by id."""
    order, p = candidates(x, sampling)
    score = race(order, p, u)
    return int(order[score == score.max()].min())


def logprobs(logits: Floats, ids: Ints, top: int) -> tuple[Floats, Ints, Floats]:
    """Log-softmax of ids, and the `top` most likely tokens with theirs, row by row."""
    x = logits.astype(np.float64)
    best = x.max(-1, keepdims=True)
    p = x - best - np.log(np.exp(x - best).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :top]
    chosen = np.take_along_axis(p, ids[:, None].astype(np.int64), -1)[:, 0]
    tops = np.take_along_axis(p, order, -1)
    return chosen.astype(np.float32), order.astype(np.int32), tops.astype(np.float32)
