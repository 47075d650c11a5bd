"""A generation request from beginning to end, the same for every dialect.

beginning = Turn(state).begin(model, …, ask, …)    to hold: model, session, place in the queue
await finish(request, beginning, whole)            one object; or `await stream(request, …)`
await turn.close()                                 everything is given back, whatever happened
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from quire.api.llm import LLM
from quire.server.asking import Common
from quire.server.errors import ApiError, about, naming
from quire.server.models import ServedModel
from quire.server.run import Ask, Run
from quire.server.session import ServedSession
from quire.server.state import State
from quire.server.wire import Disconnected, EventStream, gone, while_connected

T = TypeVar("T")
_SOON_S = 0.5
"""What takes longer has begun to answer before it is known how that ends."""
MakeAsk = Callable[[LLM, ServedSession | None], Awaitable[Ask]]
"""Makes an ask out of what a client sent, once the model is there and the session its own."""


async def asked_model(request: Request, body: Common) -> ServedModel:
    """The model that a request names; else its session's, wherever that is, or the first one."""
    state: State = request.app.state.quire
    strict = request.url.path.startswith("/v1/")
    means_none = not body.model or not (strict or body.model in state.models.by_name)
    if body.session_id is not None and means_none:
        state.admission.check()  # a file may have to be read for it
        with naming("session_id"):
            return (await state.sessions.get(body.session_id)).model
    return state.models.find(body.model, strict)


class Turn:
    """A run, and what it holds besides pages."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.stack = AsyncExitStack()
        self.run: Run
        self._closing: asyncio.Future[None] | None = None

    async def begin(
        self, model: ServedModel, session_id: str | None, make: MakeAsk, field: str
    ) -> Turn:
        """Waits for everything it takes; what fails gives back what was taken before.

        `field` is where in the request its text is.
        """
        state = self.state
        try:
            state.admission.check()
            llm = await self.stack.enter_async_context(state.models.using(model))
            session = None
            if session_id is not None:
                with naming("session_id"):
                    session = await state.sessions.get(session_id, model)
                    self.stack.enter_context(session.owned("generating"))
            with about(field):
                with state.arrivals.coming():
                    ask = await make(llm, session)
                self.run = await self.stack.enter_async_context(_started(state, ask))
            if session is not None:
                self.stack.push_async_callback(self._end_session)
            self.run.at_end = self.close
            self.run.wake()  # it may be over already
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
        await ask.model.call(lambda: session.settle(job, self.run.failure))
        if self.state.settings.save_sessions == "turn":
            await self.state.sessions.try_to_save(session)  # the answer was given, come what may

    async def close(self) -> None:
        """Gives everything back; once is enough, and whoever comes later waits for it too."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self.stack.aclose())
        await asyncio.shield(self._closing)


async def stream(
    request: Request, beginning: Coroutine[Any, Any, Turn],
    chunks: Callable[[Turn], AsyncGenerator[bytes, None]], refused: Callable[[ApiError], bytes],
    form: type[EventStream] = EventStream,
) -> EventStream:  # fmt: skip
    """Sends chunks as they come; the turn ends with them, or with the client.

    What is refused soon is refused by its status. Whoever has to wait for longer, in the queue or
    for a model, hears at once that there is a stream, and then what becomes of it.
    """
    state: State = request.app.state.quire
    begun = asyncio.ensure_future(beginning)
    left = asyncio.ensure_future(gone(request.receive))
    kept = False
    try:
        await asyncio.wait({begun, left}, timeout=_SOON_S, return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            begun.result()
        elif left.done():
            raise Disconnected
        kept = True
    finally:
        left.cancel()
        if not kept:
            await _given_up(begun)

    known = False

    async def all_chunks() -> AsyncGenerator[bytes, None]:
        nonlocal known
        try:
            turn = await state.unless_over(begun)
            known = True
        except Exception as error:
            known, told = True, state.told(error)
            state.records.ends_as(told.status)
            yield refused(told)
            return
        async with aclosing(chunks(turn)) as made:
            async for chunk in made:
                yield chunk

    async def close() -> None:
        if not known:
            state.records.ends_as(499)
        await _given_up(begun)

    return form(all_chunks(), close)


async def _given_up(begun: asyncio.Future[Turn]) -> None:
    """Nobody waits any more: what it has come to is given back."""
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    if not begun.cancelled() and begun.exception() is None:
        await begun.result().close()


async def finish(
    request: Request, beginning: Coroutine[Any, Any, Turn],
    whole: Callable[[Turn], Coroutine[Any, Any, T]],
) -> T:  # fmt: skip
    """The whole of an answer that is not streamed; it ends when its client leaves."""
    turn = await while_connected(request, beginning, Turn.close)
    try:
        return await while_connected(request, whole(turn))
    finally:
        await turn.close()


def _check_lengths(ask: Ask) -> None:
    """Refuses what cannot fit before it waits for its turn."""
    engine = ask.model.llm.engine
    for prompt in ask.prompts if ask.session is None else ():
        if len(prompt) + int(ask.answers) > engine.n_ctx:  # an answer has a token at least
            raise engine.too_long(len(prompt))


@asynccontextmanager
async def _started(state: State, ask: Ask) -> AsyncIterator[Run]:
    """A request's turn: it waits for it, runs, and everything is given back at the end."""
    _check_lengths(ask)
    state.admission.check()
    state.records.asked(ask)
    matcher = await state.compilers.compile(ask)  # first: it needs none of the places
    async with AsyncExitStack() as stack:
        scored = ask.scores is not None  # one prompt after the other
        wanted = ask.n if scored else max(len(ask.prompts) * ask.n, 1)
        entering = state.admission.enter(ask.key, ask.priority, wanted)
        place = await stack.enter_async_context(entering)
        run = Run(ask, state.news, matcher, state.settings.speculate, place)
        state.runs.add(run)
        state.records.runs(run)
        stack.callback(state.runs.discard, run)
        stack.callback(run.close)
        if not ask.model.llm.engine.scheduler.active:
            await state.arrivals.gathered()
        await run.begin()
        yield run
