"""Sessions: contexts that are appended to, branched and rewound."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from quire.api.appending import Appended
from quire.api.arguments import (
    Stop,
    check_pin,
    check_span,
    constraint_of,
    copied_notes,
    path_of,
    sampling_of,
)
from quire.api.copies import Uncopied
from quire.api.ending import Ending
from quire.api.stream import AsyncStream, Stream, end_soon, off_the_loop
from quire.engine.endings import Holder, Readers
from quire.engine.request import Request
from quire.engine.sequence import Mark, Sequence
from quire.engine.session_saving import Saving
from quire.engine.work import Job, Work
from quire.errors import RequestError
from quire.types import Completion, Constraint, Sampling, SamplingFields, shortened

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.api.requests import Speculate

T = TypeVar("T")


class Session(Uncopied, Appended):
    """A context that lives until it is closed; also a context manager.

    Any thread may use it. What several do at once happens one after the other, or is refused while
    something runs on it.
    """

    instead = "fork() makes a second one, save() a file of it"

    def __init__(
        self, llm: LLM, sequence: Sequence, marks: Mapping[str, Mark] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(llm, sequence, marks or {})
        self._llm = llm
        self.notes: dict[str, Any] = dict(notes or {})
        """Whatever a program wants to find again in a saved session; plain JSON."""
        self._end = Ending(llm.loop, sequence, self._marks)
        self._ref = llm.loop.when_gone(self, self._end)

    @property
    def sequence(self) -> Sequence:
        """What the engine knows it as."""
        return self._live()

    @property
    def tokens(self) -> list[int]:
        """Everything appended and generated so far."""
        return self._loop.call(lambda: self._live().tokens[:])

    @property
    def text(self) -> str:
        """Everything appended and generated so far, as text."""
        return self._llm.decode(self.tokens)

    @property
    def exact(self) -> bool:
        """Whether all of it was computed with this model's arithmetic, and so has its bits."""
        return self._live().exact

    @property
    def position(self) -> int:
        """Where the next token goes."""
        if self._loop.seat.endings.left:
            self._loop.call(lambda: None)
        return self._live().length

    def generate(
        self, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion:  # fmt: skip
        """Goes on from here; what it makes becomes part of the session."""
        holder = Holder()
        with holder.lock:
            job = self._start(sampling, speculate, stop, constraint, fields, holder)
            try:
                self._loop.wait(job)
            finally:
                self._llm.end(job)
        return self._llm.completion(job)

    async def agenerate(
        self, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion:  # fmt: skip
        """`generate` for coroutines; a task that is cancelled leaves what came until then."""
        from quire.engine.guest import guest_holder

        holder = guest_holder()
        start = partial(self._start, sampling, speculate, stop, constraint, fields, holder)
        with holder.lock:
            job = await off_the_loop(start, end_soon)
            try:
                await self._llm.done(job)
            finally:
                end_soon(job)
        return self._llm.completion(job)

    def stream(
        self, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Stream:  # fmt: skip
        """`generate` piece by piece; what came until it is closed stays part of the session."""
        readers = Readers()
        job = self._start(sampling, speculate, stop, constraint, fields, readers)
        return Stream(job, readers, self._llm.completion, self)

    def astream(
        self, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None,
        **fields: Unpack[SamplingFields],
    ) -> AsyncStream:  # fmt: skip
        """`stream` for `async for`."""
        return AsyncStream(
            partial(self._start, sampling, speculate, stop, constraint, fields),
            self._llm.completion, self,
        )  # fmt: skip

    def _start(
        self, sampling: Sampling | None, speculate: Speculate, stop: Stop,
        constraint: Constraint | None, fields: SamplingFields, holder: Holder | None = None,
    ) -> Job:  # fmt: skip
        self._live()
        chosen, speculator = sampling_of(sampling, fields), self._llm.speculator(speculate)
        request = Request((), chosen, constraint_of(constraint), speculate=speculator)
        return self._llm.start(request, stop, self._live, holder)

    def logits(self) -> NDArray[np.float32]:
        """Logits after the last token."""

        def known(sequence: Sequence, holder: Holder) -> NDArray[np.float32] | Work:
            if not sequence.length:
                raise RequestError("an empty session has no logits; append something first")
            if sequence.logits is None:
                self._engine.history.want_logits(sequence)
                return self._loop.compute(sequence, holder)
            return sequence.logits.copy()

        return self._computed(known)

    def fork(self) -> Session:
        """A second session with the same past and the same marks; they share every page."""
        notes = copied_notes(self.notes)  # what cannot be is refused before anything is held

        def fork() -> Session:
            twin = self._engine.fork(self._live())
            self._engine.history.share(self._marks.values())
            return Session(self._llm, twin, self._marks, notes)

        return self._loop.call_with_room(fork)

    def keep(self, pin: bool = False, ttl_s: float | None = None) -> Session:
        """Keeps this place for whatever begins the same; pinned, until ttl_s seconds are over.

        Prompts that are used again and again, and places in them that others branch off from.
        """

        check_pin(pin, ttl_s)

        def keep(sequence: Sequence, _: Holder) -> None:
            if not sequence.length or sequence.edited:
                raise RequestError("there is nothing to keep: no tokens, or some were taken out")
            if not sequence.shared:
                raise RequestError(
                    "this session came from a file, and its pages serve no other request; open it "
                    "with share=True if you trust the file so far"
                )
            self._engine.prefix.keep(sequence, pin, ttl_s)

        self._computed(keep)
        return self

    def remove(self, start: int, stop: int) -> Session:
        """Takes tokens out of the middle; the rest moves up and is not computed again.

        What comes later keeps what it saw of them; only the last token is computed anew, for its
        logits. It frees room in a context that is full.
        """

        def remove(sequence: Sequence, _: Holder) -> None:
            span = check_span(start, stop, sequence.length)
            self._engine.history.remove(sequence, *span)

        self._computed(remove)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it to a file, marks too; `llm.open` goes on from it without computing.

        Marks that memory has no room for beside it are kept as tokens, to be computed again.
        Of those that save under one name at once, one does so after the other: the file that stays
        is whole, and of the last.
        """
        model, where = self._llm.fingerprint, path_of(path)
        loop, holder = self._loop, Holder()

        def begin() -> Saving:
            made = Saving(self._engine, model, self._live(), self._marks, self.notes)
            loop.when_left(holder, holder, made.let_go)
            return made

        loop.seat.check_can_wait()
        with self._llm.writers.of(where), holder.lock:
            saving = loop.call_with_room(begin)
            try:
                saving.write(where, lambda: loop.call(saving.check))
            finally:
                loop.call(saving.let_go)

    def end_with(self, holder: Holder) -> Session:
        """Closes it when its holder waits no more, at the latest; on the loop."""
        self._loop.when_left(holder, self._ref, self._end)
        return self

    def close(self) -> None:
        """Gives its pages back; marks made in it go too."""
        self._open = False
        if not (self._end.done or self._loop.seat.forked):  # an interrupt may have come between
            self._loop.close_with(self._end)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _computed(self, ready: Callable[[Sequence, Holder], T | Work]) -> T:
        """Does something as soon as everything appended is in memory; work may come of it first."""
        loop, holder = self._loop, Holder()

        def attempt() -> T | Work:
            sequence = self._resting()
            self._engine.ensure_resident(sequence)
            if sequence.pending:
                return loop.compute(sequence, holder)
            return ready(sequence, holder)

        def tried() -> T | Work:
            if isinstance(found := loop.call_with_room(attempt), Work):
                loop.finish(found)
            return found

        with holder.lock:
            if isinstance(found := tried(), Work) and isinstance(found := tried(), Work):
                # Somebody took its pages before this thread was back, and may lose theirs to it.
                with nullcontext() if loop.seat.mine else loop.alone:
                    while isinstance(found := tried(), Work):
                        pass
        return found

    def __repr__(self) -> str:
        if not self._open:
            return "<Session closed>"
        marks = f", marks {', '.join(self._marks)}" if self._marks else ""
        return f"<Session {self._sequence.length} tokens{shortened(marks)}>"

    def _repr_html_(self) -> str:
        text = escape(self.text[-2000:]) if self._open else ""
        return f'<div style="white-space:pre-wrap">{text}</div><small>{escape(repr(self))}</small>'
