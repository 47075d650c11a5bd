"""One session as a resource: who owns it, where it came from, and what it looks like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.api.session import Session
from quire.engine.constrain import Matcher
from quire.engine.generation import Transcript
from quire.engine.guest import Guest, guest_holder
from quire.engine.request import Request
from quire.engine.sequence import LOST, PARKED, Mark
from quire.engine.way_back import WayBack
from quire.engine.work import Job
from quire.errors import ClosedError, OutOfMemory
from quire.server.errors import ApiError
from quire.server.models import ServedModel

_TURN = "~turn"  # no client can name a mark so
NOTE = "quire.server"
"""Under this name a session's notes say what a server must know when it opens the file."""


class ServedSession:
    """A session under an id; one request at a time owns it."""

    _way_back: WayBack

    def __init__(
        self, id: str, session: Session, model: ServedModel, *, parent: str | None = None,
        root: str | None = None, ttl_s: float | None = None,
    ) -> None:  # fmt: skip
        self.id = id
        self.session = session
        self.model = model
        self.created = int(time.time())
        self.parent = parent
        self.root = root or id
        self.ttl_s = ttl_s
        self.saved: str | None = None
        """The file that it was last saved in, or opened from."""
        self.kept: bool | None = None
        """Whether a client saved it under its own id: that file outlives it; None: nobody did."""
        self.used = time.time()
        self.busy = ""
        """What whoever owns it now does with it."""

    @property
    def expires(self) -> float | None:
        """When it is closed if nobody uses it before."""
        return None if self.ttl_s is None else self.used + self.ttl_s

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return not self.busy and self.expires is not None and self.expires <= time.time()

    @contextmanager
    def owned(self, doing: str) -> Iterator[ServedSession]:
        """One at a time; others are refused."""
        if self.busy:
            raise ApiError(
                409, f"session {self.id!r} is {self.busy}; wait until that has ended",
                code="session_busy",
            )  # fmt: skip
        self.busy = doing
        try:
            yield self
        finally:
            self.busy = ""
            self.used = time.time()

    def beginning(
        self, request: Request, transcript: Transcript, matcher: Matcher | None, whole: bool
    ) -> Callable[[], Job]:
        """What starts a generation in it, on the loop.

        `whole`: the request has all tokens from the beginning; what is there already stays.
        """
        session, llm = self.session, self.model.llm

        def begin() -> Job:
            sequence, history = session.sequence, llm.engine.history
            tokens, common = request.tokens, sequence.length
            if whole:
                common = sequence.tokens.common(np.array(tokens, np.int32))
                tokens = tokens[common:]
            asked = replace(request, tokens=tokens, salt=sequence.salt)
            self._way_back = WayBack(history, sequence, common)
            try:
                if common < sequence.length:
                    history.truncate(sequence, common)
                job = llm.loop.start(sequence, asked, transcript, matcher, keep=True)
                if whole and not history.cuts_anywhere:
                    job.told.append(_first(job, self._mark_turn))
                return job
            except BaseException:
                self._way_back.go()
                self._way_back.drop()
                raise

        return begin

    def _mark_turn(self) -> None:
        """Marks the end of a prompt, where the next turn is sure to begin; on the loop.

        What was answered comes back as text and may be cut into other tokens, and a state cannot
        go back by many. Without room for it, the next turn computes more.
        """
        session = self.session
        if before := session.marks.get(_TURN):
            session.drop(before)
        with suppress(OutOfMemory):
            session.checkpoint(_TURN)

    @property
    def marks(self) -> dict[str, Mark]:
        """Those that clients made."""
        return {name: mark for name, mark in self.session.marks.items() if name != _TURN}

    def free_mark(self) -> str:
        """A name for the next mark, counted among those that clients see."""
        marks = self.marks
        number = len(marks) + 1
        while f"mark-{number}" in marks:
            number += 1
        return f"mark-{number}"

    async def append(self, tokens: list[int]) -> None:
        """Computes more tokens; whoever is cancelled meanwhile has appended nothing."""
        seat, holder = self.model.llm.loop.seat, guest_holder()
        with holder.lock:
            appending = await self.model.call(
                lambda: self.session.start_append(tokens, holder),
                lambda made: made.settle(keep=False),
            )
            work = appending.work
            guest = Guest(self.model.llm.loop, lambda: work.done)  # no output says that it is
            seat.add_guest(guest)
            try:
                await guest.future
                await self.model.call(lambda: appending.settle(keep=True))
            except asyncio.CancelledError:  # whoever owns it next finds it as it was
                await self.model.call(lambda: appending.settle(keep=False))
                raise
            finally:
                seat.remove_guest(guest)
        if work.error:
            raise work.error

    def settle(self, job: Job, failure: BaseException | None) -> None:
        """A generation is over; one that nothing came of, or that failed, is undone. On the loop.

        Whoever was told of an error, its own or a failure of the engine before it came to an end,
        asks again, and nothing is to be there twice.
        """
        broken = failure is not None and job.finish_reason in (None, "cancelled")
        if (job.error or broken or not job.token_ids) and not self.model.llm.engine.closed:
            self._way_back.go()
            self._drop_turn()
        self._way_back.drop()

    def _drop_turn(self) -> None:
        """Lets go of a mark of what was undone: its pages would be kept from others."""
        mark, tokens = self.session.marks.get(_TURN), self.session.sequence.tokens
        if mark and tokens.common(mark.record.tokens.array()) < len(mark.record.tokens):
            self.session.drop(mark)

    def look(self) -> dict[str, Any]:
        """What clients see of it; on the loop."""
        sequence = self.session.sequence
        held = self.model.llm.engine.memory.footprint(sequence.id)
        status = "parked" if sequence.status in (PARKED, LOST) else "idle"
        seen: dict[str, Any] = {
            "id": self.id, "object": "session", "created": self.created, "model": self.model.name,
            "position": sequence.length, "status": "generating" if self.busy else status,
            "parent": self.parent, "root": self.root,
            "checkpoints": [
                {"name": name, "position": len(mark.record.tokens)}
                for name, mark in self.marks.items()
            ],
            "memory": {
                "bytes": held.bytes, "bytes_shared": held.bytes_shared,
                "pages": held.pages, "pages_shared": held.pages_shared,
            },
        }  # fmt: skip
        if self.saved:
            seen["saved"] = self.saved
        if self.expires is not None:
            seen["expires"] = int(self.expires)
        notes = {name: value for name, value in self.session.notes.items() if name != NOTE}
        return seen | ({"notes": notes} if notes else {})

    def save(self, path: Path, kept: bool) -> int:
        """Writes it to a file; how many bytes that took."""
        self.session.notes[NOTE] = {
            "id": self.id, "model": self.model.name, "created": self.created,
            "parent": self.parent, "root": self.root, "ttl_s": self.ttl_s, "kept": kept,
        }  # fmt: skip
        self.session.save(path)
        return path.stat().st_size


def looked(sessions: list[ServedSession]) -> list[tuple[ServedSession, dict[str, Any]]]:
    """What clients see of those that are still open; on the loop."""
    seen = []
    for one in sessions:
        with suppress(ClosedError):  # somebody closed it before the loop came to look
            seen.append((one, one.look()))
    return seen


def _first(job: Job, do: Callable[[], None]) -> Callable[[], None]:
    """Does something when a job's first token has come, and it goes on."""
    done = False

    def tell() -> None:
        nonlocal done
        if not done and job.token_ids and not job.done:
            done = True
            do()

    return tell
