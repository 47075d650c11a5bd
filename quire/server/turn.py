"""A generation request from beginning to end, the same for every dialect.

turn = await begin(request, state, model, ask)     held: model, session, place in the queue
async for delta in turn.run.deltas(): …            or `return stream(turn, chunks)`
await turn.close()                                 everything is given back
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import Request

from quire.api.llm import LLM
from quire.server.models import ServedModel
from quire.server.run import Ask, Run, started
from quire.server.state import State, log
from quire.server.wire import EventStream, while_connected

T = TypeVar("T")
MakeAsk = Callable[[LLM], Awaitable[Ask]]
"""Makes an ask out of what a client sent, once the model is there."""


class Turn:
    """A run, and what it holds besides pages."""

    def __init__(self, state: State, request: Request) -> None:
        self.state = state
        self.request = request
        self.stack = AsyncExitStack()
        self.run: Run

    async def begin(self, model: ServedModel, make: MakeAsk) -> Turn:
        """Waits for everything it takes; what fails gives back what was taken before."""
        try:
            self.state.admission.check()
            llm = await self.stack.enter_async_context(self.state.models.using(model))
            ask = await make(llm)
            if ask.session is not None:
                self.stack.enter_context(ask.session.owned("generating"))
            self.run = await self.stack.enter_async_context(started(self.state, ask))
            if ask.session is not None:
                self.stack.push_async_callback(self._end_session)
            self.run.at_end = self.close
        except BaseException:
            await self.stack.aclose()
            raise
        return self

    async def _end_session(self) -> None:
        """A session is left as it should be, and saved if that was asked for."""
        ask = self.run.ask
        assert ask.session is not None
        session, job = ask.session, self.run.jobs[0]
        self.run.close()
        await ask.model.call(lambda: session.settle(job))
        if self.state.settings.save_sessions == "turn":
            try:
                await self.state.sessions.save(session)
            except Exception:  # the answer was given: a disk that is full does not take it back
                log.exception("session %s could not be saved", session.id)

    async def close(self) -> None:
        """Gives everything back; once is enough."""
        await self.stack.aclose()


async def begin(request: Request, state: State, model: ServedModel, make: MakeAsk) -> Turn:
    """A turn that is on the engine; given up if its client leaves before."""
    turn = Turn(state, request)
    try:
        return await while_connected(request, turn.begin(model, make))
    except BaseException:
        await turn.close()  # it may have come to be while its client left
        raise


def stream(turn: Turn, chunks: AsyncGenerator[bytes, None]) -> EventStream:
    """Sends chunks as they come; the turn ends with them, or with the client."""
    return EventStream(chunks, turn.close)


async def finish(request: Request, turn: Turn, whole: Coroutine[Any, Any, T]) -> T:
    """The whole of an answer that is not streamed; it ends when its client leaves."""
    try:
        return await while_connected(request, whole)
    finally:
        await turn.close()
