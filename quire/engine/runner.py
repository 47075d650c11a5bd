"""Runs a model over what a step has reserved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

from quire.devices.device import Device
from quire.engine.draft_in_step import DraftedInStep, Line, draft_in_step
from quire.engine.generation import Generation
from quire.engine.plan import Plan
from quire.errors import RequestError
from quire.memory.batch import MicroBatch
from quire.memory.lease import Lease
from quire.models.registry import Model
from quire.ops import Array, Draw, Drawn, Int32, Ops, Refused
from quire.ops.batch import Batch, cross

_PROMPT = 32  # tokens of a step that tell how fast prompts are


@contextmanager
def for_callers() -> Iterator[None]:
    """What a device refuses becomes an error that callers know."""
    try:
        yield
    except Refused as error:
        raise RequestError(f"the device refused it: {error}") from error


class Forward(NamedTuple):
    """What came of a step's layers."""

    logits: Array
    drawn: Drawn | None
    """The tokens that follow, where the device has chosen them too."""


class Runner:
    """A model on its devices; `elsewhere` says which groups are not on the first of them."""

    def __init__(
        self, model: Model, *devices: Device, elsewhere: Mapping[str, Device] | None = None
    ) -> None:
        self.model = model
        self.devices = devices
        self.device = devices[0]
        self.ops: Ops = model.ops
        self._elsewhere = dict(elsewhere or {})
        self._seconds_per_token = 0.0
        self.tokens_run = 0  # through the layers, so far
        self.drafted: DraftedInStep | None = None  # how drafts within the last such step went
        # The first device may run whole steps by itself, or what is left of them from a layer on.
        self._first = model.first_of(self.ops) if len(devices) > 1 else 0
        self._before = model.groups_before(self._first)
        self.flies = len(devices) == 1
        """Whether a step may be launched before the tokens of the last are read."""
        rest = self._first < model.n_layers
        self.steps = self.device.steps(model, self._first) if rest else None

    def close(self) -> None:
        """Lets go of the weights, of what the device keeps for steps, and of its arrays."""
        self.steps = None
        self.model.close()
        for device in self.devices:
            device.ops.trim()

    def forget(self) -> bool:
        """Lets go of steps that the device has recorded; False where it has none."""
        return self.steps is not None and self.steps.forget()

    @property
    def seconds_per_token(self) -> float:
        """Of a prompt; 0 before one was computed.

        Where others compute the first layers, the slower of the two decides: they are at one chunk
        of a prompt while the first device is at the one before.
        """
        measured = self.steps.seconds_per_token if self.steps else 0.0
        if self._first:
            return max(measured, self._seconds_per_token)
        return measured or self._seconds_per_token

    def launch(self, plan: Plan, lease: Lease, sources: Int32 | None = None) -> Forward:
        """Logits of the rows that the plan wants, and what follows them where that is chosen.

        With sources, tokens are those that the step before chose for these rows.
        """
        if self.steps is None or plan.exit_after:
            return Forward(self.forward(plan, lease), None)
        ubatch = lease.ubatch
        self._work(ubatch)
        ahead = 0 if sources is None else 1
        draws: list[Draw | None] = []
        for entry in plan.entries:
            if entry.ends:
                draws += [_draw(entry.sequence.generation, ahead)] * (1 + len(entry.draft))
        rows = plan.wanted_rows()
        draws += [None] * (len(rows) - len(draws))
        x, views = None, ubatch.views
        if self._first:
            x = self._enter(ubatch)
            views = {name: view for name, view in views.items() if self._here(name)}
        found = self.steps.run(
            ubatch.tokens, ubatch.positions, ubatch.seq_rows, views, rows, draws, sources, x
        )
        if found is None:
            assert sources is None, "a step that follows another has its shape"
            return Forward(self.forward(plan, lease), None)
        self.tokens_run += len(ubatch.tokens)
        return Forward(*found)

    def _here(self, group: str) -> bool:
        """Whether a group is on the first device."""
        return self._elsewhere.get(group, self.device) is self.device

    def _enter(self, ubatch: MicroBatch) -> Array:
        """What the layers that are elsewhere make of the tokens, on the first device."""
        start = perf_counter()
        batch = self._batch(ubatch, self._before)
        x = self.model.run(self.model.embed(batch), batch, 0, self._first)
        if len(ubatch.tokens) >= _PROMPT:
            self._timed(perf_counter() - start, len(ubatch.tokens))
        return cross(x, self.model.ops_after[self._first], self.ops)

    def _timed(self, seconds: float, n_tokens: int) -> None:
        """Notes how long a prompt took."""
        now = seconds / n_tokens
        self._seconds_per_token = (self._seconds_per_token or now) * 0.7 + now * 0.3

    def forward(self, plan: Plan, lease: Lease) -> Array:
        """Logits of the rows that the plan wants."""
        start = perf_counter()
        rows = plan.wanted_rows()
        if plan.exit_after:
            x = self._with_exit(plan, lease, rows)
        else:
            x = self.run(lease.ubatch, rows=rows)
        logits = self._logits(x, self.model.ops_after[-1])
        if len(lease.ubatch.tokens) >= _PROMPT:
            self._timed(perf_counter() - start, len(lease.ubatch.tokens))
        return logits

    def forward_rows(self, lease: Lease, rows: Any) -> Array:
        """Logits of these rows of the step."""
        return self._logits(self.run(lease.ubatch, rows=rows), self.model.ops_after[-1])

    def logits(self, x: Array, rows: Any, after: int) -> Array:
        """The output of some rows after so many layers."""
        ops = self.model.ops_after[after]
        return self._logits(ops.take_rows(x, rows), ops)

    def _logits(self, x: Array, ops: Ops) -> Array:
        return self.model.logits(x if ops is self.ops else cross(x, ops, self.ops))

    def rows(self, x: Array, rows: Any) -> Array:
        """Some rows after all layers, on the output's device."""
        ops = self.model.ops_after[-1]
        return cross(ops.take_rows(x, rows), ops, self.ops)

    def run(self, ubatch: MicroBatch, stop: int | None = None, rows: Int32 | None = None) -> Array:
        """Tokens through the first `stop` layers, or all; of all rows, or those that are wanted."""
        self.tokens_run += len(ubatch.tokens)
        batch = self._batch(ubatch)
        x = self.model.embed(batch)
        stop = self.model.n_layers if stop is None else stop
        return self.model.run(x, batch, 0, stop, rows=rows)

    def _with_exit(self, plan: Plan, lease: Lease, rows: Int32) -> Array:
        """The first layers one draft token after the other, then the others over all of them."""
        lines = [
            Line(row, len(entry.draft), entry.sequence.generation)
            for row, entry in enumerate(plan.entries)
            if entry.exits and entry.sequence.generation
        ]
        self.drafted = draft_in_step(self, lease.ubatch, lines, plan.exit_after)
        x = self.model.ops_after[plan.exit_after].array(self.drafted.hidden)
        batch = self._batch(lease.ubatch)
        return self.model.run(x, batch, plan.exit_after, self.model.n_layers, rows=rows)

    def _batch(self, ubatch: MicroBatch, only: set[str] | None = None) -> Batch:
        """What a model sees, of all groups or some, once what its pages need is done."""
        self._work(ubatch)
        groups = {}
        for name, view in ubatch.views.items():
            if only is not None and name not in only:
                continue
            device = self._elsewhere.get(name, self.device)
            groups[name] = device.group(name, view, ubatch.positions, ubatch.seq_rows)
        return Batch(ubatch.tokens, ubatch.positions, groups)

    def _work(self, ubatch: MicroBatch) -> None:
        """Does what pages need before the layers run."""
        if ubatch.work:
            for device in self.devices:
                device.run(ubatch.work)
            ubatch.work.clear()


def _draw(generation: Generation | None, ahead: int) -> Draw | None:
    """How the token behind a row is chosen, where the device can do so."""
    if generation is None or not generation.plain:
        return None
    uniform = generation.uniform(ahead) if generation.random else 0.0
    return Draw(generation.sampler, uniform, generation.sampling.logprobs)
