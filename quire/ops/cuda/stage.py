"""What passes between the host and a GPU that computes behind its back: integers, and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from quire.ops import Float32, Int32
from quire.ops.cuda.drawing import reported
from quire.ops.cuda.kernels import rows as kernels
from quire.ops.cuda.machine import Machine, power_of_two

_PROMPT = 32  # tokens of a step that tell how fast prompts are
_EVERY = 8  # one of so many is measured


DEPTH = 4
"""Slots of a ring: launches after which one comes again. The host is two of them ahead at most."""


class Drawn:
    """The tokens that a step chooses: -1 where a row allows none, -2 where it is not numbers."""

    def __init__(self, ids: Int32, report: Int32, event: torch.cuda.Event | None) -> None:
        self._ids, self._report, self._event = ids, report, event

    def read(self) -> Int32:
        """Waits until they are there; before the slot comes again."""
        if self._event is not None:
            self._event.synchronize()
        return self._ids.copy()

    def logprobs(self, row: int, top: int) -> tuple[float, Int32, Float32]:
        """Of a row that asked for them, once they were read; before the slot comes again."""
        chosen, ids, values = reported(self._report[row : row + 1])
        return float(chosen[0]), ids[0, :top], values[0, :top]


class Events:
    """When launches have ended: a ring of events, since making and dropping one takes long."""

    def __init__(self, machine: Machine) -> None:
        self._ring = None if machine.interpreted else [torch.cuda.Event() for _ in range(DEPTH)]
        self._turn = 0

    def wait(self) -> None:
        """Until the launch has ended whose slots come again."""
        if self._ring is not None:
            self._ring[self._turn].synchronize()

    def record(self) -> torch.cuda.Event | None:
        """The end of a launch."""
        if self._ring is None:
            return None
        event = self._ring[self._turn]
        event.record()
        self._turn = (self._turn + 1) % DEPTH
        return event


class Clock:
    """How long prompts take by the GPU's own clock; nobody waits for it."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._under_way = 0  # tokens of the step that is measured
        self._left_out = 0  # prompts since one was measured

    def start(self, n_tokens: int) -> torch.cuda.Event | None:
        """Before a step; what tells when it ends, where it is to be measured."""
        if self._under_way and self._events is not None:
            begin, end = self._events
            if not end.query():
                return None
            now = begin.elapsed_time(end) / 1e3 / self._under_way
            self.seconds_per_token = (self.seconds_per_token or now) * 0.7 + now * 0.3
            self._under_way = 0
        self._left_out += n_tokens >= _PROMPT
        if n_tokens < _PROMPT or 1 < self._left_out <= _EVERY:
            return None
        self._left_out = 1
        if self._events is None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events = begin, end
        begin, end = self._events
        begin.record()
        self._under_way = n_tokens
        return end


class Stage:
    """Pinned memory that integers of one shape of step pass through, to the GPU and back.

        host     slot 0 | slot 1 | slot 2 | slot 3           slot 0 | slot 1 | slot 2 | slot 3
        GPU         └─ take ─▶ block ─▶ … ─▶ ids ─ give ─────────┘     next time, slot 1

    The kernels that copy are in the step's graph, so nothing else is launched; which slot it is,
    the GPU counts for itself.
    """

    def __init__(self, machine: Machine, size: int, rows: int, report: int = 0) -> None:
        """For so many integers up; rows of one integer, and a report of some, come back."""

        def integers(n: int, pinned: bool = False) -> torch.Tensor:
            where = None if pinned else machine.device
            pin = pinned and not machine.interpreted
            return torch.zeros(n, dtype=torch.int32, device=where, pin_memory=pin)

        self.block = integers(size)
        self._rows, self._size = rows, rows * (1 + report)
        self._turns = integers(1)
        self._up, self._down = integers(DEPTH * size, True), integers(DEPTH * self._size, True)
        self._slots = self._up.numpy().reshape(DEPTH, size)
        found: Int32 = self._down.numpy().reshape(DEPTH, self._size)
        self._ids, self._reports = found[:, :rows], found[:, rows:].reshape(DEPTH, rows, report)
        self._turn = 0

    def put(self, columns: Sequence[NDArray[Any]]) -> None:
        """Columns, one behind the other, into the slot that the next launch takes."""
        slot, at = self._slots[self._turn], 0
        for column in columns:
            flat = column.reshape(-1).view(np.int32)
            slot[at : at + len(flat)] = flat
            at += len(flat)

    def take(self) -> None:
        """Fills the block; the first kernel of a step."""
        n = self.block.numel()
        kernels.take[(triton.cdiv(n, 1024),)](self._up, self._turns, self.block, n, BLOCK=1024)

    def give(self, ids: torch.Tensor, report: torch.Tensor | None = None) -> None:
        """Hands ids over, and what is told of them; the last kernels of a step."""
        if report is not None:
            n = report.numel()
            kernels.tell[(triton.cdiv(n, 1024),)](
                report, self._down, self._turns, n, self._rows, BLOCK=1024
            )
        kernels.give[(1,)](
            ids, self._down, self._turns, self._rows, self._size, DEPTH=DEPTH,
            BLOCK=power_of_two(self._rows, 32),
        )  # fmt: skip

    def launched(self, n: int) -> tuple[Int32, Int32]:
        """Where the first n ids of the launch before will be, and the report of them."""
        turn, self._turn = self._turn, (self._turn + 1) % DEPTH
        return self._ids[turn, :n], self._reports[turn, :n]
