"""Runs a model over what a step has reserved."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from quire.engine.scheduler import Plan
from quire.memory.interface import Lease, PageView
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

    def forward(self, plan: Plan, lease: Lease) -> Array:
        """Logits of the rows that the plan wants."""
        start = perf_counter()
        logits = self.forward_rows(lease, plan.wanted_rows())
        if len(lease.tokens) >= _PROMPT:
            now = (perf_counter() - start) / len(lease.tokens)
            self.seconds_per_token = (self.seconds_per_token or now) * 0.7 + now * 0.3
        return logits

    def forward_rows(self, lease: Lease, rows: Any) -> Array:
        """Logits of these rows of the step."""
        groups = {
            name: GroupPages(self._handle(view, lease), view.offsets)
            for name, view in lease.views.items()
        }
        self.tokens_run += len(lease.tokens)
        batch = Batch(lease.tokens, lease.positions, groups)
        x = self.model.embed(batch)
        self.model.run(x, batch, 0, self.model.n_layers)
        return self.model.logits(self.ops.take_rows(x, rows))

    def _handle(self, view: PageView | StateView, lease: Lease) -> Pages | States:
        """A group's memory as this device's kernels take it."""
        if view.layout.spec.kind == "recurrent":
            return self.ops.states(view, lease.seq_rows)
        return self.ops.pages(view, lease.positions, lease.seq_rows)
