"""Matrices that pass through a GPU, on a stream beside the one that computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops.cuda.machine import wait
from quire.ops.passing import PIECE, PIECES, ROOMS, Source

T = TypeVar("T")
_COPIERS = 4  # threads that fill a piece: one alone is slower than the bus
_LEAST = 1 << 18  # bytes that are worth one


class _Here:
    """Bytes that are in memory, to be read like those of a file."""

    def __init__(self, values: NDArray[np.uint8]) -> None:
        self._flat = values.reshape(-1)
        self.size = self._flat.size

    def read(self, start: int, into: NDArray[np.uint8]) -> None:
        """The bytes from one on, into an array."""
        np.copyto(into, self._flat[start : start + into.size])


class Ring:
    """Pinned pieces that bytes of the host pass through, each again when its copy has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
                        for _ in range(PIECES)]  # fmt: skip
        self._sent = [torch.cuda.Event() for _ in range(PIECES)]
        self._threads = ThreadPoolExecutor(_COPIERS, "quire-staging")
        self._turn = 0

    def upload(self, values: NDArray[np.uint8] | Source) -> torch.Tensor:
        """Bytes as a tensor of the device; they are copied on the current stream."""
        source = _Here(values) if isinstance(values, np.ndarray) else values
        found = torch.empty(source.size, dtype=torch.uint8, device=self._device)
        for at in range(0, source.size, PIECE):
            size = min(PIECE, source.size - at)
            piece, sent = self._pieces[self._turn], self._sent[self._turn]
            sent.synchronize()
            self._fill(piece.numpy()[:size], source, at)
            found[at : at + size].copy_(piece[:size], non_blocking=True)
            sent.record()
            self._turn = (self._turn + 1) % PIECES
        return found

    def _fill(self, into: NDArray[np.uint8], source: Source | _Here, start: int) -> None:
        step = max(-(-into.size // _COPIERS), _LEAST)
        cuts = [slice(at, min(at + step, into.size)) for at in range(0, into.size, step)]
        for _ in self._threads.map(lambda cut: source.read(start + cut.start, into[cut]), cuts):
            pass

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown()


class CudaPassage:
    """Two rooms of one GPU, and the stream that fills them.

    Whoever was packed lives as long as its room is not filled again: small arrays are taken on
    this stream too, and must not be taken again while the other one still reads them.
    """

    reads = True

    def __init__(self, ops: Any, n_bytes: int) -> None:
        machine = copy.copy(ops.machine)
        self.ops = copy.copy(ops)
        self.ops.machine = self._machine = machine
        self._size, self._device = n_bytes, machine.device
        self._stream = torch.cuda.Stream(self._device)
        self._filled, self._used = ([torch.cuda.Event() for _ in range(ROOMS)] for _ in "fu")
        self._rooms: list[torch.Tensor] = []
        self._here: list[object] = [None] * ROOMS

    def fill(self, room: int, make: Callable[[], T]) -> T:
        """Calls `make`, whose matrices go into the room."""
        with torch.cuda.stream(self._stream):
            try:
                self._take()
                self._stream.wait_event(self._used[room])
                self._here[room] = None
                self._machine.fill(self._rooms[room])
                self._here[room] = made = make()
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
            self._filled[room].record()
        return made

    def _take(self) -> None:
        if not self._rooms:
            self._machine.ring = Ring(self._device)
            self._rooms = [self._machine.empty(self._size, dtype=torch.uint8)
                           for _ in range(ROOMS)]  # fmt: skip

    @contextmanager
    def use(self, room: int) -> Iterator[None]:
        """What is computed within comes behind the filling of this room, and before the next."""
        now = torch.cuda.current_stream(self._device)
        now.wait_event(self._filled[room])
        try:
            yield
        finally:
            self._used[room].record(now)

    def close(self) -> None:
        """Gives everything back."""
        wait(self._device)
        if self._machine.ring is not None:
            self._machine.ring.close()
        self._machine.ring, self._rooms, self._here = None, [], [None] * ROOMS
        self._machine.fill(None)
