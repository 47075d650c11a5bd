"""Who may start: at most so many at once, and a queue that is fair between keys.

Within a key and a priority first come, first served; between keys whoever was served least goes
first; whoever has waited too long goes before all others, so every wait is bounded. A request for
many answers takes the places that are free, and goes on with fewer while others wait.
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
    turn: asyncio.Future[Place] = field(repr=False)


@dataclass(eq=False)
class Place:
    """Somebody who was let in, for so many answers at a time."""

    queue: Admission
    key: str
    answers: int = 0

    def fit(self, going: int, more: int) -> None:
        """Places of answers that ended are for whoever waits, or for more answers of the same."""
        queue, used = self.queue, max(going, 1)
        queue.running -= self.answers - used
        self.answers = used
        queue.let_in()
        if not queue.waiting:
            queue.add(self, min(max(going + more - used, 0), queue.max_running - queue.running))


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
    async def enter(self, key: str, priority: int, weight: int) -> AsyncIterator[Place]:
        """Waits for a turn, and holds it: as many places of those that it wants as are free."""
        self.check()
        if self.waiting or self.running >= self.max_running:
            place = await self._wait(key, priority, weight)
        else:
            place = self._take(key, weight)
        try:
            yield place
        finally:
            self.running -= place.answers
            self.let_in()

    async def _wait(self, key: str, priority: int, weight: int) -> Place:
        turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        one = Waiting(key, priority, weight, time.monotonic(), turn)
        self.waiting.append(one)
        self.let_in()
        try:
            return await turn
        except BaseException:
            if one in self.waiting:
                self.waiting.remove(one)
            elif turn.done() and not turn.cancelled() and not turn.exception():
                # It was let in as it left.
                self.running -= turn.result().answers
            self.let_in()
            raise

    def refuse(self, error: ApiError) -> None:
        """Lets nobody in any more of those who wait."""
        for one in self.waiting:
            if not one.turn.done():
                one.turn.set_exception(error)

    def _take(self, key: str, weight: int) -> Place:
        place = Place(self, key)
        self.add(place, min(weight, self.max_running - self.running))
        return place

    def add(self, place: Place, answers: int) -> None:
        """More places, which are free, for somebody."""
        place.answers += answers
        self.running += answers
        self._served[place.key] += answers
        if len(self._served) > 1000:  # long-lived servers meet many keys
            self._served = Counter(dict(self._served.most_common(500)))

    def let_in(self) -> None:
        """Lets in whoever is next, as long as there is a place."""
        while self.waiting:
            one = self._chosen()
            if one.turn.done():  # it left, and has not said so yet
                self.waiting.remove(one)
                continue
            if self.running >= self.max_running:
                break
            self.waiting.remove(one)
            one.turn.set_result(self._take(one.key, one.weight))
        if not self.running and not self.waiting:
            self._served.clear()

    def _chosen(self) -> Waiting:
        late = time.monotonic() - _PATIENCE_S
        oldest = min(self.waiting, key=lambda one: one.since)
        if oldest.since < late:
            return oldest
        return min(self.waiting, key=lambda w: (w.priority, self._served[w.key], w.since))
