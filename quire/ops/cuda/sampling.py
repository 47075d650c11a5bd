"""The group `SamplingOps` of the table."""

from __future__ import annotations

from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops import Array, Draw, Float32, Int32, Sampler
from quire.ops.cuda.arrays import Arrays, values_of
from quire.ops.cuda.drawing import (
    MOST_TOLD,
    Choice,
    columns_of,
    drawing,
    edit,
    report,
    reported,
)
from quire.ops.cuda.machine import need, power_of_two
from quire.ops.cuda.sampler import CudaSampler, Wish, sampler_of


class Sampling(Arrays):
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
        finite = isfinite(presence_penalty) and isfinite(frequency_penalty)
        need(finite, "penalties are numbers")
        need((bias_ids is None) == (bias_values is None), "bias_ids and bias_values go together")
        bias: dict[int, float] = {}
        if bias_ids is not None and bias_values is not None:
            need(len(bias_ids) == len(bias_values), "every bias id needs one value")
            need((bias_ids >= 0).all() and not np.isnan(bias_values).any(), "a bias of no token")
            for token, value in zip(bias_ids.tolist(), bias_values.tolist(), strict=True):
                bias[token] = bias.get(token, 0.0) + value
        return CudaSampler(Wish(
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, tuple(bias.items()),
        ))  # fmt: skip

    def sample(
        self, logits: Array, rows: Int32, samplers: list[Sampler], uniforms: NDArray[np.float64],
        masks: NDArray[np.uint32] | None = None,
    ) -> Int32:  # fmt: skip
        """A token for each of these rows, by its sampler and its random number in [0, 1)."""
        values, n = values_of(logits), len(rows)
        vocab = values.shape[1]
        need(len(samplers) == n == len(uniforms), f"{n} rows need as many samplers and numbers")
        need(((rows >= 0) & (rows < len(values))).all(), "a row outside the logits")
        need(((uniforms >= 0) & (uniforms < 1)).all(), "uniform numbers must lie in [0, 1)")
        if n == 0:
            return np.empty(0, np.int32)
        draws = [Draw(s, u) for s, u in zip(samplers, uniforms.tolist(), strict=True)]
        # A copy, and without negative zeros, which would sort apart from zeros.
        x = values.index_select(0, self.machine.upload(rows)) + 0.0
        try:
            picked = self._pick(x, draws, masks)
        except BaseException:
            for sampler in samplers:
                sampler_of(sampler).recount()
            raise
        found: Int32 = picked.cpu().numpy()
        for row, token in zip(rows, found, strict=True):
            need(token != -2, f"row {row} of the logits contains NaN")
            need(token != -1, f"row {row}: mask and bias exclude every token")
        assert vocab > int(found.max(initial=0))
        return found

    def _mask(self, x: torch.Tensor, masks: NDArray[np.uint32]) -> None:
        n, vocab = x.shape
        shape = n, -(-vocab // 32)
        need(masks.shape == shape and masks.itemsize == 4, f"masks must be 32-bit words {shape}")
        words = self.machine.upload(np.ascontiguousarray(masks).view(np.int32))
        shifts = torch.arange(32, device=x.device, dtype=torch.int32)
        bits = (words[:, :, None] >> shifts & 1).view(n, -1)[:, :vocab]
        x.masked_fill_(bits == 0, float("-inf"))

    def _pick(
        self, x: torch.Tensor, draws: list[Draw], masks: NDArray[np.uint32] | None
    ) -> torch.Tensor:
        """Winners of rows, which it edits; -1 where all is excluded, -2 where one is NaN."""
        n, vocab = x.shape
        choice = Choice.of(draws)
        columns = columns_of(self.machine, draws, choice, n, vocab)
        uploaded = [self.machine.upload(column) for column in columns]
        chances, edits = choice.given(uploaded)
        if edits is not None:
            edit(x, edits, edits.news)  # no token is taken from a step before
        if masks is not None:
            self._mask(x, masks)
        return drawing(self.machine, x, choice, chances)

    def logprobs(self, logits: Array, ids: Int32, top: int) -> tuple[Float32, Int32, Float32]:
        """Log-probabilities of ids, and the likeliest tokens with theirs, row by row."""
        values = values_of(logits)
        n, vocab = values.shape
        need(len(ids) == n, f"{len(ids)} ids for {n} rows")
        need(0 <= top <= vocab, f"top is {top} of {vocab}")
        need(((ids >= 0) & (ids < vocab)).all(), "a token outside the vocabulary")
        wrong = values.isnan().any(1).cpu().numpy()
        need(not wrong.any(), f"row {int(wrong.argmax())} of the logits contains NaN")
        drawn = self.machine.upload(ids)
        if top > MOST_TOLD or n == 0:
            return _sorted_logprobs(values, drawn, top)
        told = power_of_two(top, 8) if top else 0
        chosen, order, tops = reported(report(self.machine, values, drawn, told).cpu().numpy())
        return chosen.copy(), order[:, :top].copy(), tops[:, :top].copy()


def _sorted_logprobs(
    values: torch.Tensor, ids: torch.Tensor, top: int
) -> tuple[Float32, Int32, Float32]:
    """The same for more of the likeliest than kernels put in order."""
    x = values.double()
    p = x - torch.logsumexp(x, 1, keepdim=True)
    chosen = p.gather(1, ids.long()[:, None])[:, 0]
    order = torch.sort(values + 0.0, dim=1, descending=True, stable=True).indices[:, :top]
    tops = p.gather(1, order).float().cpu().numpy()
    return chosen.float().cpu().numpy(), order.int().cpu().numpy(), tops
