"""Who may start: at most so many at once, and a queue that is fair between keys.

Within a key and a priority first come, first served; between keys whoever was served least goes
first; whoever has waited too long goes before all others, so every wait is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from quire.server.errors import ApiError

_PATIENCE_S = 20.0


@dataclass(eq=False)
class Waiting:
    """Somebody in the queue."""

    key: str
    priority: int
    weight: int
    since: float
    turn: asyncio.Future[None] = field(repr=False)


class Admission:
    """Lets requests in; only for the event loop's own thread."""

    def __init__(self, max_running: int, max_queue: int) -> None:
        self.max_running = max_running
        self.max_queue = max_queue
        self.running = 0
        self.waiting: list[Waiting] = []
        self.draining = False
        self._served: Counter[str] = Counter()

    def check(self) -> None:
        """Refuses at once what the queue has no place for."""
        if self.draining:
            raise ApiError(503, "the server is about to end", code="draining")
        full = self.running >= self.max_running
        if full and len(self.waiting) >= self.max_queue:
            raise ApiError(
                429, f"{self.running} requests run and {len(self.waiting)} wait, which is as many "
                "as --max-running and --max-queue allow; try again later", code="queue_full",
            )  # fmt: skip

    @asynccontextmanager
    async def enter(self, key: str, priority: int, weight: int) -> AsyncIterator[None]:
        """Waits for a turn, and holds it."""
        self.check()
        weight = min(weight, self.max_running)
        if self.waiting or self.running + weight > self.max_running:
            await self._wait(key, priority, weight)
        else:
            self._take(key, weight)
        try:
            yield
        finally:
            self.running -= weight
            self._next()

    async def _wait(self, key: str, priority: int, weight: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        one = Waiting(key, priority, weight, time.monotonic(), turn)
        self.waiting.append(one)
        self._next()
        try:
            await turn
        except BaseException:
            if one in self.waiting:
                self.waiting.remove(one)
            elif turn.done() and not turn.cancelled():  # it was let in as it left
                self.running -= weight
            self._next()
            raise

    def _take(self, key: str, weight: int) -> None:
        self.running += weight
        self._served[key] += weight
        if len(self._served) > 1000:  # long-lived servers meet many keys
            self._served = Counter(dict(self._served.most_common(500)))

    def _next(self) -> None:
        """Lets in whoever is next, as long as there is a place."""
        while self.waiting:
            one = self._chosen()
            if one.turn.done():  # it left, and has not said so yet
                self.waiting.remove(one)
                continue
            if self.running + one.weight > self.max_running:
                break
            self.waiting.remove(one)
            self._take(one.key, one.weight)
            one.turn.set_result(None)
        if not self.running and not self.waiting:
            self._served.clear()

    def _chosen(self) -> Waiting:
        late = time.monotonic() - _PATIENCE_S
        oldest = min(self.waiting, key=lambda one: one.since)
        if oldest.since < late:
            return oldest
        return min(self.waiting, key=lambda w: (w.priority, self._served[w.key], w.since))
