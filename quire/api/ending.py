"""How sessions and models end, whether they are closed or forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from quire.config import LoadConfig
from quire.devices.device import Device
from quire.engine.loop import Loop
from quire.engine.resize import refit
from quire.engine.sequence import Mark, Sequence


class Ending:
    """Gives back what a session holds, once, without holding the session itself."""

    def __init__(self, loop: Loop, sequence: Sequence, marks: Mapping[str, Mark]) -> None:
        self._loop = loop
        self._sequence = sequence
        self._marks = marks
        self._done = False

    @property
    def done(self) -> bool:
        """Whether it was given back."""
        return self._done or self._loop.engine.closed

    def __call__(self) -> None:
        engine = self._loop.engine
        if self.done:
            return
        self._done = True
        self._loop.cancel(self._sequence)
        for mark in self._marks.values():
            engine.history.drop(mark)
        engine.end(self._sequence)


class ModelEnding:
    """Gives back what a model holds, once, without holding the model itself.

    One that shares a budget would else hold its part of it for as long as the others are there.
    """

    def __init__(
        self, loop: Loop, settings: LoadConfig, weights: Mapping[Device, int], streams: ExitStack
    ) -> None:
        self._loop = loop
        self._weights = weights
        self._streams = streams
        self._refit: Callable[[], None] = partial(refit, loop.engine, settings)
        for device in weights:
            device.budget.whole.followers.append(self._refit)

    def __call__(self) -> None:
        engine = self._loop.engine
        if engine.closed:
            return
        self._loop.close()
        self._streams.close()
        engine.runner.close()
        for device, size in self._weights.items():
            device.budget.whole.followers.remove(self._refit)
            device.budget.release(size, "weights")
