"""Whole steps of a model as captured graphs, from token ids to the tokens that follow.

    host     columns ──▶ pinned                                          pinned ──▶ ids
    GPU      take ─▶ block ─▶ embed ─▶ layers ─▶ logits ─▶ edits ─▶ race ─▶ ids ─▶ give
                                ▲─────── the ids of the step before ──▲          │
                                └────────────────────────────────────────────────┘

A step of one shape runs eagerly the first time, which compiles what it needs, is captured the
second time and replayed from then on. Shapes are rounded up, so that there are few of them; what
fills them up is no token, and changes nothing. Nobody waits for a step: its ids are read when
they are asked for, and the next step may take its tokens from them on the device.

Of a model whose first layers are elsewhere the rest is such a step: it begins with their rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops import Array, Draw, Int32
from quire.ops.batch import Batch, GroupPages
from quire.ops.cuda.arrays import values_of
from quire.ops.cuda.drawing import Choice, Edits, Rows, columns_of, drawing, edit, report
from quire.ops.cuda.kernels import rows as kernels
from quire.ops.cuda.machine import Machine, OnDevice, power_of_two, recording, wait
from quire.ops.cuda.paged import Paged, PageShape, filled, page_columns, shape_of
from quire.ops.cuda.recurrent import state_places
from quire.ops.cuda.recurrent_layer import CudaStates, StateShape
from quire.ops.cuda.recurrent_rows import state_columns, state_shape
from quire.ops.cuda.sampler import sampler_of
from quire.ops.cuda.stage import Clock, Drawn, Events, Stage

MOST_TOKENS = 512
"""Longer steps are not captured: there launches cost little beside the work."""
_GRAPHS = 64  # graphs that are kept
_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Layers(Protocol):
    """What a model is here."""

    @property
    def n_layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    def embed(self, batch: Batch) -> Array: ...
    def run(self, x: Array, batch: Batch, start: int, stop: int, on: Any) -> Array: ...
    def logits(self, x: Array) -> Array: ...
    @property
    def n_vocab(self) -> int: ...


@dataclass(frozen=True)
class Group:
    """A group's view in a step, where its pages lie, and where in them its layers do."""

    view: Any
    bases: tuple[int, ...]
    offsets: Mapping[int, tuple[int, int]]

    @property
    def recurrent(self) -> bool:
        """Whether it has states and logs."""
        return len(self.bases) == 2


class Key(NamedTuple):
    """The shape of a step."""

    tokens: int
    rows: int
    """Of logits."""
    every_row: bool
    """Whether the logits of all tokens are wanted, in order."""
    groups: tuple[tuple[str, PageShape | StateShape], ...]
    choice: Choice


class Captured:
    """One shape of step: what it reads, its graph once there is one, what it makes."""

    def __init__(self, key: Key, machine: Machine) -> None:
        self.key = key
        choice = key.choice
        self.sizes = [*choice.sizes(key.rows), key.rows, *[key.tokens] * 3]
        for _, shape in key.groups:
            self.sizes += shape.sizes
        self.stage = Stage(machine, sum(self.sizes), key.rows, choice.report_size)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.seen = 0
        self.logits: Array | None = None

    def columns(self) -> list[torch.Tensor]:
        """The parts of what it reads."""
        return list(torch.split(self.stage.block, self.sizes))


class Steps:
    """The steps of one model on one GPU, from a layer on."""

    def __init__(self, model: Layers, ops: Any, first: int = 0) -> None:
        self._model, self._ops, self._first = model, ops, first
        self._machine: Machine = ops.machine
        self._events = Events(self._machine)
        self._known: OrderedDict[Key, Captured] = OrderedDict()
        self._last = torch.zeros(MOST_TOKENS, dtype=torch.int32, device=self._machine.device)
        # What comes from layers elsewhere: in one place, whatever the shape of a step.
        self._x = self._machine.empty(MOST_TOKENS if first else 0, model.width)
        self._pool: Any = None
        self._latest: Captured | None = None
        self.clock = Clock()
        self.replayed = False
        """Whether the last step was the replay of a graph."""

    def run(
        self, tokens: Int32, positions: Int32, seq_rows: Int32, groups: Mapping[str, Group],
        rows: Int32, draws: Sequence[Draw | None], sources: Int32 | None,
        x: Array | None = None,
    ) -> tuple[Array, Drawn] | None:  # fmt: skip
        """Logits of rows, and the tokens that follow them; None where it has to be run plainly.

        A token with a source takes its id from that row of the step before. Where the first layers
        are elsewhere, x is what comes from them.
        """
        if len(tokens) > MOST_TOKENS:
            return None
        key = self._key(tokens, positions, seq_rows, groups, rows, draws)
        if key is None:
            return None
        step = self._known.get(key)
        if step is None:
            step = self._known[key] = Captured(key, self._machine)
            while len(self._known) > _GRAPHS:
                self._known.popitem(last=False)
        elif step is not self._latest:
            self._known.move_to_end(key)
        self._latest = step
        try:
            columns = self._columns(key, tokens, positions, seq_rows, groups, rows, draws, sources)
            self._events.wait()
            step.stage.put(columns)
            if x is not None:
                self._x[: len(tokens)].copy_(values_of(x))
                if key.tokens > len(tokens):
                    self._x[len(tokens) : key.tokens].zero_()
            end = None if self._machine.interpreted else self.clock.start(len(tokens))
            self._replay(step, groups)
        except BaseException:
            self._broken(key, draws)
            raise
        if end is not None:
            end.record()
        assert step.logits is not None
        return step.logits, Drawn(*step.stage.launched(len(rows)), self._events.record())

    def forget(self) -> bool:
        """Lets go of everything that was recorded, and of what it holds; False if nothing was."""
        known = any(step.graph is not None for step in self._known.values())
        if not self._machine.interpreted:
            wait(self._machine.device)  # one of them may be under way
        self._known.clear()
        self._latest = self._pool = None
        return known

    def _key(
        self, tokens: Int32, positions: Int32, seq_rows: Int32, groups: Mapping[str, Group],
        rows: Int32, draws: Sequence[Draw | None],
    ) -> Key | None:  # fmt: skip
        n_tokens = rounded(len(tokens))
        shapes: list[tuple[str, PageShape | StateShape]] = []
        for name, group in groups.items():
            if group.recurrent:
                own = state_shape(group.view, seq_rows)
                # What fills a step up is a sequence too.
                seqs = n_tokens if own.seqs == own.tokens else rounded(own.seqs + 1)
                shapes.append((name, StateShape(n_tokens, seqs, own.single)))
                continue
            if group.view.slot_positions is not None:
                return None
            shape = shape_of(group.view, positions)
            seqs = n_tokens if shape.single else rounded(shape.seqs)
            pages = power_of_two(shape.pages, 32)
            size = shape.page_tokens, shape.page_bytes, shape.single, 0
            shapes.append((name, PageShape(n_tokens, seqs, pages, *size)))
        choice = Choice.of(draws)
        every_row = len(rows) == len(tokens)
        return Key(n_tokens, rounded(len(rows)), every_row, tuple(shapes), choice)

    def _columns(
        self, key: Key, tokens: Int32, positions: Int32, seq_rows: Int32,
        groups: Mapping[str, Group], rows: Int32,
        draws: Sequence[Draw | None], sources: Int32 | None,
    ) -> list[NDArray[Any]]:  # fmt: skip
        wanted = np.zeros(key.rows, np.int32)
        wanted[: len(rows)] = rows
        ids, from_last = np.zeros((2, key.tokens), np.int32)
        ids[: len(tokens)] = tokens
        from_last[: len(tokens)] = -1 if sources is None else sources
        from_last[len(tokens) :] = -1
        at = filled(positions, key.tokens)
        follows = None if sources is None else sources[rows]
        columns = columns_of(
            self._machine, draws, key.choice, key.rows, self._model.n_vocab, follows
        )
        columns += [wanted, ids, from_last, at]
        for name, shape in key.groups:
            view = groups[name].view
            if isinstance(shape, StateShape):
                columns += state_columns(view, seq_rows, shape)
            else:
                columns += page_columns(view, positions, seq_rows, shape)
        return columns

    def _broken(self, key: Key, draws: Sequence[Draw | None]) -> None:
        """A step broke off, nobody knows where: it is made anew, and tokens are counted anew."""
        if not self._machine.interpreted:
            wait(self._machine.device)  # the last one may be under way
        self._known.pop(key, None)
        for draw in draws:
            if draw is not None:
                sampler_of(draw.sampler).recount()

    def _replay(self, step: Captured, groups: Mapping[str, Group]) -> None:
        step.seen += 1
        self.replayed = step.graph is not None
        if step.graph is not None:
            step.graph.replay()
            return
        if step.seen == 1 or self._machine.interpreted:
            self._body(step, groups)
            return
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            self._body(step, groups)
        self._pool = self._pool or graph.pool()
        step.graph = graph
        graph.replay()

    def _body(self, step: Captured, groups: Mapping[str, Group]) -> None:
        """What a graph holds."""
        model, ops = self._model, self._ops
        step.stage.take()
        columns, choice = step.columns(), step.key.choice
        n_given = len(choice.sizes(1))
        chances, edits = choice.given(columns[:n_given])
        wanted, ids, sources, positions, *rest = columns[n_given:]
        n_tokens = step.key.tokens
        tokens = self._machine.empty(n_tokens, dtype=torch.int32)
        kernels.follow[(1,)](
            ids, sources, self._last, tokens, n_tokens, BLOCK=power_of_two(n_tokens, 32)
        )
        made, at = {}, 0
        for name, shape in step.key.groups:
            group, columns = groups[name], rest[at : at + len(shape.sizes)]
            at += len(shape.sizes)
            pages: Any
            if isinstance(shape, StateShape):
                pages = CudaStates(state_places(group.view, *group.bases), shape, columns)
            else:
                pages = Paged(group.bases[0], shape, columns)
            made[name] = GroupPages(pages, group.offsets)
        batch = Batch(cast(Any, OnDevice(tokens)), cast(Any, OnDevice(positions)), made)
        x = ops.new(self._x[:n_tokens].clone()) if self._first else model.embed(batch)
        x = model.run(x, batch, self._first, model.n_layers, ops)
        if not step.key.every_row:
            x = ops.take_rows(x, OnDevice(wanted))
        step.logits = model.logits(x)
        self._choose(step, chances, edits)

    def _choose(self, step: Captured, chances: Rows | None, edits: Edits | None) -> None:
        """Tokens behind all rows, and what is told of them."""
        choice, logits = step.key.choice, values_of(cast(Array, step.logits))
        assert logits.shape[1] == self._model.n_vocab
        x = logits
        if edits is not None:
            if choice.told >= 0:  # what is told is of the model's own logits
                x = logits.clone()
            edit(x, edits, self._last)
        drawing(self._machine, x, choice, chances, self._last)
        told = None
        if choice.told >= 0:
            told = report(self._machine, logits, self._last, choice.told)
        step.stage.give(self._last, told)


def rounded(n: int) -> int:
    """The next number of tokens that steps are captured for."""
    return _STEPS[bisect_left(_STEPS, n)]
