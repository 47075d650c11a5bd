"""What generations want of their samples, and how tokens of all rows are drawn at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from quire.ops import Int32, Sampler
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
