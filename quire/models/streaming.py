"""Long prompts may run products of the host's layers on a GPU, their weights streamed there.

    thread    pack 1        | pack 2        | …       from the file, into one of two rooms
    host      recall 0      | recall 1      | …       attention, recurrences
    GPU       enter 0  leave 0  network 0  enter 1  …

A layer's matrices are packed on the GPU from the file and used for one step, while the next ones
are on their way; the first ones follow the last, so that they are there when a prompt goes on. What
reads memory stays where that is. Which way is faster is measured: the time that a row takes on the
host, against the time of matrices that come and go, memory aside. Results of a GPU are rounded
otherwise than a CPU's, so this is for who does without `exact_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any

from quire.errors import QuireError
from quire.models.ends import Ends
from quire.models.layers import Mixer, Network
from quire.models.loader import Kit
from quire.ops import Array, Ops
from quire.ops.batch import GroupPages, cross
from quire.ops.passing import ROOMS, Passage

LEAST = 64
"""Rows of a step that may be worth it, and tell how fast each way is."""
_FADING = 0.98  # what was measured long ago is tried again: it was another time
Made = tuple[Ends | None, Network | None]
"""What is streamed of a layer: the ends of its mixer, its network, or both."""


class Streaming:
    """What of a model is on the host, and the GPU that its products may be run on."""

    def __init__(
        self, kit: Kit, host: Ops, passage: Passage, begins: Callable[[], None]
    ) -> None:  # fmt: skip
        """The kit packs into the passage; `begins` is called before that is done first."""
        self.host, self.ops = host, passage.ops
        self._kit, self._passage, self._begins = kit, passage, begins
        self._parts: list[Made] = []
        self._next: tuple[int, Future[Made]] | None = None
        self._room = 0  # that is used; the next one is filled
        self._thread = ThreadPoolExecutor(1, "quire-streaming")
        self._stopped = False
        self.runs = 0
        """Layers that were streamed so far."""
        self.host_s = 0.0
        """Seconds of a row on the host; 0 before it was measured."""
        self.gpu_s = 0.0
        """Seconds of a layer that is streamed, with all its rows."""
        self._trust = 1.0  # in that figure: it fades while the host is taken

    def layer(self, mixer: Any, network: Network | None) -> tuple[Mixer, Network | None]:
        """A layer whose products may be run on the GPU, as far as they are on the host."""
        if mixer.ops is self.host and (network is None or self._mine(network)):
            self._parts.append((mixer.ends, network))
            return StreamedLayer(self, mixer, network, len(self._parts) - 1), None
        return mixer, network.streamed(self) if network else None

    def wrap(self, network: Network) -> Network:
        """A network that may be run on the GPU, if all of it is on the host."""
        if not self._mine(network):
            return network
        self._parts.append((None, network))
        return Streamed(self, network, len(self._parts) - 1)

    def _mine(self, network: Network) -> bool:
        return all(ops is self.host for ops in network.ops_within)

    def worth(self, rows: int) -> bool:
        """Whether so many rows are sooner done on the GPU, as far as is known."""
        if rows < LEAST or not self.host_s or self._stopped:
            return False
        return self.gpu_s * self._trust < self.host_s * rows

    def measured(self, rows: int, seconds: float, on_gpu: bool) -> None:
        """Notes how long a layer took."""
        if on_gpu:
            self.runs += 1
            if self.runs > 1:  # the first one compiles
                self.gpu_s = min(seconds, _smooth(self.gpu_s, seconds))
                self._trust = 1.0
        elif rows >= LEAST:
            self.host_s = _smooth(self.host_s, seconds / rows)
            self._trust *= _FADING

    def take(self, at: int) -> Made | None:
        """What is on the GPU then; what is behind it is sent for. None, for good, if that fails."""
        try:
            return self._taken(at)
        except (QuireError, OSError, MemoryError):  # a file that was cut: the host has its weights
            self._stopped, self._next = True, None
            return None

    def use(self) -> AbstractContextManager[None]:
        """What is computed with what was taken last is computed within."""
        return self._passage.use(self._room)

    def _taken(self, at: int) -> Made:
        if not self.runs:
            self._begins()
        if self._next is None or self._next[0] != at:
            self._drop()
            self._next = at, self._send(at)
        found = self._next[1].result()
        self._room = (self._room + 1) % ROOMS
        behind = (at + 1) % len(self._parts)
        self._next = behind, self._send(behind)
        return found

    def _send(self, at: int) -> Future[Made]:
        room, (ends, network) = (self._room + 1) % ROOMS, self._parts[at]

        def make() -> Made:
            kit = self._kit
            return ends.again(kit) if ends else None, network.again(kit) if network else None

        return self._thread.submit(partial(self._passage.fill, room, make))

    def _drop(self) -> None:
        if self._next is not None:
            wait([self._next[1]])  # it may be half there
            self._next = None

    def close(self) -> None:
        """Waits for what is on its way, and lets go of everything."""
        self._drop()
        self._thread.shutdown()
        self._passage.close()
        self._parts.clear()


class StreamedLayer:
    """A layer on the host whose longer batches may have their products computed on the GPU."""

    def __init__(
        self, streaming: Streaming, mixer: Any, network: Network | None, at: int
    ) -> None:  # fmt: skip
        self._streaming, self._mixer, self._network, self._at = streaming, mixer, network, at
        self.layer, self.group, self.rope = mixer.layer, mixer.group, mixer.rope
        self.ops: Ops = mixer.ops
        self.nbytes: int = mixer.nbytes
        self.declare = mixer.declare

    def add_to(self, x: Array, memory: GroupPages, rope: Array | None) -> Array:
        """x after the layer, wherever that is sooner done."""
        s, rows, start = self._streaming, x.shape[0], perf_counter()
        if s.worth(rows) and (there := s.take(self._at)):
            with s.use():
                x = cross(x, s.host, s.ops)
                x, recalled = self._run(x, *there, s.ops, memory, rope)
                x = cross(x, s.ops, s.host)
            s.measured(rows, perf_counter() - start - recalled, on_gpu=True)
        else:
            x, recalled = self._run(x, self._mixer.ends, self._network, s.host, memory, rope)
            s.measured(rows, perf_counter() - start - recalled, on_gpu=False)
        return x

    def _run(
        self, x: Array, ends: Ends | None, network: Network | None, ops: Ops, memory: GroupPages,
        rope: Array | None,
    ) -> tuple[Array, float]:  # fmt: skip
        """With products on one device, and memory on the host: x, and seconds of the latter."""
        assert ends is not None
        host = self._streaming.host
        y, kept = ends.enter(x)
        y = cross(y, ops, host)
        start = perf_counter()
        y = self._mixer.recall(y, memory, rope)
        recalled = perf_counter() - start
        ends.leave(x, cross(y, host, ops), kept)
        return (network.add_to(x) if network else x), recalled


class Streamed:
    """A network on the host whose longer batches may go to the GPU and back."""

    def __init__(self, streaming: Streaming, network: Network, at: int) -> None:
        self._streaming, self._network, self._at = streaming, network, at
        self.ops: Ops = network.ops
        self.part_bytes: Mapping[str, int] = network.part_bytes
        self.ops_within: Sequence[Ops] = network.ops_within

    def add_to(self, x: Array) -> Array:
        """x + network(norm(x)), wherever that is sooner done."""
        s, rows, start = self._streaming, x.shape[0], perf_counter()
        if s.worth(rows) and (made := s.take(self._at)):
            there = made[1]
            assert there is not None
            with s.use():
                x = cross(there.add_to(cross(x, s.host, s.ops)), s.ops, s.host)
            s.measured(rows, perf_counter() - start, on_gpu=True)
        else:
            x = self._network.add_to(x)
            s.measured(rows, perf_counter() - start, on_gpu=False)
        return x

    def again(self, kit: Kit) -> Network:
        """The same on another device."""
        return self._network.again(kit)

    def streamed(self, streaming: Streaming) -> Network:
        """It is already."""
        return self


def _smooth(before: float, now: float) -> float:
    return (before or now) * 0.7 + now * 0.3
