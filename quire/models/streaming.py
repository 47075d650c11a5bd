"""Long prompts may run networks of the host on a GPU, their weights streamed there.

    thread    pack 1        | pack 2        | …       from the file, into one of two rooms
    host      mixer 1       | mixer 2       | …
    GPU       network 0     | network 1     | …

A network is packed on the GPU from the file and used for one step, while the next one is on its
way: that which followed it before. So the first one is there when a prompt goes on, also where the
last is skipped, since nobody looks behind it. Mixers stay where their memory is. Which way is
faster is measured: the time that a row takes on the host, against the time of a network that comes
and goes. Results of a GPU are rounded otherwise than a CPU's, so this is for who does without
`exact_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter

from quire.errors import QuireError
from quire.models.layers import Network
from quire.models.loader import Kit
from quire.ops import Array, Ops
from quire.ops.batch import cross
from quire.ops.passing import ROOMS, Passage

LEAST = 64
"""Rows of a step that may be worth it, and tell how fast each way is."""
_FADING = 0.98  # what was measured long ago is tried again: it was another time


class Streaming:
    """The networks of a model that are on the host, and the GPU that they may be run on."""

    def __init__(
        self, kit: Kit, host: Ops, passage: Passage, begins: Callable[[], None]
    ) -> None:  # fmt: skip
        """The kit packs into the passage; `begins` is called before that is done first."""
        self.host, self.ops = host, passage.ops
        self._kit, self._passage, self._begins = kit, passage, begins
        self._networks: list[Network] = []
        self._next: tuple[int, Future[Network]] | None = None
        self._last = -1  # that was taken
        self._behind: dict[int, int] = {}
        self._room = 0  # that is used; the next one is filled
        self._thread = ThreadPoolExecutor(1, "quire-streaming")
        self._stopped = False
        self.runs = 0
        """Networks that were streamed so far."""
        self.host_s = 0.0
        """Seconds of a row on the host; 0 before it was measured."""
        self.gpu_s = 0.0
        """Seconds of a network that is streamed, with all its rows."""
        self._trust = 1.0  # in that figure: it fades while the host is taken

    def wrap(self, network: Network) -> Network:
        """A network that may be run on the GPU, if all of it is on the host."""
        if any(ops is not self.host for ops in network.ops_within):
            return network
        self._networks.append(network)
        return Streamed(self, network, len(self._networks) - 1)

    def worth(self, rows: int) -> bool:
        """Whether so many rows are sooner done on the GPU, as far as is known."""
        if rows < LEAST or not self.host_s or self._stopped:
            return False
        return self.gpu_s * self._trust < self.host_s * rows

    def measured(self, rows: int, seconds: float, on_gpu: bool) -> None:
        """Notes how long a network took."""
        if on_gpu:
            self.runs += 1
            if self.runs > 1:  # the first one compiles
                self.gpu_s = min(seconds, _smooth(self.gpu_s, seconds))
                self._trust = 1.0
        elif rows >= LEAST:
            self.host_s = _smooth(self.host_s, seconds / rows)
            self._trust *= _FADING

    def take(self, at: int) -> Network | None:
        """A network on the GPU; the one behind it is sent for. None, for good, if that fails."""
        try:
            return self._taken(at)
        except (QuireError, OSError, MemoryError):  # a file that was cut: the host has its weights
            self._stopped, self._next = True, None
            return None

    def use(self) -> AbstractContextManager[None]:
        """What is computed with the network that was taken last is computed within."""
        return self._passage.use(self._room)

    def _taken(self, at: int) -> Network:
        if not self.runs:
            self._begins()
        if self._next is None or self._next[0] != at:
            self._drop()
            self._next = at, self._send(at)
        found = self._next[1].result()
        self._room = (self._room + 1) % ROOMS
        self._behind[self._last], self._last = at, at
        behind = self._behind.get(at, (at + 1) % len(self._networks))
        self._next = behind, self._send(behind)
        return found

    def _send(self, at: int) -> Future[Network]:
        make = partial(self._networks[at].again, self._kit)
        return self._thread.submit(self._passage.fill, (self._room + 1) % ROOMS, make)

    def _drop(self) -> None:
        if self._next is not None:
            wait([self._next[1]])  # it may be half there
            self._next = None

    def close(self) -> None:
        """Waits for what is on its way, and lets go of everything."""
        self._drop()
        self._thread.shutdown()
        self._passage.close()
        self._networks.clear()


class Streamed:
    """A network on the host whose longer batches may go to the GPU and back."""

    def __init__(self, streaming: Streaming, network: Network, at: int) -> None:
        self._streaming, self._network, self._at = streaming, network, at
        self.ops: Ops = network.ops
        self.part_bytes: Mapping[str, int] = network.part_bytes
        self.ops_within: Sequence[Ops] = network.ops_within

    def add_to(self, x: Array) -> Array:
        """x + network(norm(x)), wherever that is sooner done."""
        s, rows = self._streaming, x.shape[0]
        start = perf_counter()
        if s.worth(rows) and (there := s.take(self._at)):
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
