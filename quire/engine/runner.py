"""Runs a model over what a step has reserved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from quire.devices.device import Device
from quire.engine.draft_in_step import DraftedInStep, Line, draft_in_step
from quire.engine.plan import Plan
from quire.errors import RequestError
from quire.memory.batch import MicroBatch
from quire.memory.lease import Lease
from quire.models.registry import Model
from quire.ops import Array, Ops, Refused
from quire.ops.batch import Batch

_PROMPT = 32  # tokens of a step that tell how fast prompts are


@contextmanager
def for_callers() -> Iterator[None]:
    """What a device refuses becomes an error that callers know."""
    try:
        yield
    except Refused as error:
        raise RequestError(f"the device refused it: {error}") from error


class Runner:
    """A model on one device."""

    def __init__(self, model: Model, device: Device) -> None:
        self.model = model
        self.device = device
        self.ops: Ops = device.ops
        self.seconds_per_token = 0.0  # of a prompt; 0 before one was computed
        self.tokens_run = 0  # through the layers, so far
        self.drafted: DraftedInStep | None = None  # how drafts within the last such step went

    def forward(self, plan: Plan, lease: Lease) -> Array:
        """Logits of the rows that the plan wants."""
        start = perf_counter()
        x = self._with_exit(plan, lease) if plan.exit_after else self.run(lease.ubatch)
        logits = self.model.logits(self.ops.take_rows(x, plan.wanted_rows()))
        n_tokens = len(lease.ubatch.tokens)
        if n_tokens >= _PROMPT:
            now = (perf_counter() - start) / n_tokens
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
        self.drafted = draft_in_step(self, lease.ubatch, lines, plan.exit_after)
        x = self.ops.array(self.drafted.hidden)
        self.model.run(x, self._batch(lease.ubatch), plan.exit_after, self.model.n_layers)
        return x

    def _batch(self, ubatch: MicroBatch) -> Batch:
        """What a model sees, once what its pages need is done."""
        device = self.device
        if ubatch.work:
            device.run(ubatch.work)
            ubatch.work.clear()
        groups = {}
        for name, view in ubatch.views.items():
            groups[name] = device.group(name, view, ubatch.positions, ubatch.seq_rows)
        return Batch(ubatch.tokens, ubatch.positions, groups)
