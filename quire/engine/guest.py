"""Coroutines that wait for the engine; apart, so that only who uses asyncio imports it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from quire.engine.endings import Holder
from quire.engine.waiting import Steps, Waiter


def guest_holder() -> Holder:
    """A coroutine that will wait for something."""
    return Holder(asyncio.get_running_loop())


class Guest(Waiter):
    """A coroutine that waits; it is woken in its own event loop."""

    def __init__(
        self, steps: Steps, done: Callable[[], bool], holder: Holder | None = None
    ) -> None:
        super().__init__(steps, done, holder)
        self._home = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._home.create_future()

    def wake(self) -> None:
        """It is done."""
        self._tell(None)

    def fail(self, error: BaseException) -> None:
        """Whoever drove for it met an error."""
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        def tell() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)

        with suppress(RuntimeError):  # its event loop is closed: nobody waits any more
            self._home.call_soon_threadsafe(tell)
