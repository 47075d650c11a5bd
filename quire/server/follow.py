"""Between the engine's thread and the event loop.

The seat's own thread drives while there is something to compute (`Driver`); whatever a step brought
for however many requests is told to the event loop by one wake-up (`News`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from quire.engine.endings import Holder
from quire.engine.guest import Guest
from quire.engine.loop import Loop
from quire.engine.waiting import Call, Waiter

T = TypeVar("T")


class Listener(Protocol):
    """Somebody in the event loop who waits for news."""

    def wake(self) -> None:
        """There is some."""


class News:
    """Tells listeners in one event loop what happened in other threads."""

    def __init__(self) -> None:
        self._home = asyncio.get_running_loop()
        self._told: deque[Listener] = deque()
        self._called = False

    def tell(self, listener: Listener) -> None:
        """From any thread; one wake-up for all that are told before the event loop looks."""
        self._told.append(listener)
        if not self._called:
            self._called = True
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                self._home.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        self._called = False
        while self._told:
            self._told.popleft().wake()


class Signal:
    """A listener for one thing."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Something happened."""
        self._event.set()

    async def wait(self) -> None:
        """Until something happened since the last time."""
        await self._event.wait()
        self._event.clear()


class Driver(Waiter):
    """Has the seat's thread drive an engine as long as it has something to compute."""

    def __init__(self, loop: Loop, failed: Callable[[BaseException], None]) -> None:
        super().__init__(loop, lambda: loop.engine.closed or not loop.engine.scheduler.active)
        self._loop = loop
        self._failed = failed
        self._driving = False

    def drive(self) -> None:
        """From now on, until it fails."""
        if not self._driving:
            self._driving = True
            self._loop.seat.add_guest(self)

    def stop(self) -> None:
        """No more."""
        self._driving = False
        self._loop.seat.remove_guest(self)

    def wake(self) -> None:
        """There is nothing to compute; that is nobody's news."""

    def fail(self, error: BaseException) -> None:
        """A step broke off with something that is no request's own error."""
        self._driving = False
        self._failed(error)


async def on_engine(loop: Loop, fn: Callable[[], T], unwanted: Callable[[T], None]) -> T:
    """Does something with the engine between steps, without a thread that waits for it.

    Whoever is cancelled meanwhile wants nothing any more: what came of it goes to `unwanted`, which
    is called between steps too, and before the cancelled one goes on: what it held is free then.
    """
    holder = Holder()
    call = _Call(fn, holder, unwanted)
    try:
        await _done(loop, call, holder)
    except asyncio.CancelledError:
        loop.let_use(call.undo)  # behind the call itself, if that is still to come
        behind = Holder()
        await _done(loop, Call(lambda: None, behind), behind)
        raise
    except BaseException:
        loop.let_use(call.undo)
        raise
    return call.result()


async def _done(loop: Loop, call: Call[Any], holder: Holder) -> None:
    guest = Guest(loop, lambda: call.done)
    with holder.lock:
        loop.let_use(call.run)
        loop.seat.add_guest(guest)
        try:
            await guest.future
        finally:
            loop.seat.remove_guest(guest)


class _Call(Call[T]):
    def __init__(self, fn: Callable[[], T], holder: Holder, unwanted: Callable[[T], None]) -> None:
        super().__init__(fn, holder)
        self._unwanted = unwanted

    def undo(self) -> None:
        """Nobody wants what came of it, if anything did."""
        if self._error is None and self._result is not None:
            self._unwanted(self._result)
