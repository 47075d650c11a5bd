"""Who drives the engine: one thread at a time, and never into the middle of a change.

There is one seat, and whoever waits for something takes it for a turn: it does what others left
to be done, and one step for everybody. So a single thread drives itself, with no other involved;
of several, one drives while the others sleep until theirs is done, and all requests are computed
in one batch. Coroutines cannot sleep so: a thread of the seat's own drives for them, and goes when
it has had nothing to do for a while.

Why nothing can come between: only the holder of the seat touches engines; it is taken and left
under `_mutex`; and in the main thread signals are put off from before it is taken until after it
is left. A wake-up that is lost costs no more than a `NAP`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from quire.engine.endings import Endings, Holder
from quire.engine.exit import keep_at_exit
from quire.engine.signals import SignalsLater
from quire.engine.waiting import NAP, Bell, Call, Steps, Waiter
from quire.errors import RequestError

T = TypeVar("T")
_IDLE = 1.0  # seconds after which the seat's own thread ends
_LAST_STEP = 10.0  # seconds that the end of the process waits for a step
_IN_STEP = (
    "this model is in the middle of a step or a change: a logit processor, or what is called when "
    "garbage is collected, cannot use it; do so before or after"
)


class Seat:
    """One for all engines that share a budget."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._mutex = threading.RLock()  # garbage that is collected in between may close something
        self._driver: int | None = None
        self._depth = 0
        self._last: int | None = None  # nobody but this thread takes it any more
        self._calls: deque[Call[Any]] = deque()
        self.endings = Endings()
        self._waiters: list[Waiter] = []
        self._guests: list[Waiter] = []  # those that cannot drive themselves
        self._thread: threading.Thread | None = None
        self._news = Bell()
        self._dismissed = False
        self.in_step = False
        """Whether an engine is in the middle of a change; only its driver writes it."""
        keep_at_exit(self)

    def check_process(self) -> None:
        """Refuses to go on in a child of the process that loaded the model."""
        if os.getpid() != self._process:
            raise RequestError(
                "this model was loaded in another process, before a fork: its threads are not "
                "here; load it in this process, or start it with multiprocessing's 'spawn'"
            )

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that loaded the model."""
        return os.getpid() != self._process

    # -- taking and leaving ---------------------------------------------------------------------

    def take(self) -> bool:
        """Takes the seat if it is free, or mine already; `leave` comes as often."""
        me = threading.get_ident()
        with self._mutex:
            if self._driver is None and self._last in (None, me):
                self._driver = me
            elif self._driver != me:
                return False
            self._depth += 1
            return True

    def leave(self) -> None:
        """Leaves the seat."""
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._driver = None

    # -- calls ----------------------------------------------------------------------------------

    def call(self, fn: Callable[[], T]) -> T:
        """Does something between steps, here or, where somebody else drives or waits to, there.

        Whoever calls in a loop would else have the seat again before a sleeper has woken up.
        """
        self.check_process()
        if self.mine:
            self._check_between_steps()
            return fn()
        with SignalsLater():
            if not self._is_wanted() and self.take():
                try:
                    self.tidy()
                    return fn()
                finally:
                    self.leave()
                    self._pass_on()
        return self._called_elsewhere(fn)

    def _is_wanted(self) -> bool:
        """Whether somebody waits to drive, or its own thread does."""
        return any(not waiter.left for waiter in list(self._waiters)) or self._has_guests()

    def _has_guests(self) -> bool:
        return any(not (guest.left or guest.done()) for guest in list(self._guests))

    def _called_elsewhere(self, fn: Callable[[], T]) -> T:
        holder = Holder()
        with holder.lock:
            call = Call(fn, holder)
            self._calls.append(call)
            if self._driver is None:
                self._pass_on()
            while not call.finished():
                with SignalsLater():
                    if self.take():  # whoever drove is gone
                        try:
                            self.tidy()
                        finally:
                            self.leave()
                            self._pass_on()
        return call.result()

    def later(self, action: Callable[[], None]) -> None:
        """Does something before the next step; nobody waits for it."""
        self.endings.later(action)

    def end(self, action: Callable[[], None]) -> None:
        """Ends something: now, or before the next step where this thread drives already.

        Garbage is collected in the middle of steps, and what goes may close what it had.
        """
        if self.mine:
            self.later(action)
            return
        try:
            self.call(action)
        except BaseException:
            self.later(action)  # whoever is interrupted has let go of it all the same
            raise

    @property
    def mine(self) -> bool:
        """Whether this thread drives."""
        return self._driver == threading.get_ident()

    def _check_between_steps(self) -> None:
        if self.in_step:
            raise RequestError(_IN_STEP)

    def check_can_wait(self) -> None:
        """Refuses who is about to wait for others, where those may have to wait for the seat."""
        self.check_process()  # a lock that another thread had before a fork stays locked
        if self.mine:
            raise RequestError(_IN_STEP)

    def tidy(self) -> None:
        """Ends what nobody holds, does what was put off, and what others asked for."""
        self.endings.run()
        for _ in range(len(self._calls)):  # who comes meanwhile waits for a step, or none would be
            if not self._calls:  # an ending took a turn of its own
                break
            call = self._calls.popleft()
            try:
                self.endings.run()  # what they let go of before
            except BaseException:
                self._calls.appendleft(call)  # they wait for whoever drives next
                raise
            call.run()

    # -- turns ----------------------------------------------------------------------------------

    def turn(self, steps: Steps) -> bool:
        """One turn: what others asked for, and a step; False when somebody else drives."""
        self.check_process()
        if self.mine:
            self._check_between_steps()
        with SignalsLater():
            if not self.take():
                return False
            try:
                self.tidy()
                steps.step()
                if self._waiters or self._guests:
                    self._serve(steps)
            finally:
                self.leave()
        return True

    def _serve(self, steps: Steps) -> None:
        """Others wait as well: those of other engines get a step, and who is done wakes up."""
        for some in (self._waiters, self._guests):
            for waiter in [waiter for waiter in some if waiter.left]:
                with suppress(ValueError):
                    some.remove(waiter)
        waiters = self._waiters + self._guests
        for other in dict.fromkeys(w.steps for w in waiters if not w.done()):
            if other is not steps:
                other.step()
        for waiter in waiters:
            if waiter.done():
                waiter.wake()

    def wait(self, steps: Steps, done: Callable[[], bool]) -> None:
        """Drives, or sleeps while somebody else does, until it is done."""
        while not done() and self.turn(steps):
            pass
        if done():
            if self._waiters:
                self._pass_on()
            return
        holder = Holder()
        with holder.lock:
            waiter = Waiter(steps, done, holder)
            self._waiters.append(waiter)
            try:
                while not done():
                    if not self.turn(steps):
                        waiter.sleep()
            finally:
                with suppress(ValueError):
                    self._waiters.remove(waiter)
                self._pass_on()

    def _pass_on(self) -> None:
        """Somebody who still waits may drive now."""
        sleepers: list[Waiter | Call[Any]] = [*self._waiters[:1]]
        if not (sleepers or self._has_guests()):  # those who drive do what others ask for
            sleepers = [*self._calls]
        for one in sleepers:
            one.wake()
        if self._guests:
            self._news.ring()

    # -- a thread of its own --------------------------------------------------------------------

    def add_guest(self, waiter: Waiter) -> None:
        """Somebody who cannot drive: the seat's own thread does so until they are done."""
        self.check_process()
        self._guests.append(waiter)
        with SignalsLater(), self._mutex:
            self._dismissed = False
            if self._thread is None:
                thread = threading.Thread(target=self._drive, name="quire", daemon=True)
                thread.start()
                self._thread = thread  # others may wait for its end from here on
        self._news.ring()

    def remove_guest(self, waiter: Waiter) -> None:
        """They wait no more."""
        with suppress(ValueError):
            self._guests.remove(waiter)

    def _drive(self) -> None:
        while True:
            guest = next((g for g in list(self._guests) if not g.done()), None)
            if guest is None:
                if self._nothing_to_do():
                    return
                continue
            try:
                if not self.turn(guest.steps):
                    self._news.wait(NAP)
            except BaseException as error:
                self._fail_guests(error)

    def _fail_guests(self, error: BaseException) -> None:
        """Tells them why this thread did not go on; apart, for it lives longer than they do.

        They have the error, which has the frames of who waited, and what those hold.
        """
        for guest in list(self._guests):
            guest.fail(error)
            self.remove_guest(guest)

    def _wake_guests(self) -> None:
        """Tells them that they are done; apart, for the thread waits behind it, and held one."""
        for guest in list(self._guests):
            if guest.done():  # one that has just come is not
                guest.wake()

    def _nothing_to_do(self) -> bool:
        """Whether the thread has waited for long enough."""
        self._wake_guests()
        if self._news.wait(0 if self._dismissed else _IDLE):
            return False
        with self._mutex:
            if not all(guest.done() for guest in self._guests):
                return False
            self._wake_guests()  # one that came since found this thread still here
            self._thread = None
            return True

    def dismiss(self) -> None:
        """Lets its own thread go as soon as nobody needs it, and waits for that for a while."""
        self._dismissed = True
        self._news.ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_IDLE)

    def keep(self) -> None:
        """Takes it for good, as soon as no step runs: nobody else drives any more."""
        if self.forked:
            return
        self.dismiss()
        self._last = threading.get_ident()
        until = time.monotonic() + _LAST_STEP
        while not self.take() and time.monotonic() < until:
            time.sleep(0.001)
