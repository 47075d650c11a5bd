"""The group `SamplingOps` of the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from quire.ops import Array, Float32, Int32, Sampler
from quire.ops.cuda.arrays import Arrays, values_of
from quire.ops.cuda.kernels import cuts
from quire.ops.cuda.kernels import race as kernels
from quire.ops.cuda.machine import Machine, need, power_of_two

_BLOCK = 1024
_ALL = 2**31 - 1  # more tokens than there are


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


class Choice(NamedTuple):
    """What choosing tokens of some rows takes; with none of it, the likeliest are chosen."""

    random: bool = False
    counted: bool = False
    """Whether some row has a top_k."""
    weighed: bool = False
    """Whether some row has a top_p."""

    @staticmethod
    def of(samplers: Iterable[CudaSampler]) -> Choice:
        """For all of them."""
        each = {sampler.choice for sampler in samplers}
        if len(each) < 2:
            return each.pop() if each else Choice()
        return Choice(*(any(column) for column in zip(*each, strict=True)))


class Rows(NamedTuple):
    """What each row wants, on the device."""

    keys: torch.Tensor
    floors: torch.Tensor
    shares: torch.Tensor
    heat: torch.Tensor
    most: torch.Tensor

    @staticmethod
    def of(columns: Sequence[torch.Tensor]) -> Rows:
        """From columns as bare integers."""
        kinds = torch.int64, torch.float64, torch.float64, torch.float32, torch.int32
        return Rows(*(c.view(kind) for c, kind in zip(columns, kinds, strict=True)))


class CudaSampler:
    """What one generation wants of its samples, and the tokens it has seen."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        hot = wish.temperature > 0
        self.choice = Choice(hot, hot and wish.top_k > 0, hot and wish.top_p < 1)
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


def columns_of(
    draws: Sequence[tuple[Sampler, float] | None], choice: Choice, n: int
) -> list[NDArray[Any]]:
    """What `Rows` are made of, for n rows; those behind the last draw want nothing.

    Nothing, where nobody leaves anything to chance.
    """
    if not choice.random:
        return []
    keys, floors, heat = np.zeros(n, np.int64), np.zeros(n), np.zeros(n, np.float32)
    most, shares = np.full(n, _ALL, np.int32), np.ones(n)
    keys[: len(draws)] = race_keys(np.array([0.0 if d is None else d[1] for d in draws]))
    for i, draw in enumerate(draws):
        if draw is not None:
            wish = sampler_of(draw[0]).wish
            heat[i], floors[i] = wish.temperature, wish.min_p
            if wish.temperature > 0:
                most[i], shares[i] = wish.top_k or _ALL, wish.top_p
    return [keys, floors, shares, heat, most]


def drawing(
    machine: Machine, x: torch.Tensor, choice: Choice, rows: Rows | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The winner of each row; -1 for one that excludes every token, -2 for one with a NaN."""
    n, vocab = x.shape
    n_blocks = triton.cdiv(vocab, _BLOCK)
    scores = machine.empty(n, n_blocks, dtype=torch.float64)
    winners = machine.empty(n, n_blocks, dtype=torch.int32)
    cut = choice.counted or choice.weighed
    if rows is None:  # what nobody asks for is not read
        rows = Rows(x, x, x, x, x)
    tops = x.amax(1) if choice.random else x
    edges = edges_of(machine, x, tops, choice, rows) if cut else rows.keys
    counts = machine.empty(n, n_blocks, dtype=torch.int32) if cut else winners
    if cut:
        cuts.at_edge[(n, n_blocks)](x, edges, counts, vocab, n_blocks, BLOCK=_BLOCK)
    kernels.race[(n, n_blocks)](
        x, rows.keys, rows.heat, tops, rows.floors, edges, counts, scores, winners, vocab,
        n_blocks, BLOCK=_BLOCK, BLOCKS=power_of_two(n_blocks, 16), GREEDY=not choice.random,
        CUT=cut,
    )  # fmt: skip
    if out is None:
        out = machine.empty(n, dtype=torch.int32)
    kernels.finish[(n,)](
        scores, winners, out, n_blocks, BLOCK=power_of_two(n_blocks, 16), num_warps=1
    )
    return out


def edges_of(
    machine: Machine, x: torch.Tensor, tops: torch.Tensor, choice: Choice, rows: Rows
) -> torch.Tensor:
    """The last tokens that top_k and top_p leave in: their places, and how many are there."""
    n, vocab = x.shape
    digits = cuts.DIGITS
    edges = torch.zeros((n, 2), dtype=torch.int64, device=x.device)
    scale = 2.0 ** (62 - vocab.bit_length())  # as fine as sums of all tokens allow
    for by_weight in (False, True):
        if not (choice.weighed if by_weight else choice.counted):
            continue
        found = torch.zeros((digits, n, 18), dtype=torch.int64, device=x.device)
        sums, states = found.view(-1).split([digits * n * 16, digits * n * 2])
        own = tops, rows.heat, rows.most, rows.shares, sums, states, edges
        for number in range(digits):
            cuts.tally[(n, triton.cdiv(vocab, _BLOCK))](
                x, *own, vocab, n, number, BY_WEIGHT=by_weight, SCALE=scale, BLOCK=_BLOCK
            )
        cuts.settle[(n,)](*own, n, DIGITS=digits, BY_WEIGHT=by_weight, SCALE=scale, num_warps=1)
    return edges


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
        picked = self._pick(x, mine, uniforms)
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
        self, x: torch.Tensor, samplers: list[CudaSampler], uniforms: NDArray[np.float64]
    ) -> torch.Tensor:
        """Winners of edited rows; -1 where every token is excluded, -2 where one is NaN."""
        choice = Choice.of(samplers)
        draws = list(zip(samplers, uniforms.tolist(), strict=True))
        columns = columns_of(draws, choice, len(x))
        rows = Rows(*(self.machine.upload(column) for column in columns)) if columns else None
        return drawing(self.machine, x, choice, rows)

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
