"""Drafting within a step: room for all tokens is there, and they become known one by one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.engine.choose import sample
from quire.engine.constrain import Matcher
from quire.engine.generation import Generation
from quire.errors import QuireError
from quire.memory.batch import MicroBatch
from quire.memory.groups.layout import Int32
from quire.models.registry import Model
from quire.ops import Array, Ops


class Runs(Protocol):
    """Who runs a model."""

    model: Model
    ops: Ops

    def run(self, ubatch: MicroBatch, stop: int | None = None) -> Array:
        """Tokens through the first `stop` layers, or all."""

    def logits(self, x: Array, rows: Int32, after: int) -> Array:
        """The output of some rows after so many layers."""


@dataclass(frozen=True)
class Line:
    """A sequence whose last `n` new tokens are places, to be filled in."""

    row: int
    n: int
    generation: Generation


@dataclass(frozen=True)
class DraftedInStep:
    """What was drafted within a step, and what it took."""

    hidden: NDArray[np.float32]
    """Rows of all tokens after the layers that were run."""
    drafts: list[list[int]]
    """What was drawn for each line."""
    seconds: float
    """For everything after the tokens that were there from the start."""
    seconds_per_token: float


def draft_in_step(
    runner: Runs, ubatch: MicroBatch, lines: Seq[Line], stop: int, one_more: bool = False
) -> DraftedInStep:
    """Computes `stop` layers of the tokens that are there, then of each drawn one in turn.

    A drawn token is put into its place in `ubatch.tokens`. It is drawn as the generation would
    draw it, within its constraint, from what the output makes of those layers. `one_more` draws
    a token behind the last place too, for which there is none.
    """
    counts = ubatch.counts
    there = counts.copy()
    for line in lines:
        there[line.row] -= line.n
    everybody = np.arange(len(counts), dtype=np.int32)
    x = runner.run(ubatch.part(everybody, np.zeros_like(counts), there), stop)
    start = perf_counter()
    firsts: Int32 = (np.cumsum(counts) - counts).astype(np.int32)
    here = runner.model.ops_after[stop]
    first = here.numpy(x)
    hidden = np.empty((len(ubatch.tokens), first.shape[1]), np.float32)
    hidden[_rows(firsts, there)] = first
    drafts: list[list[int]] = [[] for _ in lines]
    latest = {i: int(there[: line.row + 1].sum()) - 1 for i, line in enumerate(lines)}
    matchers = [m.copy() if (m := line.generation.matcher) else None for line in lines]
    steps = 0
    try:
        while latest:
            steps += 1
            _draw(runner, x, stop, lines, latest, drafts, matchers)
            going = [i for i in latest if len(drafts[i]) <= lines[i].n]
            if not going:
                break
            seqs: Int32 = np.array([lines[i].row for i in going], np.int32)
            done: Int32 = np.array([len(drafts[i]) - 1 for i in going], np.int32)
            at = firsts[seqs] + there[seqs] + done
            ubatch.tokens[at] = [drafts[i][-1] for i in going]
            x = runner.run(ubatch.part(seqs, there[seqs] + done, np.ones_like(seqs)), stop)
            hidden[at] = here.numpy(x)
            latest = {
                i: row for row, i in enumerate(going) if len(drafts[i]) < lines[i].n + one_more
            }
    finally:
        for line, drawn in zip(lines, drafts, strict=True):
            line.generation.sampler.unobserve(np.array(drawn, np.int32))
    seconds = perf_counter() - start
    return DraftedInStep(hidden, drafts, seconds, seconds / max(steps, 1))


def _draw(
    runner: Runs, x: Array, after: int, lines: Seq[Line], latest: dict[int, int],
    drafts: list[list[int]], matchers: list[Matcher | None],
) -> None:  # fmt: skip
    """The next token of each line, from its latest row."""
    rows = np.array(list(latest.values()), np.int32)
    logits = runner.logits(x, rows, after)
    wanted = [(row, lines[i].generation, len(drafts[i])) for row, i in enumerate(latest)]
    masks = _masks(matchers, list(latest), runner.model.n_vocab)
    for i, drawn in zip(latest, sample(runner.ops, logits, wanted, masks), strict=True):
        token = drawn if isinstance(drawn, int) else 0  # whoever judges the draft meets the error
        drafts[i].append(token)
        lines[i].generation.sampler.observe(np.array([token], np.int32))
        if matcher := matchers[i]:
            matchers[i] = _moved_on(matcher, token, lines[i].generation)


def _masks(
    matchers: list[Matcher | None], which: list[int], n_vocab: int
) -> NDArray[np.uint32] | None:
    """Which tokens each line may draw, or None where no line is constrained."""
    if not any(matchers[i] for i in which):
        return None
    masks = np.full((len(which), (n_vocab + 31) // 32), 2**32 - 1, np.uint32)
    for mask, i in zip(masks, which, strict=True):
        if matcher := matchers[i]:
            try:
                matcher.mask(mask)
            except QuireError:  # the step itself will find out, if it gets here
                mask[:], matchers[i] = 2**32 - 1, None
    return masks


def _moved_on(matcher: Matcher, token: int, generation: Generation) -> Matcher | None:
    """The matcher behind a token; None where nothing is left to say."""
    if token in generation.rules.ids:
        return None
    try:
        matcher.consume(token)
    except QuireError:
        return None
    return None if matcher.finished else matcher


def _rows(firsts: Int32, counts: Int32) -> NDArray[np.intp]:
    """The first so many rows of each sequence."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)])
