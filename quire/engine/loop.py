"""Owns an engine: requests come from any thread, and every output goes to who asked for it.

LLM, Session, Stream ──submit, call──▶ Loop ──one at a time (seat.py)──▶ Engine
                     ◀──text──────────  Job  ◀─────────outputs──────────
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary, ref

from quire.engine.aside import Aside
from quire.engine.constrain import Matcher
from quire.engine.endings import Holder, Ref
from quire.engine.engine import Engine
from quire.engine.generation import Transcript
from quire.engine.request import Request
from quire.engine.seat import Seat
from quire.engine.sequence import Sequence
from quire.engine.waiting import NAP
from quire.engine.work import Job, Work
from quire.errors import OutOfMemory, RequestError
from quire.types import StepOutput

PATIENCE_S = 10.0
"""How long who lacks room waits for files that hold some of it: others come and go."""
T = TypeVar("T")
A = TypeVar("A", bound=Aside)


class Loop:
    """One engine, for any number of threads and event loops."""

    def __init__(self, engine: Engine, seat: Seat | None = None) -> None:
        self.engine = engine
        self.seat = seat or Seat()
        self.alone = Lock()
        """Held by who gives way to whatever needs room, from beginning to end: of several, each
        would take from the others what it needs, and none would ever be done."""
        self._work: WeakValueDictionary[int, Work] = WeakValueDictionary()
        self._last: dict[int, Ref] = {}  # by sequence, the work that was begun last
        self._closing = False

    # -- between steps --------------------------------------------------------------------------

    def call(self, fn: Callable[[], T]) -> T:
        """Does something with the engine while no step runs, and returns what came of it."""
        return self.seat.call(lambda: self.settled(fn))

    def call_with_room(self, fn: Callable[[], T]) -> T:
        """`call`; where a file that is read or written holds what it lacks, it is tried again."""
        if self.seat.mine:  # whoever reads or writes could not end while this waits
            return self.call(fn)
        until = time.monotonic() + PATIENCE_S
        while not (made := self.call(lambda: self.tried(fn, until))):
            time.sleep(NAP)
        return made[0]

    def tried(self, fn: Callable[[], T], until: float) -> list[T]:
        """What came of something; nothing where it lacks what a file holds, and may wait for it."""
        try:
            return [fn()]
        except OutOfMemory:
            if not self.engine.budget.whole.passing or time.monotonic() >= until:
                raise
            return []

    def later(self, action: Callable[[], None]) -> None:
        """Does something before the next step, from wherever; nobody waits for it."""
        self.seat.later(lambda: self.settled(action))

    def let_use(self, use: Callable[[], None]) -> None:
        """`later`, for what uses the model as anybody may: it calls where it is called."""

        def act() -> None:
            self.settle()
            use()

        self.seat.later(act)

    def close_with(self, ending: Callable[[], None]) -> None:
        """Ends something for good: now, or before the next step if this is the middle of one."""
        self.seat.end(lambda: self.settled(ending))

    def when_gone(self, handle: object, ending: Callable[[], None]) -> Ref:
        """Ends something before the next step once nobody holds its handle any more."""
        return self.seat.endings.when_gone(handle, lambda: self.settled(ending))

    def when_left(
        self, holder: Holder | None, what: Ref | Holder, ending: Callable[[], None]
    ) -> None:
        """Ends something before the next step once whoever waits for it does so no more."""
        if holder is not None:
            self.seat.endings.when_left(holder, what, lambda: self.settled(ending))

    def settled(self, fn: Callable[[], T]) -> T:
        """Does something when no step is under way on the device any more."""
        self.settle()
        return self._in_step(fn)

    def settle(self) -> None:
        """Ends the step that is under way on the device, if one is."""
        if self.engine.flying is not None:
            self._deliver(self.engine.settle())

    def close(self) -> None:
        """Ends everything; who waits gets an error."""
        self._closing = True  # before anybody wakes up and asks why
        for work in list(self._work.values()):
            self.end(work)
        self.engine.close()

    def beside(self, make: Callable[[], A]) -> A:
        """Computes something between the steps of others, one at a time."""
        made: list[A] = []
        holder = Holder()

        def begin() -> None:
            self.when_left(holder, holder, close)
            made.append(make())

        def step() -> bool:
            return made[0].done or made[0].step()  # it may have been closed just before

        def close() -> None:
            self.seat.endings.settled(holder)
            for one in made:
                one.close()

        self.seat.check_can_wait()
        with self.alone, holder.lock:
            try:
                self.call(begin)
                while not made[0].done:
                    if not self.call(step) and not self.seat.turn(self):
                        time.sleep(NAP)  # somebody else drives those who have to end first
            finally:
                self.call(close)
        return made[0]

    # -- work on sequences: these are called on the loop ------------------------------------------

    def check_idle(self, sequence: Sequence) -> None:
        """Refuses to touch a sequence that somebody works on.

        Work that was let go of a moment ago ends here: later it would end what comes after it.
        """
        work, last = self._work.get(sequence.id), self._last.get(sequence.id)
        if work is None and last is not None:
            self.seat.endings.end_gone(last)
        if isinstance(work, Job):
            raise RequestError(
                "this session generates already; wait until that has ended, or read its stream to "
                "the end or close it"
            )
        if work is not None:
            raise RequestError("another thread works on this session; wait until it has finished")

    def start(
        self, sequence: Sequence, request: Request, transcript: Transcript,
        matcher: Matcher | None, keep: bool, holder: Holder | None = None,
    ) -> Job:  # fmt: skip
        """Sets a request going; `keep` lets the sequence live on when it is done.

        It ends early once its holder waits no more; without one, when the job itself is let go of.
        """
        engine = self.engine
        self.check_idle(sequence)

        def undo() -> None:
            if not engine.closed:
                (engine.stop if keep else engine.end)(sequence)

        job = Job(self, sequence, request, transcript, undo)
        self._take(job)
        known = job.ref  # readers may let go of it between two pieces

        def left() -> None:
            if (one := known()) is not None:
                self.end(one)

        self.when_left(holder, known, left)
        try:
            self._deliver(
                self._in_step(lambda: engine.start(sequence, request, matcher, transcript))
            )
        except BaseException:
            self.end(job)
            raise
        return job

    def compute(
        self, sequence: Sequence, holder: Holder | None, undo: Callable[[], None] | None = None
    ) -> Work:
        """Computes what is pending of a sequence, for as long as its holder waits."""
        self.check_idle(sequence)
        if sequence.pending:
            self.engine.activate(sequence)
        work = Work(self, sequence, undo or (lambda: self.engine.stop(sequence)))
        self._take(work)
        self.when_left(holder, work.ref, lambda: self.end(work))
        return work

    def _take(self, work: Work) -> None:
        id = work.sequence.id
        self._work[id], self._last[id] = work, work.ref

    def end(self, work: Work) -> None:
        """Ends work early, or tidies up behind it; once is enough."""
        if self._work.get(work.sequence.id) is work:
            del self._work[work.sequence.id], self._last[work.sequence.id]
            self.seat.endings.settled(work.ref)
            self.engine.discard(work.sequence)
            if isinstance(work, Job):
                work.cancel()
                work.undo()
            elif work.error or not work.done:  # before anybody else can work on its sequence
                work.ended = True
                work.undo()
            for tell in work.told:
                tell()

    def cancel(self, sequence: Sequence) -> None:
        """Ends what runs on a sequence, if anything does."""
        if work := self._work.get(sequence.id):
            self.end(work)

    # -- driving --------------------------------------------------------------------------------

    def step(self) -> None:
        """One step for everybody; outputs go to their work. Only for who holds the seat."""
        if not self.engine.closed:
            self._deliver(self._in_step(self.engine.step))

    def _in_step(self, compute: Callable[[], T]) -> T:
        """Does something, and refuses whoever would use the engine meanwhile.

        Garbage is collected in the middle of anything, and what is called then may want to.
        """
        seat = self.seat
        before, seat.in_step = seat.in_step, True
        try:
            return compute()
        finally:
            seat.in_step = before

    def wait(self, work: Work, done: Callable[[], bool] | None = None) -> None:
        """Until work is done, or there is something to read; an error if the model is closed."""
        is_done = done or (lambda: work.done)
        waits = not is_done()
        if waits:
            self.seat.wait(self, lambda: is_done() or self._closing)
        if waits or done is None:  # what a reader was given before counts as it is
            self._check_open(work)

    def finish(self, work: Work) -> None:
        """Waits for work, and raises what made it fail; it is over, whatever happens."""
        try:
            self.wait(work)
        finally:
            self.call(lambda: self.end(work))
        if work.error:
            raise work.error

    async def wait_async(self, work: Work) -> None:
        """The same for a coroutine, until there is something to read."""
        from quire.engine.guest import Guest, guest_holder

        if work.has_news:
            return
        known = ref(work)  # whoever drives may hold the guest for longer than it waits

        def done() -> bool:
            return self._closing or (one := known()) is None or one.has_news

        holder = guest_holder()
        with holder.lock:
            guest = Guest(self, done, holder)
            self.seat.add_guest(guest)
            try:
                await guest.future
            finally:
                self.seat.remove_guest(guest)
        self._check_open(work)

    def _check_open(self, work: Work) -> None:
        finished = isinstance(work, Job) and work.finish_reason not in (None, "cancelled")
        if self._closing and not finished:
            raise RequestError("this model is closed; load it again")

    def _deliver(self, outputs: list[StepOutput]) -> None:
        received: list[Work] = []
        for output in outputs:
            if work := self._work.get(output.sequence):
                work.receive(output)
                received.append(work)
        for work in received:  # everybody has theirs, whatever goes wrong from here on
            if work.done:
                self.end(work)
            else:
                for tell in work.told:
                    tell()
