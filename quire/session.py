"""Sessions: contexts that are appended to, branched and rewound."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from quire.engine.sequence import Mark, Sequence
from quire.errors import RequestError
from quire.session_file import save_session
from quire.stream import Stream
from quire.types import Completion, Constraint, Request, Sampling, SamplingFields

if TYPE_CHECKING:
    from quire.llm import LLM, Speculate


class Session:
    """A context that lives until it is closed; also a context manager."""

    def __init__(
        self, llm: LLM, sequence: Sequence, marks: Mapping[str, Mark] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._llm = llm
        self._sequence = sequence
        self._marks: dict[str, Mark] = dict(marks or {})
        self.notes: dict[str, Any] = dict(notes or {})
        """Whatever a program wants to find again in a saved session; plain JSON."""
        self._open = True

    @property
    def tokens(self) -> list[int]:
        """Everything appended and generated so far."""
        return list(self._live().tokens)

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self._live().tokens)

    def append(self, prompt: str | Seq[int]) -> Session:
        """Adds text or token ids and computes them now."""
        sequence = self._resting()
        tokens = self._llm.tokens_of(prompt, add_special=not sequence.tokens)
        before = len(sequence.tokens)
        self._llm.engine.append(sequence, tokens)
        try:
            self._compute()
        except BaseException:
            self._llm.engine.stop(sequence)
            self._llm.engine.places.truncate(sequence, before)
            raise
        return self

    def generate(
        self, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: str | Seq[str] = (), constraint: Constraint | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion:  # fmt: skip
        """Goes on from here; what it makes becomes part of the session."""
        sequence = self._live()
        chosen = (sampling or Sampling()).replace(**fields)
        drafts = self._llm.speculator(speculate)
        request = Request((), chosen, constraint, speculate=drafts)
        job = self._llm.new_job(sequence, request, stop, keep=True)
        try:
            self._llm.jobs.finish([job])
        finally:
            self._llm.jobs.drop(job)
        return job.completion(self._llm.load_s, self._llm.extent)

    def stream(
        self, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: str | Seq[str] = (), constraint: Constraint | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Stream:  # fmt: skip
        """`generate` piece by piece; what came until it is closed stays part of the session."""
        chosen = (sampling or Sampling()).replace(**fields)
        drafts = self._llm.speculator(speculate)
        request = Request((), chosen, constraint, speculate=drafts)
        job = self._llm.new_job(self._live(), request, stop, keep=True)
        return Stream(self._llm, job, self)

    def logits(self) -> NDArray[np.float32]:
        """Logits after the last token."""
        sequence = self._live()
        if not sequence.tokens:
            raise RequestError("an empty session has no logits; append something first")
        if sequence.logits is None:
            self._llm.engine.places.want_logits(self._resting())
            self._compute()
        assert sequence.logits is not None
        return sequence.logits.copy()

    def fork(self) -> Session:
        """A second session with the same past; the two share every page."""
        return Session(self._llm, self._llm.engine.fork(self._live()), notes=deepcopy(self.notes))

    @property
    def marks(self) -> dict[str, Mark]:
        """The marks made in this session, by name."""
        return dict(self._marks)

    def checkpoint(self, name: str | None = None) -> Mark:
        """A mark of this place, under a name of this session; moves no bytes."""
        if name is None:
            made = (f"mark-{i}" for i in range(1, len(self._marks) + 2))
            name = next(mark for mark in made if mark not in self._marks)
        elif not isinstance(name, str) or not name or name in self._marks:
            raise RequestError(f"a mark needs a name that this session has not yet, not {name!r}")
        self._marks[name] = mark = self._llm.engine.places.mark(self._live(), name)
        return mark

    def drop(self, mark: Mark) -> Session:
        """Gives up a mark made in this session, and the pages that only it holds."""
        if self._live() and self._marks.get(mark.name) is not mark:
            raise RequestError(
                f"mark {mark.name!r} is none of this session; it has {[*self._marks]}"
            )
        self._llm.engine.memory.checkpoint_delete(self._marks.pop(mark.name).checkpoint)
        return self

    def rewind(self, to: Mark | int) -> Session:
        """Back to a mark, or by a negative number of tokens."""
        sequence = self._resting()
        n = len(sequence.tokens)
        if isinstance(to, Mark):
            self._llm.engine.places.restore(sequence, to)
        elif isinstance(to, int) and -n <= to < 0:
            self._llm.engine.places.truncate(sequence, n + to, self._marks.values())
        else:
            raise RequestError(f"rewind takes a mark, or -1 to -{n} tokens here, not {to!r}")
        return self

    def keep(self, pin: bool = False, ttl_s: float | None = None) -> Session:
        """Keeps this place for whatever begins the same; pinned, until ttl_s seconds are over.

        Prompts that are used again and again, and places in them that others branch off from.
        """
        sequence = self._resting()
        self._llm.engine.hold(sequence)
        self._compute()
        if not sequence.tokens or sequence.moved:
            raise RequestError("there is nothing to keep: no tokens, or some were taken out")
        self._llm.engine.prefix.keep(sequence, pin, ttl_s)
        return self

    def remove(self, start: int, stop: int) -> Session:
        """Takes tokens out of the middle; the rest moves up and is not computed again.

        What comes later keeps what it saw of them. It frees room in a context that is full.
        """
        sequence = self._resting()
        self._llm.engine.hold(sequence)
        self._compute()
        if not 0 <= start < stop <= len(sequence.tokens) or stop - start == len(sequence.tokens):
            raise RequestError(
                f"remove takes a part of the {len(sequence.tokens)} tokens, not {start} to {stop}"
            )
        self._llm.engine.places.remove(sequence, start, stop)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it to a file, marks too; `llm.open` goes on from it without computing."""
        save_session(
            path, self._llm.engine, self._llm.fingerprint, self._live(), self._marks, self.notes
        )

    def close(self) -> None:
        """Gives its pages back; marks made in it go too."""
        if self._open:
            self._open = False
            _end(self._llm, self._sequence, self._marks.values())

    def __del__(self) -> None:
        if self._open:
            llm, sequence, marks = self._llm, self._sequence, self._marks.values()
            llm.jobs.later(lambda: _end(llm, sequence, marks))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> Sequence:
        if not self._open:
            raise RequestError("this session is closed; open another with llm.session()")
        self._llm.engine.check_open()
        return self._sequence

    def _resting(self) -> Sequence:
        """The sequence, while no stream runs on it."""
        self._llm.jobs.check_idle(self._live())
        return self._sequence

    def _compute(self) -> None:
        """Steps until everything appended is in memory."""
        sequence = self._resting()
        if sequence.pending:
            self._llm.engine.activate(sequence)
        while sequence.pending:
            self._llm.jobs.step()
            if sequence.error:
                error, sequence.error = sequence.error, None
                raise error

    def __repr__(self) -> str:
        state: Any = f"{len(self._sequence.tokens)} tokens" if self._open else "closed"
        return f"<Session {state}>"


def _end(llm: LLM, sequence: Sequence, marks: Iterable[Mark]) -> None:
    """Gives back what a session holds, unless its model has done so already."""
    if not llm.engine.closed:
        llm.jobs.cancel(sequence)
        for mark in marks:
            llm.engine.memory.checkpoint_delete(mark.checkpoint)
        llm.engine.close(sequence)
