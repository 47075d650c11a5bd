"""Requests that come together begin together.

An engine with nothing to do would begin with the first of them, and all others would wait for that
step and come in small chunks, beside somebody who reads. So whoever is first waits for those whose
text is just being read, for a moment; who comes alone does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

MOMENT_S = 0.03
"""Seconds that anybody waits for others, at most."""
PAUSE_S = 0.003
"""Seconds without another after which the last of several is taken to have come, at most."""
GAPS = 3
"""Of the usual length between two of them, which are such a pause too."""
TURNS = 8
"""Of the event loop, in which it reads what clients have sent already."""


class Arrivals:
    """Who is about to begin; only for the event loop's own thread."""

    def __init__(self) -> None:
        self._came = 0  # since nobody was about to begin
        self._first = self._last = 0.0  # when the first of them came, and the last
        self._coming = 0
        self._gathering: asyncio.Future[None] | None = None
        self._all_here = asyncio.Event()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While what a client sent becomes tokens."""
        self._last = perf_counter()
        if not self._coming and self._gathering is None:
            self._first, self._came = self._last, 0
        self._came += 1
        self._coming += 1
        self._all_here.clear()
        try:
            yield
        finally:
            self._coming -= 1
            if not self._coming:
                self._all_here.set()

    async def gathered(self) -> None:
        """Until others who come at this time are there too, or for a moment."""
        if self._gathering is None:
            self._gathering = asyncio.ensure_future(self._gather())
        await asyncio.shield(self._gathering)  # all go on at once

    async def _gather(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._others(), MOMENT_S)
        self._gathering = None

    async def _others(self) -> None:
        alone = not self._coming
        while True:
            came = self._came
            await self._all_here.wait()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if came != self._came:
                alone = False
            elif alone or (left := self._last + self._pause() - perf_counter()) <= 0:
                return
            else:
                await asyncio.sleep(left)

    def _pause(self) -> float:
        gap = (self._last - self._first) / max(self._came - 1, 1)
        return min(GAPS * gap, PAUSE_S)
