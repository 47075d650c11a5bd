"""What threads wait for: something done elsewhere, or something to be done by who drives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from quire.engine.endings import Holder

T = TypeVar("T")
NAP = 0.05
"""Seconds after which a sleeper looks for itself."""


class Bell:
    """Wakes one who sleeps, or who will.

    A `threading.Event` takes several steps in Python for that. An interrupt between them lets go of
    a lock that another thread holds, or holds on to one for ever; a bare lock has no between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wakes them; once is enough."""
        with suppress(RuntimeError):  # it rings already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Sleeps so long at most; whether it rang."""
        return self._lock.acquire(timeout=seconds)


class Steps(Protocol):
    """Who can be driven."""

    def step(self) -> None:
        """Moves everybody on by one step."""


class Waiter:
    """A thread that sleeps until something is done."""

    def __init__(
        self, steps: Steps, done: Callable[[], bool], holder: Holder | None = None
    ) -> None:
        self.steps = steps
        self.done = done
        self._holder = holder
        self._bell = Bell()

    @property
    def left(self) -> bool:
        """Whether it sleeps no more, though nobody was told so."""
        return self._holder is not None and self._holder.left

    def wake(self) -> None:
        """It is done, or it may drive."""
        self._bell.ring()

    def fail(self, error: BaseException) -> None:
        """Whoever drove for it met an error."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Until it is woken, or for a nap."""
        self._bell.wait(NAP)


class Call(Generic[T]):
    """Something to be done by whoever drives, while its holder waits for it."""

    def __init__(self, fn: Callable[[], T], holder: Holder) -> None:
        self._fn = fn
        self._holder = holder
        self._result: T | None = None
        self._error: BaseException | None = None
        self.done = False
        self._bell = Bell()

    def run(self) -> None:
        """Does it, unless nobody wants it any more."""
        try:
            if not self._holder.left:
                self._result = self._fn()
        except BaseException as error:
            self._error = error
        self.done = True
        self._bell.ring()

    def wake(self) -> None:
        """Nobody drives any more who would do it."""
        self._bell.ring()

    def finished(self) -> bool:
        """Waits for a nap at most; whether it was done."""
        if not self.done:
            self._bell.wait(NAP)
        return self.done

    def result(self) -> T:
        """What came of it."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
