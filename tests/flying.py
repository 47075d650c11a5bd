"""The host as a device that runs whole steps by itself, so that their tokens are read late.

What a GPU does with graphs, without one: the engine launches the next step before it reads the
tokens of the last, and logits are gone as soon as the next step runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from quire.devices.device import Draws, Int32
from quire.devices.host import HostDevice
from quire.ops import Array, Drawn, Float32, Ops, Refused
from quire.ops.batch import Batch

Report = tuple[float, Int32, Float32]


class Late:
    """Tokens that were chosen, and who has them until they are read."""

    def __init__(self, steps: HostSteps, ids: Int32, reports: dict[int, Report]) -> None:
        self._steps, self._ids, self._reports = steps, ids, reports

    def read(self) -> Int32:
        """They are there."""
        return self._steps.read(self._ids)

    def logprobs(self, row: int, top: int) -> Report:
        """What was told of a row."""
        chosen, ids, values = self._reports[row]
        return chosen, ids[:top], values[:top]


def draw_all(
    ops: Ops, logits: Array, draws: Draws, before: Int32 | None
) -> tuple[Int32, dict[int, Report]]:
    """A token for each row that wants one, and what is told of it; a device never fails.

    `before` are the tokens that the step before drew for these rows, which no sampler has seen.
    """
    found, reports = np.full(len(draws), -1, np.int32), {}
    for row, draw in enumerate(draws):
        if draw is None:
            continue
        at = np.array([row], np.int32)
        unseen = np.empty(0, np.int32) if before is None else before[row : row + 1].clip(0)
        draw.sampler.observe(unseen)
        try:
            found[row] = ops.sample(logits, at, [draw.sampler], np.array([draw.uniform]))[0]
        except Refused:
            found[row] = -2 if np.isnan(ops.numpy(logits)[row]).any() else -1
        finally:
            draw.sampler.unobserve(unseen)
        if draw.top is not None and found[row] >= 0:
            one = ops.take_rows(logits, at)
            chosen, ids, values = ops.logprobs(one, found[row : row + 1], draw.top)
            reports[row] = float(chosen[0]), ids[0].copy(), values[0].copy()
    return found, reports


class HostSteps:
    """Whole steps on the host, or what follows the first layers."""

    seconds_per_token = 0.0
    replayed = False

    def __init__(self, device: HostDevice, model: Any, first: int) -> None:
        self._device, self._model, self._ops, self._first = device, model, device.ops, first
        self._last: Int32 = np.empty(0, np.int32)
        self._logits: Array | None = None
        self.followed = 0
        """Steps that took tokens of the one before."""

    def run(
        self, tokens: Int32, positions: Int32, seq_rows: Int32, views: Mapping[str, Any],
        rows: Int32, draws: Draws, sources: Int32 | None, x: Array | None = None,
    ) -> tuple[Array, Drawn] | None:  # fmt: skip
        """One step; what the last one left is overwritten."""
        if self._logits is not None:
            self._ops.numpy(self._logits)[:] = np.nan
        before = None
        if sources is not None:
            self.followed += 1
            before = self._last[sources[rows]]
            tokens = np.where(sources >= 0, self._last[sources], tokens).astype(np.int32)
            tokens = tokens.clip(0)  # where none was chosen, what follows is nobody's
        groups = {
            name: self._device.group(name, view, positions, seq_rows)
            for name, view in views.items()
        }
        batch = Batch(tokens, positions, groups)
        x = self._model.embed(batch) if x is None else x
        x = self._model.run(x, batch, self._first, self._model.n_layers)
        self._logits = logits = self._model.logits(self._ops.take_rows(x, rows))
        self._last, reports = self.draw(logits, draws, before)
        return logits, Late(self, self._last, reports)

    def forget(self) -> bool:
        """Nothing is recorded."""
        return False

    def read(self, ids: Int32) -> Int32:
        """What the host asks for late."""
        return ids

    def draw(
        self, logits: Array, draws: Draws, before: Int32 | None
    ) -> tuple[Int32, dict[int, Report]]:
        """Tokens of all rows."""
        return draw_all(self._ops, logits, draws, before)


@pytest.fixture
def flying(monkeypatch: pytest.MonkeyPatch) -> list[HostSteps]:
    """Every model that is loaded on the host runs whole steps by itself; the list has them."""
    made: list[HostSteps] = []

    def steps(self: HostDevice, model: Any, first: int = 0) -> HostSteps:
        made.append(HostSteps(self, model, first))
        return made[-1]

    monkeypatch.setattr(HostDevice, "steps", steps)
    return made
