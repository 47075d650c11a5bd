"""What threads wait for: something done elsewhere, or something to be done by who drives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
NAP = 0.05
"""Seconds after which a sleeper looks for itself."""


class Steps(Protocol):
    """Who can be driven."""

    def step(self) -> None:
        """Moves everybody on by one step."""


class Waiter:
    """A thread that sleeps until something is done."""

    def __init__(self, steps: Steps, done: Callable[[], bool]) -> None:
        self.steps = steps
        self.done = done
        self._event = threading.Event()

    def wake(self) -> None:
        """It is done, or it may drive."""
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Whoever drove for it met an error."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Until it is woken, or for a nap."""
        self._event.wait(NAP)
        self._event.clear()


class Call(Generic[T]):
    """Something to be done by whoever drives."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._result: T | None = None
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self.dropped = False

    def run(self) -> None:
        """Does it, unless nobody wants it any more."""
        try:
            if not self.dropped:
                self._result = self._fn()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def finished(self) -> bool:
        """Waits for a nap at most; whether it was done."""
        return self._finished.wait(NAP)

    def result(self) -> T:
        """What came of it."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
