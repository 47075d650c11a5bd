"""Tokens on their way into a session."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Self

from quire.api.marks import Marked
from quire.api.requests import Requests
from quire.api.stream import off_the_loop
from quire.engine.endings import Holder
from quire.engine.sequence import Mark, Sequence
from quire.engine.way_back import WayBack
from quire.engine.work import Work
from quire.errors import QuireError


class Appending:
    """What is appended is kept whole or not at all, and that is decided once, on the loop.

    Until then nobody else works on the session; afterwards others may, and nothing of theirs is
    undone, however late somebody is interrupted.
    """

    def __init__(self, work: Work, way_back: WayBack) -> None:
        self.work = work
        self._way_back = way_back
        self._settled = False

    def settle(self, keep: bool) -> None:
        """Keeps the tokens if they are wanted and were computed; once is enough."""
        if self._settled:
            return
        self._settled = True
        work = self.work
        computed = work.done and not work.ended and work.error is None
        work.loop.end(work)  # what was not computed is undone
        if computed and not keep:
            work.undo()
        self._way_back.drop()


class Appended(Marked):
    """A sequence of the engine that is marked, rewound and appended to."""

    def __init__(self, llm: Requests, sequence: Sequence, marks: Mapping[str, Mark]) -> None:
        super().__init__(llm.loop, sequence, marks)
        self._texts = llm

    def append(self, prompt: str | Seq[int]) -> Self:
        """Adds text or token ids and computes them now."""
        holder = Holder()
        with holder.lock:
            appending = self._appending(prompt, holder)
            computed = False
            try:
                self._loop.wait(appending.work)
                computed = True
            finally:
                self._loop.call(lambda: appending.settle(keep=computed))
        return self._appended(appending)

    async def aappend(self, prompt: str | Seq[int]) -> Self:
        """`append` for coroutines; a task that is cancelled has appended nothing."""
        from quire.engine.guest import guest_holder

        loop, begun, holder = self._loop, list[Appending](), guest_holder()

        def undo() -> None:
            for appending in begun:
                appending.settle(keep=False)

        with holder.lock:
            try:
                await off_the_loop(lambda: begun.append(self._appending(prompt, holder)))
                await loop.wait_async(begun[0].work)
            except GeneratorExit:  # its event loop is gone
                loop.later(undo)
                raise
            except BaseException:
                await off_the_loop(lambda: loop.call(undo))
                raise
            loop.later(lambda: begun[0].settle(keep=True))
        return self._appended(begun[0])

    def _appended(self, appending: Appending) -> Self:
        """What comes of it: an error, where it failed or its session was closed meanwhile."""
        if appending.work.error:
            raise appending.work.error
        if appending.work.ended:
            self._live()
        return self

    def _appending(self, prompt: str | Seq[int], holder: Holder) -> Appending:
        """Starts it; text that somebody else was quicker than is no beginning any more."""

        def begin() -> Appending | None:
            stale = isinstance(prompt, str) and bool(self._live().length) != bool(behind)
            return None if stale else self.start_append(tokens, holder)

        while True:
            behind = self._live().length
            tokens = self._texts.tokens_of(prompt, behind)
            if (begun := self._loop.call(begin)) is not None:
                return begun

    def start_append(self, tokens: Seq[int], holder: Holder | None = None) -> Appending:
        """Lets the next steps compute more tokens, while the holder waits; on the loop."""
        sequence, engine = self._resting(), self._engine
        way_back = WayBack(engine.history, sequence)

        def undo() -> None:
            if engine.closed:
                return
            if self._open:
                engine.stop(sequence)
                with suppress(QuireError):  # what made it fail is the better error
                    way_back.go()
            way_back.drop()

        try:
            engine.append(sequence, tokens)
            made = Appending(self._loop.compute(sequence, holder, undo), way_back)
            self._loop.when_left(holder, made.work.ref, lambda: made.settle(keep=False))
            return made
        except BaseException:
            undo()
            raise
