"""What passes between the host and a GPU that computes behind its back: integers, and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from quire.ops import Int32
from quire.ops.cuda.kernels import rows as kernels
from quire.ops.cuda.machine import Machine, power_of_two

_PROMPT = 32  # tokens of a step that tell how fast prompts are


class Drawn:
    """The tokens that a step chooses: -1 where a row allows none, -2 where it is not numbers."""

    def __init__(self, ids: torch.Tensor, n: int, stage: Stage) -> None:
        self._ids, self._event = stage.fetch(ids[:n])
        self._n = n

    def read(self) -> Int32:
        """Waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        found: Int32 = self._ids.numpy()[: self._n].copy()
        return found


class Clock:
    """How long prompts take by the GPU's own clock; nobody waits for it."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._under_way = 0  # tokens of the step that is measured

    def start(self, n_tokens: int) -> torch.cuda.Event | None:
        """Before a step; what tells when it ends, where it is to be measured."""
        if self._under_way and self._events is not None:
            begin, end = self._events
            if not end.query():
                return None
            now = begin.elapsed_time(end) / 1e3 / self._under_way
            self.seconds_per_token = (self.seconds_per_token or now) * 0.7 + now * 0.3
            self._under_way = 0
        if n_tokens < _PROMPT:
            return None
        if self._events is None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events = begin, end
        begin, end = self._events
        begin.record()
        self._under_way = n_tokens
        return end


class Stage:
    """Pinned memory that integers pass through, to the GPU and back, while it computes.

    Kernels copy: between two graphs they take a tenth of what the copy engines' hand-over does.
    """

    _DEPTH = 4

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._up: list[tuple[torch.Tensor, torch.cuda.Event] | None] = [None] * self._DEPTH
        self._down: list[torch.Tensor | None] = [None] * self._DEPTH
        self._turn = 0

    def put(self, columns: Sequence[NDArray[Any]], into: torch.Tensor) -> None:
        """Columns, one behind the other, into a block of integers."""
        if self._machine.interpreted:
            into.copy_(torch.from_numpy(_joined(columns, np.empty(len(into), np.int32))))
            return
        size = into.numel()
        self._turn = (self._turn + 1) % self._DEPTH
        held = self._up[self._turn]
        if held is not None:
            held[1].synchronize()
        if held is None or held[0].numel() < size:
            room = power_of_two(size, 1 << 14)
            held = torch.empty(room, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
            self._up[self._turn] = held
        pinned, event = held
        _joined(columns, pinned.numpy())
        _carry(pinned, into, size)
        event.record()

    def fetch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy of ids on the host, which is there when the event has come."""
        if self._machine.interpreted:
            return ids.clone(), None
        held = self._down[self._turn]
        if held is None or len(held) < len(ids):
            held = torch.empty(max(len(ids), 512), dtype=torch.int32, pin_memory=True)
            self._down[self._turn] = held
        event = torch.cuda.Event()
        _carry(ids, held, len(ids))
        event.record()
        return held, event


def _carry(source: torch.Tensor, target: torch.Tensor, n: int) -> None:
    kernels.carry[(triton.cdiv(n, 1024),)](source, target, n, BLOCK=1024)


def _joined(columns: Sequence[NDArray[Any]], into: NDArray[np.int32]) -> NDArray[np.int32]:
    at = 0
    for column in columns:
        flat = column.reshape(-1).view(np.int32)
        into[at : at + len(flat)] = flat
        at += len(flat)
    return into
