"""The group `SamplingOps` of the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from quire.ops import Array, Float32, Int32, Sampler
from quire.ops.cuda.arrays import Arrays, values_of
from quire.ops.cuda.kernels import race as kernels
from quire.ops.cuda.machine import Machine, need, power_of_two

_BLOCK = 1024


@dataclass(frozen=True)
class Wish:
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

    @property
    def selects(self) -> bool:
        """Whether tokens have to be put in order."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


class CudaSampler:
    """What one generation wants of its samples, and the tokens it has seen."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self._penalises = wish.penalises
        self._counts: dict[int, int] = {}
        self._prompt: set[int] = set()

    def observe(self, ids: Int32) -> None:
        """Counts tokens for the penalties."""
        if not self._penalises:
            return
        need((ids >= 0).all(), "a token that cannot be observed")
        for token in ids.tolist():
            self._counts[token] = self._counts.get(token, 0) + 1

    def observe_prompt(self, ids: Int32) -> None:
        """Notes tokens for the repetition penalty alone."""
        if not self._penalises:
            return
        need((ids >= 0).all(), "a token that cannot be observed")
        self._prompt.update(ids.tolist())

    def unobserve(self, ids: Int32) -> None:
        """Takes back what was observed."""
        if not self._penalises:
            return
        for token in ids.tolist():
            need(self._counts.get(token, 0) > 0, f"token {token} was not observed")
            self._counts[token] -= 1

    @property
    def counts(self) -> dict[int, int]:
        """How often tokens were there that penalties are about; 0 for a prompt's."""
        seen = {token: n for token, n in self._counts.items() if n > 0}
        return {token: 0 for token in self._prompt} | seen


def sampler_of(sampler: Sampler) -> CudaSampler:
    """A sampler that this device made."""
    if not isinstance(sampler, CudaSampler):
        raise TypeError(f"{type(sampler).__name__} is not a sampler of the GPU")
    return sampler


def race_keys(uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """splitmix64's finalizer of the bits of random numbers."""
    x = np.ascontiguousarray(uniforms, np.float64).view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def drawing(
    machine: Machine, x: torch.Tensor, keys: torch.Tensor, heat: torch.Tensor | None,
    floors: torch.Tensor, edges: torch.Tensor | None = None, limits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The winner of each row; of the likeliest alone, where nobody has a temperature (`heat`).

    -1 stands for a row that excludes every token, -2 for one with a NaN.
    """
    n, vocab = x.shape
    n_blocks = triton.cdiv(vocab, _BLOCK)
    scores = machine.empty(n, n_blocks, dtype=torch.float64)
    winners = machine.empty(n, n_blocks, dtype=torch.int32)
    tops = x if heat is None else x.amax(1)
    kernels.race[(n, n_blocks)](
        x, keys, x if heat is None else heat, tops, floors, x if edges is None else edges,
        keys if limits is None else limits, scores, winners, vocab, n_blocks, BLOCK=_BLOCK,
        GREEDY=heat is None, CUT=edges is not None,
    )  # fmt: skip
    if out is None:
        out = machine.empty(n, dtype=torch.int32)
    kernels.finish[(n,)](
        scores, winners, out, n_blocks, BLOCK=power_of_two(n_blocks, 16), num_warps=1
    )
    return out


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
        need(np.isfinite([presence_penalty, frequency_penalty]).all(), "penalties are numbers")
        need((bias_ids is None) == (bias_values is None), "bias_ids and bias_values go together")
        bias: tuple[tuple[int, float], ...] = ()
        if bias_ids is not None and bias_values is not None:
            need(len(bias_ids) == len(bias_values), "every bias id needs one value")
            need((bias_ids >= 0).all() and not np.isnan(bias_values).any(), "a bias of no token")
            bias = tuple(zip(bias_ids.tolist(), bias_values.tolist(), strict=True))
        return CudaSampler(Wish(
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, bias,
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
        mine = [sampler_of(sampler) for sampler in samplers]
        # A copy, and without negative zeros, which would sort apart from zeros.
        x = values.index_select(0, self.machine.upload(rows)) + 0.0
        self._edit(x, mine)
        if masks is not None:
            self._mask(x, masks)
        picked = self._pick(x, [sampler.wish for sampler in mine], uniforms)
        found: Int32 = picked.cpu().numpy()
        for row, token in zip(rows, found, strict=True):
            need(token != -2, f"row {row} of the logits contains NaN")
            need(token != -1, f"row {row}: mask and bias exclude every token")
        assert vocab > int(found.max(initial=0))
        return found

    def _edit(self, x: torch.Tensor, samplers: list[CudaSampler]) -> None:
        """Bias, then penalties, where a sampler has any."""
        vocab = x.shape[1]
        bias = [
            (row, token, value)
            for row, sampler in enumerate(samplers)
            for token, value in sampler.wish.bias
        ]
        counts = [
            (row, token, count, sampler.wish)
            for row, sampler in enumerate(samplers)
            for token, count in sampler.counts.items()
        ]
        named = [token for _, token, _ in bias] + [token for _, token, _, _ in counts]
        need(max(named, default=0) < vocab, "a token outside the vocabulary")
        if bias:
            at, values = _columns([(r, t) for r, t, _ in bias], [[v for _, _, v in bias]])
            x.index_put_(self._on_device(at), self._floats(values)[0], accumulate=True)
        if counts:
            wishes = [(w.repetition_penalty, w.frequency_penalty * c + w.presence_penalty
                       if c > 0 else 0.0) for _, _, c, w in counts]  # fmt: skip
            at, values = _columns(
                [(r, t) for r, t, _, _ in counts], list(zip(*wishes, strict=True))
            )
            where = self._on_device(at)
            repetition, less = self._floats(values)
            old = x[where]
            x[where] = torch.where(old > 0, old / repetition, old * repetition) - less

    def _on_device(self, at: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tokens = self.machine.upload(at)
        return rows, tokens

    def _floats(self, values: Float32) -> torch.Tensor:
        return self.machine.upload(values)

    def _mask(self, x: torch.Tensor, masks: NDArray[np.uint32]) -> None:
        n, vocab = x.shape
        shape = n, -(-vocab // 32)
        need(masks.shape == shape and masks.itemsize == 4, f"masks must be 32-bit words {shape}")
        words = self.machine.upload(np.ascontiguousarray(masks).view(np.int32))
        shifts = torch.arange(32, device=x.device, dtype=torch.int32)
        bits = (words[:, :, None] >> shifts & 1).view(n, -1)[:, :vocab]
        x.masked_fill_(bits == 0, float("-inf"))

    def _pick(
        self, x: torch.Tensor, wishes: list[Wish], uniforms: NDArray[np.float64]
    ) -> torch.Tensor:
        """Winners of edited rows; -1 where every token is excluded, -2 where one is NaN."""
        n = len(x)
        upload = self.machine.upload
        edges = torch.full((n,), float("-inf"), device=x.device)
        limits = torch.zeros(n, dtype=torch.int32, device=x.device)
        chosen = [row for row, wish in enumerate(wishes) if wish.selects]
        if chosen:
            at = upload(np.array(chosen, np.int64))
            edges[at], limits[at] = self._edges(x[at], [wishes[row] for row in chosen])
        heat = upload(np.array([w.temperature for w in wishes], np.float32))
        floors = upload(np.array([w.min_p for w in wishes], np.float64))
        keys = upload(race_keys(uniforms))
        return drawing(self.machine, x, keys, heat, floors, edges, limits)

    def _edges(self, x: torch.Tensor, wishes: list[Wish]) -> tuple[torch.Tensor, torch.Tensor]:
        """The last token that top_k and top_p leave in: its logit and its id."""
        vocab = x.shape[1]
        ordered, ids = torch.sort(x, dim=1, descending=True, stable=True)
        ranks = torch.arange(vocab, device=x.device)
        most = self.machine.upload(np.array([w.top_k or vocab for w in wishes], np.int64))
        heat = self.machine.upload(np.array([w.temperature for w in wishes], np.float32)).double()
        mass = self.machine.upload(np.array([w.top_p for w in wishes], np.float64))
        y = ordered.double()
        weights = torch.exp((y - y[:, :1]) / heat[:, None])
        weights = torch.where(y == y[:, :1], 1.0, weights)
        weights = torch.where((ranks < most[:, None]) & (y > float("-inf")), weights, 0.0)
        sums = weights.cumsum(1)
        short = sums < (mass * sums[:, -1])[:, None]
        # Without top_p the whole mass is wanted, which rounding must not cut short.
        kept = torch.where(mass < 1, short.sum(1) + 1, vocab)
        last = torch.minimum(torch.minimum(kept, most), torch.tensor(vocab, device=x.device)) - 1
        return ordered.gather(1, last[:, None])[:, 0], ids.gather(1, last[:, None])[:, 0].int()

    def logprobs(self, logits: Array, ids: Int32, top: int) -> tuple[Float32, Int32, Float32]:
        """Log-probabilities of ids, and the likeliest tokens with theirs, row by row."""
        values = values_of(logits)
        n, vocab = values.shape
        need(len(ids) == n, f"{len(ids)} ids for {n} rows")
        need(0 <= top <= vocab, f"top is {top} of {vocab}")
        need(((ids >= 0) & (ids < vocab)).all(), "a token outside the vocabulary")
        x = values.double()
        p = x - torch.logsumexp(x, 1, keepdim=True)
        chosen = p.gather(1, self.machine.upload(ids).long()[:, None])[:, 0]
        order = torch.sort(values + 0.0, dim=1, descending=True, stable=True).indices[:, :top]
        wrong = values.isnan().any(1).cpu().numpy()
        need(not wrong.any(), f"row {int(wrong.argmax())} of the logits contains NaN")
        tops = p.gather(1, order).float().cpu().numpy()
        return chosen.float().cpu().numpy(), order.int().cpu().numpy(), tops


def _columns(
    at: list[tuple[int, int]], values: list[list[float]] | list[tuple[float, ...]]
) -> tuple[NDArray[np.int64], Float32]:
    """Places and values as contiguous columns."""
    return np.array(at, np.int64).T.copy(), np.array(values, np.float32)
