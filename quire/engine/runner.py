"""Runs a model over what a step has reserved."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from quire.engine.scheduler import Plan
from quire.engine.walk import Line, Walked, walk
from quire.memory.interface import Lease, MicroBatch, PageView
from quire.memory.state_layout import StateView
from quire.models.registry import Model
from quire.ops import Array, Ops, Pages, States
from quire.ops.batch import Batch, GroupPages

_PROMPT = 32  # tokens of a step that tell how fast prompts are


class Runner:
    """A model on one device."""

    def __init__(self, model: Model, ops: Ops) -> None:
        self.model = model
        self.ops = ops
        self.seconds_per_token = 0.0  # of a prompt; 0 before one was computed
        self.tokens_run = 0  # through the layers, so far
        self.walked: Walked | None = None  # how drafts within the last such step went

    def forward(self, plan: Plan, lease: Lease) -> Array:
        """Logits of the rows that the plan wants."""
        start = perf_counter()
        x = self._with_exit(plan, lease) if plan.exit_after else self.run(lease.ubatch)
        logits = self.model.logits(self.ops.take_rows(x, plan.wanted_rows()))
        if len(lease.tokens) >= _PROMPT:
            now = (perf_counter() - start) / len(lease.tokens)
            self.seconds_per_token = (self.seconds_per_token or now) * 0.7 + now * 0.3
        return logits

    def forward_rows(self, lease: Lease, rows: Any) -> Array:
        """Logits of these rows of the step."""
        return self.model.logits(self.ops.take_rows(self.run(lease.ubatch), rows))

    def run(self, ubatch: MicroBatch, stop: int | None = None) -> Array:
        """Tokens through the first `stop` layers, or all."""
        self.tokens_run += len(ubatch.tokens)
        batch = self._batch(ubatch)
        x = self.model.embed(batch)
        self.model.run(x, batch, 0, self.model.n_layers if stop is None else stop)
        return x

    def _with_exit(self, plan: Plan, lease: Lease) -> Array:
        """The first layers one draft token after the other, then the others over all of them."""
        lines = [
            Line(row, len(entry.draft), entry.sequence.generation)
            for row, entry in enumerate(plan.entries)
            if entry.exits and entry.sequence.generation
        ]
        self.walked = walk(self, lease.ubatch, lines, plan.exit_after)
        x = self.ops.array(self.walked.hidden)
        self.model.run(x, self._batch(lease.ubatch), plan.exit_after, self.model.n_layers)
        return x

    def _batch(self, ubatch: MicroBatch) -> Batch:
        groups = {
            name: GroupPages(self._handle(view, ubatch), view.offsets)
            for name, view in ubatch.views.items()
        }
        return Batch(ubatch.tokens, ubatch.positions, groups)

    def _handle(self, view: PageView | StateView, ubatch: MicroBatch) -> Pages | States:
        """A group's memory as this device's kernels take it."""
        if view.layout.spec.kind == "recurrent":
            return self.ops.states(view, ubatch.seq_rows)
        return self.ops.pages(view, ubatch.positions, ubatch.seq_rows)
