"""From logits to tokens, with samplers that count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.ops import Array, Float32, Int32, Sampler
from quire.ops.reference import sampling
from quire.ops.reference.table.arrays import values_of
from quire.ops.reference.table.memory import need


class HostSampler:
    """What one generation wants of its samples, and the tokens it has seen."""

    def __init__(self, settings: sampling.Sampling) -> None:
        self.settings = settings
        self._counts: dict[int, int] = {}
        self._prompt: set[int] = set()

    def observe(self, ids: Int32) -> None:
        """Counts tokens for the penalties."""
        need((ids >= 0).all(), "a token that cannot be observed")
        for token in ids.tolist():
            self._counts[token] = self._counts.get(token, 0) + 1

    def observe_prompt(self, ids: Int32) -> None:
        """Notes tokens for the repetition penalty alone."""
        need((ids >= 0).all(), "a token that cannot be observed")
        self._prompt.update(ids.tolist())

    def unobserve(self, ids: Int32) -> None:
        """Takes back what was observed."""
        for token in ids.tolist():
            need(self._counts.get(token, 0) > 0, f"token {token} was not observed")
            self._counts[token] -= 1

    def edit(self, logits: Float32, allowed: NDArray[np.bool_] | None) -> Float32:
        """A row of logits after bias, penalties and mask."""
        s = self.settings
        counts = {token: 0 for token in self._prompt}
        counts |= {token: n for token, n in self._counts.items() if n > 0}
        if s.repetition_penalty == 1 and s.presence_penalty == 0 and s.frequency_penalty == 0:
            counts = {}
        named = [token for token, _ in s.bias] + list(counts)
        need(all(token < len(logits) for token in named), "a token outside the vocabulary")
        return sampling.edit_logits(logits, s, counts, allowed)


def sampler_of(sampler: Sampler) -> HostSampler:
    """A sampler that this device made."""
    if not isinstance(sampler, HostSampler):
        raise TypeError(f"{type(sampler).__name__} is not a sampler of the reference")
    return sampler


class Sampling:
    """The group `SamplingOps` of the table."""

    def sampler(
        self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
        repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0, bias_ids: Int32 | None = None,
        bias_values: Float32 | None = None,
    ) -> Sampler:  # fmt: skip
        """A sampler for one generation; 0 turns top_k off."""
        need(0 <= temperature < np.inf, "temperature must be a number from 0")
        need(top_k >= 0, "top_k must be 0 (off) or more")
        need(0 < top_p <= 1, "top_p must lie in (0, 1]")
        need(0 <= min_p <= 1, "min_p must lie in [0, 1]")
        need(0 < repetition_penalty < np.inf, "repetition_penalty must be a positive number")
        need(np.isfinite([presence_penalty, frequency_penalty]).all(), "penalties are numbers")
        need((bias_ids is None) == (bias_values is None), "bias_ids and bias_values go together")
        bias: tuple[tuple[int, float], ...] = ()
        if bias_ids is not None and bias_values is not None:
            need(len(bias_ids) == len(bias_values), "every bias id needs one value")
            need((bias_ids >= 0).all() and not np.isnan(bias_values).any(), "a bias of no token")
            bias = tuple(zip(bias_ids.tolist(), bias_values.tolist(), strict=True))
        return HostSampler(sampling.Sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, bias,
        ))  # fmt: skip

    def sample(
        self, logits: Array, rows: Int32, samplers: list[Sampler], uniforms: NDArray[np.float64],
        masks: NDArray[np.uint32] | None = None,
    ) -> Int32:  # fmt: skip
        """A token for each of these rows, by its sampler and its random number in [0, 1)."""
        values, n = values_of(logits), len(rows)
        need(len(samplers) == n == len(uniforms), f"{n} rows need as many samplers and numbers")
        need(((rows >= 0) & (rows < len(values))).all(), "a row outside the logits")
        need(((uniforms >= 0) & (uniforms < 1)).all(), "uniform numbers must lie in [0, 1)")
        allowed = None if masks is None else _allowed(masks, n, values.shape[1])
        picked = np.empty(n, np.int32)
        for i, row in enumerate(rows):
            need(not np.isnan(values[row]).any(), f"row {row} of the logits contains NaN")
            sampler = sampler_of(samplers[i])
            edited = sampler.edit(values[row], None if allowed is None else allowed[i])
            need((edited > -np.inf).any(), f"row {row}: mask and bias exclude every token")
            picked[i] = sampling.sample(edited, sampler.settings, float(uniforms[i]))
        return picked

    def logprobs(self, logits: Array, ids: Int32, top: int) -> tuple[Float32, Int32, Float32]:
        """Log-probabilities of ids, and the likeliest tokens with theirs, row by row."""
        values = values_of(logits)
        need(len(ids) == len(values), f"{len(ids)} ids for {len(values)} rows")
        need(0 <= top <= values.shape[1], f"top is {top} of {values.shape[1]}")
        need(((ids >= 0) & (ids < values.shape[1])).all(), "a token outside the vocabulary")
        need(not np.isnan(values).any(), "the logits contain NaN")
        return sampling.logprobs(values, ids, top)


def _allowed(masks: NDArray[np.uint32], rows: int, vocab: int) -> NDArray[np.bool_]:
    """Rows of bits as booleans."""
    shape = rows, -(-vocab // 32)
    need(masks.shape == shape and masks.itemsize == 4, f"masks must be 32-bit words {shape}")
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), axis=1, bitorder="little")
    return bits[:, :vocab].astype(np.bool_)
