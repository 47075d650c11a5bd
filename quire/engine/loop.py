"""Owns an engine: requests come from any thread, and every output goes to who asked for it.

LLM, Session, Stream ──submit, call──▶ Loop ──one at a time (seat.py)──▶ Engine
                     ◀──text──────────  Job  ◀─────────outputs──────────
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

from quire.engine.aside import Aside
from quire.engine.constrain import Matcher
from quire.engine.engine import Engine
from quire.engine.generation import Transcript
from quire.engine.request import Request
from quire.engine.seat import Ref, Seat
from quire.engine.sequence import Sequence
from quire.engine.waiting import NAP
from quire.errors import QuireError, RequestError
from quire.memory.stats import Footprint
from quire.types import FinishReason, StepOutput, TokenLogprob

T = TypeVar("T")
A = TypeVar("A", bound=Aside)


class Work:
    """Something under way on a sequence; whoever lets go of it early ends it."""

    def __init__(self, loop: Loop, sequence: Sequence, undo: Callable[[], None]) -> None:
        self.loop = loop
        self.sequence = sequence
        self.error: QuireError | None = None
        self.ended = False
        self.undo = undo
        """Ends it early; on the loop."""
        self.told: list[Callable[[], None]] = []
        """Called on the loop whenever something came of it."""
        self.ref = loop.when_gone(self, undo)

    @property
    def done(self) -> bool:
        """Whether nothing more will come; what was computed may have lost its pages since."""
        return self.ended or self.error is not None or not self.sequence.active

    @property
    def has_news(self) -> bool:
        """Whether a reader has something to take, or nothing to wait for."""
        return self.done

    def receive(self, output: StepOutput) -> None:
        """Takes in what a step added, or that it failed."""
        self.error = output.error


class Job(Work):
    """One request: its tokens and its text, as far as they have come."""

    def __init__(
        self, loop: Loop, sequence: Sequence, request: Request, transcript: Transcript,
        undo: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(loop, sequence, undo)
        self.request = request
        self.transcript = transcript
        self.prompt_tokens = sequence.length + len(request.tokens)
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.started = self.first = self.last = time.perf_counter()
        self.held: Footprint | None = None
        """What its sequence held when it ended."""
        self.peak_bytes = 0
        self._taken = 0
        self._reading = Lock()
        ends = frozenset() if request.sampling.ignore_eos else loop.engine.end_ids
        self._hidden: frozenset[int] = ends

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def receive(self, output: StepOutput) -> None:
        """Takes in what a step added; it is done once everything else is there."""
        self.last = time.perf_counter()
        if not self.token_ids:
            self.first = self.last
            if not output.finish_reason:  # else it is looked at below
                self._look()
        self.logprobs.extend(output.logprobs)
        self.token_ids.extend(output.token_ids)
        self.transcript.read(self.token_ids, self._hidden)
        if output.finish_reason:
            self.transcript.end()
            self.held = self._look()
        self.error = output.error
        self.finish_reason = output.finish_reason

    def cancel(self) -> None:
        """Nobody waits for the rest; its pages are still there to be counted."""
        if not self.done:
            self.held = self._look()
            self.finish_reason = "cancelled"

    def _look(self) -> Footprint:
        held = self.loop.engine.memory.footprint(self.sequence.id)
        self.peak_bytes = max(self.peak_bytes, held.bytes)
        return held

    @property
    def text(self) -> str:
        """All that has come."""
        return "".join(self.transcript.pieces)

    @property
    def has_text(self) -> bool:
        """Whether a reader has something to take."""
        return any(self.transcript.pieces[self._taken :])

    @property
    def has_news(self) -> bool:
        """Whether a reader has something to take, or nothing to wait for."""
        return self.done or self.has_text

    def take(self) -> str:
        """The text that came since the last call; of several readers, each gets what is new."""
        with self._reading:
            end = len(self.transcript.pieces)
            text = "".join(self.transcript.pieces[self._taken : end])
            self._taken = end
            return text


class Loop:
    """One engine, for any number of threads and event loops."""

    def __init__(self, engine: Engine, seat: Seat | None = None) -> None:
        self.engine = engine
        self.seat = seat or Seat()
        self._aside = Lock()
        self._work: WeakValueDictionary[int, Work] = WeakValueDictionary()
        self._closing = False

    # -- between steps --------------------------------------------------------------------------

    def call(self, fn: Callable[[], T]) -> T:
        """Does something with the engine while no step runs, and returns what came of it."""
        return self.seat.call(lambda: self.settled(fn))

    def later(self, action: Callable[[], None]) -> None:
        """Does something before the next step, from wherever; nobody waits for it."""
        self.seat.later(lambda: self.settled(action))

    def close_with(self, ending: Callable[[], None]) -> None:
        """Ends something for good: now, or before the next step if this is the middle of one."""
        self.seat.end(lambda: self.settled(ending))

    def when_gone(self, handle: object, ending: Callable[[], None]) -> Ref:
        """Ends something before the next step once nobody holds its handle any more."""
        return self.seat.when_gone(handle, lambda: self.settled(ending))

    def settled(self, fn: Callable[[], T]) -> T:
        """Does something when no step is under way on the device any more."""
        if self.engine.flying is not None:
            self._deliver(self.engine.settle())
        return fn()

    def close(self) -> None:
        """Ends everything; who waits gets an error."""
        self._closing = True  # before anybody wakes up and asks why
        for work in list(self._work.values()):
            self.end(work)
        self.engine.close()

    def beside(self, make: Callable[[], A]) -> A:
        """Computes something between the steps of others, from its beginning to its end.

        One at a time: they give way to whatever needs room, and so would never end together.
        """
        made: list[A] = []

        def step() -> bool:
            return made[0].done or made[0].step()  # it may have been closed just before

        self.seat.check_process()
        with self._aside:
            try:
                self.call(lambda: made.append(make()))
                while not made[0].done:
                    if not self.call(step) and not self.seat.turn(self):
                        time.sleep(NAP)  # somebody else drives those who have to end first
            finally:
                self.call(lambda: [one.close() for one in made])
        return made[0]

    # -- work on sequences: these are called on the loop ------------------------------------------

    def check_idle(self, sequence: Sequence) -> None:
        """Refuses to touch a sequence that somebody works on."""
        work = self._work.get(sequence.id)
        if isinstance(work, Job):
            raise RequestError("a stream runs on this session; read it to its end or close it")
        if work is not None:
            raise RequestError("another thread works on this session; wait until it has finished")

    def start(
        self, sequence: Sequence, request: Request, transcript: Transcript,
        matcher: Matcher | None, keep: bool,
    ) -> Job:  # fmt: skip
        """Sets a request going; `keep` lets the sequence live on when it is done."""
        engine = self.engine
        self.check_idle(sequence)

        def undo() -> None:
            if not engine.closed:
                (engine.stop if keep else engine.end)(sequence)

        job = Job(self, sequence, request, transcript, undo)
        self._work[sequence.id] = job
        try:
            self._deliver(
                self._in_step(lambda: engine.start(sequence, request, matcher, transcript))
            )
        except BaseException:
            self.end(job)
            raise
        return job

    def compute(self, sequence: Sequence, undo: Callable[[], None] | None = None) -> Work:
        """Computes what is pending of a sequence."""
        self.check_idle(sequence)
        if sequence.pending:
            self.engine.activate(sequence)
        work = Work(self, sequence, undo or (lambda: self.engine.stop(sequence)))
        self._work[sequence.id] = work
        return work

    def end(self, work: Work) -> None:
        """Ends work early, or tidies up behind it; once is enough."""
        if self._work.get(work.sequence.id) is work:
            del self._work[work.sequence.id]
            self.seat.settled(work.ref)
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
        """Computes something, and refuses whoever would use the engine meanwhile."""
        self.seat.in_step = True
        try:
            return compute()
        finally:
            self.seat.in_step = False

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
        from quire.engine.guest import Guest

        if not work.has_news:
            guest = Guest(self, lambda: work.has_news or self._closing)
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
        for output in outputs:
            work = self._work.get(output.sequence)
            if work:
                work.receive(output)
                if work.done:
                    self.end(work)
                else:
                    for tell in work.told:
                        tell()
