"""What ends before the next step: what was let go of, what nobody waits for, what was put off.

No `finally` is sure to be run: a second interrupt that comes in its first line ends it, and then a
traceback holds what its frames held for as long as somebody looks at it. So whoever waits for
something holds a lock meanwhile, which Python lets go of without executing a line.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from threading import Lock
from typing import Any, Protocol

from quire.errors import QuireError

Ref = weakref.ref[Any]


class Home(Protocol):
    """An event loop."""

    def is_closed(self) -> bool:
        """Whether no coroutine of it goes on any more."""


class Holder:
    """Somebody who waits for something, for as long as they are in `with holder.lock`."""

    def __init__(self, home: Home | None = None) -> None:
        self.lock = Lock()
        self._home = home

    @property
    def left(self) -> bool:
        """Whether they wait no more, however that came about."""
        return not self.lock.locked() or (self._home is not None and self._home.is_closed())


class Readers(Holder):
    """Those who read something, each a holder while it waits for more; between, nobody need be.

    One that is among them and waits no more was interrupted, and did not come to say so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[Holder] = set()

    @property
    def left(self) -> bool:
        """Whether one of them went without a word."""
        return any(one.left for one in list(self.waiting))


class Endings:
    """What is to end. Only who holds the seat runs it, or says who holds what."""

    def __init__(self) -> None:
        self._later: deque[Callable[[], None]] = deque()
        self._gone: deque[Ref] = deque()
        self._endings: dict[Ref, Callable[[], None]] = {}
        self._held: dict[Hashable, tuple[Holder, Callable[[], None]]] = {}

    def later(self, action: Callable[[], None]) -> None:
        """Does something before the next step, from wherever."""
        self._later.append(action)

    def when_gone(self, handle: object, ending: Callable[[], None]) -> Ref:
        """Ends something once nobody holds its handle any more.

        No Python runs when a handle goes: garbage is collected in the middle of steps, and a signal
        that came there would be lost with what was to be done.
        """
        ref = weakref.ref(handle, self._gone.append)
        self._endings[ref] = ending
        return ref

    def when_left(self, holder: Holder, what: Hashable, ending: Callable[[], None]) -> None:
        """Ends something once whoever waits for it does so no more."""
        self._held[what] = (holder, ending)

    def settled(self, what: Ref | Holder) -> None:
        """What a handle or a holder stands for has ended by itself."""
        self._held.pop(what, None)
        if not isinstance(what, Holder):
            self._endings.pop(what, None)

    def end_gone(self, what: Ref) -> None:
        """Ends what a handle stood for that is gone: somebody else is about to take its place."""
        self._held.pop(what, None)
        if ending := self._endings.pop(what, None):
            _quietly(ending)

    @property
    def left(self) -> bool:
        """Whether somebody went without ending what they waited for."""
        return any(holder.left for holder, _ in list(self._held.values()))

    def run(self) -> None:
        """Ends all that is to end."""
        left = [what for what, (holder, _) in self._held.items() if holder.left]
        while self._gone:
            gone = self._gone.popleft()
            self._held.pop(gone, None)
            if ending := self._endings.pop(gone, None):
                self._later.append(ending)
        while self._later:  # what somebody put off and then left comes before what they left
            _quietly(self._later.popleft())
        for what in left:
            if held := self._held.pop(what, None):
                _quietly(held[1])


def _quietly(ending: Callable[[], None]) -> None:
    with suppress(QuireError):  # nobody is there to hear of it
        ending()
