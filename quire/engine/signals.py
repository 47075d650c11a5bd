"""Signals that come at the wrong moment, put off until it is over."""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

try:  # the module behind `signal`, whose names for numbers would cost more than all else here
    _signal: Any = importlib.import_module("_signal")
except ImportError:
    _signal = signal
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM")  # the last is not everywhere
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
_set_handler, _get_handler = _signal.signal, _signal.getsignal


class SignalsLater:
    """A block of the main thread that signals do not interrupt: they come at its end."""

    __slots__ = ("_caught", "_handlers")

    def __enter__(self) -> None:
        self._handlers: list[tuple[int, Any]] = []
        self._caught: list[tuple[int, FrameType | None]] = []
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _SIGNALS:
                    handler: Any = _get_handler(number)
                    if callable(handler):
                        _set_handler(number, self._catch)  # raises here what came before
                        self._handlers.append((number, handler))
            except BaseException:
                self._restore()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._handlers:
            try:
                self._restore()
            finally:
                self._deliver()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))

    def _deliver(self) -> None:
        """Tells the handlers what came, all of it, though the first of them may raise."""
        while self._caught:
            number, frame = self._caught.pop(0)
            handler: Any = _get_handler(number)
            try:
                if callable(handler):
                    handler(number, frame)
                else:  # the one before has had it ignored, or end the process
                    _signal.raise_signal(number)
            except BaseException:
                self._deliver()
                raise

    def _restore(self) -> None:
        """Lets everybody else's handlers come back, though a signal comes in between."""
        try:
            while self._handlers:
                number, handler = self._handlers[-1]
                _set_handler(number, handler)
                self._handlers.pop()
        except BaseException:
            self._restore()
            raise
