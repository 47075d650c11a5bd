"""How tokens of all rows are drawn at once, and what is told of them.

logits ─▶ bias, penalties ─▶ top-k, top-p, min-p ─▶ race ─▶ ids ─▶ log-probabilities
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from quire.ops import Draw, Int32
from quire.ops.cuda.kernels import cuts, likely
from quire.ops.cuda.kernels import edits as editing
from quire.ops.cuda.kernels import race as kernels
from quire.ops.cuda.machine import Machine, power_of_two
from quire.ops.cuda.sampler import NOTHING, Edit, Kind, sampler_of

_BLOCK = 1024
_ALL = 2**31 - 1  # more tokens than there are
MOST_TOLD = 128
"""Likeliest tokens that kernels put in order."""


class Rows(NamedTuple):
    """What chance each row leaves to its tokens, on the device."""

    keys: torch.Tensor
    floors: torch.Tensor
    shares: torch.Tensor
    heat: torch.Tensor
    most: torch.Tensor


class Edits(NamedTuple):
    """What each row's logits are edited by, on the device: columns of `Edit`."""

    counts: torch.Tensor
    biases: torch.Tensor
    lengths: torch.Tensor
    news: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


_ROWS = torch.int64, torch.float64, torch.float64, torch.float32, torch.int32
_EDITS = (torch.int64,) * 2 + (torch.int32,) * 2 + (torch.float32,) * 3


class Choice(NamedTuple):
    """What choosing tokens of some rows takes; with none of it, the likeliest are chosen."""

    random: bool = False
    counted: bool = False
    """Whether some row has a top_k."""
    weighed: bool = False
    """Whether some row has a top_p."""
    edited: bool = False
    """Whether some row has a bias or penalties."""
    told: int = -1
    """Likeliest tokens that are told with log-probabilities, rounded up; -1: nobody asks."""

    @staticmethod
    def of(draws: Iterable[Draw | None]) -> Choice:
        """For all of them."""
        kinds: set[Kind] = set()
        top = -1
        for draw in draws:
            if draw is not None:
                kinds.add(sampler_of(draw.sampler).kind)
                if draw.top is not None and draw.top > top:
                    top = draw.top
        random, counted, weighed, edited = (any(each) for each in zip(*kinds, NOTHING, strict=True))
        told = power_of_two(top, 8) if top > 0 else top
        return Choice(random, counted, weighed, edited, told)

    @property
    def _columns(self) -> tuple[torch.dtype, ...]:
        return _ROWS * self.random + _EDITS * self.edited

    def sizes(self, n: int) -> list[int]:
        """Integers of each column that n rows are given."""
        return [n * kind.itemsize // 4 for kind in self._columns]

    def given(self, columns: Sequence[torch.Tensor]) -> tuple[Rows | None, Edits | None]:
        """What rows are given, from columns as bare integers."""
        typed = [c.view(kind) for c, kind in zip(columns, self._columns, strict=True)]
        rows = Rows(*typed[: len(_ROWS)]) if self.random else None
        return rows, Edits(*typed[-len(_EDITS) :]) if self.edited else None

    @property
    def report_size(self) -> int:
        """Integers that are told of a row beside its token."""
        return 1 + 2 * self.told if self.told >= 0 else 0


def race_keys(uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """splitmix64's finalizer of the bits of random numbers."""
    x = np.ascontiguousarray(uniforms, np.float64).view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def columns_of(
    machine: Machine, draws: Sequence[Draw | None], choice: Choice, n: int, vocab: int,
    sources: Int32 | None = None,
) -> list[NDArray[Any]]:  # fmt: skip
    """What n rows are given; those behind the last draw want nothing.

    Nothing, where nobody leaves anything to chance or edits.
    """
    columns: list[NDArray[Any]] = []
    if choice.random:
        keys, floors, heat = np.zeros(n, np.int64), np.zeros(n), np.zeros(n, np.float32)
        most, shares = np.full(n, _ALL, np.int32), np.ones(n)
        keys[: len(draws)] = race_keys(np.array([0.0 if d is None else d.uniform for d in draws]))
        for i, draw in enumerate(draws):
            if draw is not None:
                wish = sampler_of(draw.sampler).wish
                heat[i], floors[i] = wish.temperature, wish.min_p
                if wish.temperature > 0:
                    most[i], shares[i] = wish.top_k or _ALL, wish.top_p
        columns += [keys, floors, shares, heat, most]
    if choice.edited:
        edits = [Edit()] * n
        for i, draw in enumerate(draws):
            if draw is not None and (sampler := sampler_of(draw.sampler)).edits:
                edits[i] = sampler.edit(machine, vocab, -1 if sources is None else int(sources[i]))
        kinds = (np.int64,) * 2 + (np.int32,) * 2 + (np.float32,) * 3
        columns += [np.array(c, k) for c, k in zip(zip(*edits, strict=True), kinds, strict=True)]
    return columns


def edit(x: torch.Tensor, edits: Edits, last: torch.Tensor) -> None:
    """Bias and penalties, in place; `last` are the tokens of the step before."""
    n, vocab = x.shape
    editing.begin[(n,)](
        x, last, edits.counts, edits.biases, edits.lengths, edits.news, vocab, BLOCK=128,
        num_warps=1,
    )  # fmt: skip
    editing.penalise[(n, triton.cdiv(vocab, _BLOCK))](
        x, edits.counts, edits.repetition, edits.frequency, edits.presence, vocab, BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip


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
    edges, counts = rows.keys, winners
    if cut:
        edges = edges_of(x, tops, choice, rows)
        counts = _at_edge(machine, x, edges)
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


def report(machine: Machine, x: torch.Tensor, drawn: torch.Tensor, told: int) -> torch.Tensor:
    """Log-probabilities of what was drawn, and of the likeliest: a row of integers each."""
    n, vocab = x.shape
    n_blocks = triton.cdiv(vocab, _BLOCK)
    tops, sums = machine.empty(n, n_blocks), machine.empty(n, n_blocks, dtype=torch.float64)
    likely.weigh[(n, n_blocks)](x, tops, sums, vocab, n_blocks, BLOCK=_BLOCK)
    keys, blocks = sums, power_of_two(n_blocks, 16)
    if told:
        most = torch.full((n,), told, dtype=torch.int32, device=x.device)
        edges = edges_of(x, x, Choice(counted=True), Rows(x, x, x, x, most))
        counts = _at_edge(machine, x, edges)
        keys = torch.full((n, told), -(2**63), dtype=torch.int64, device=x.device)
        filled = torch.zeros(n, dtype=torch.int32, device=x.device)
        likely.collect[(n, n_blocks)](
            x, edges, counts, keys, filled, vocab, n_blocks, BLOCK=_BLOCK, BLOCKS=blocks, MOST=told
        )
    out = machine.empty(n, 1 + 2 * told, dtype=torch.int32)
    likely.report[(n,)](x, drawn, tops, sums, keys, out, vocab, n_blocks, BLOCKS=blocks, MOST=told)
    return out


def reported(found: Int32) -> tuple[NDArray[np.float32], Int32, NDArray[np.float32]]:
    """A report on the host: of what was drawn, ids of the likeliest, and theirs."""
    told = found.shape[1] // 2
    chosen, values = found[:, 0].view(np.float32), found[:, 1 + told :].view(np.float32)
    return chosen, found[:, 1 : 1 + told], values


def _at_edge(machine: Machine, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """How many tokens of each block are at its row's edge."""
    n, vocab = x.shape
    n_blocks = triton.cdiv(vocab, _BLOCK)
    counts = machine.empty(n, n_blocks, dtype=torch.int32)
    cuts.at_edge[(n, n_blocks)](x, edges, counts, vocab, n_blocks, BLOCK=_BLOCK)
    return counts


def edges_of(x: torch.Tensor, tops: torch.Tensor, choice: Choice, rows: Rows) -> torch.Tensor:
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
