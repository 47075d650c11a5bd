"""Constraints are compiled apart from everything else, with a deadline: they come from anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from quire.engine.constrain import Matcher
from quire.engine.daemons import begun
from quire.engine.request import Request
from quire.server.errors import ApiError, constrained_in, naming
from quire.server.run import Ask

_SECONDS = 5.0
"""That one may take, from when it begins."""
_PATIENCE_S = 30.0
"""That one may wait for those before it."""
_THREADS = 2


class Compilers:
    """A few threads; what overruns its time holds up constraints, and nothing else."""

    def __init__(self, most: int) -> None:
        self.free = asyncio.Semaphore(_THREADS)
        """A permit for each thread that may compile."""
        self.here = 0
        """Those who wait for a thread, or for what it makes."""
        self._most = _THREADS + most

    async def compile(self, ask: Ask) -> Matcher | None:
        """A request's constraint, if it has one, with what its first mask takes."""
        if ask.constraint is None:
            return None
        if self.here >= self._most:
            raise ApiError(
                429, f"{self.here} constraints are compiled or wait for it, which is as many as "
                "--max-queue allows; try again later", code="queue_full",
            )  # fmt: skip
        self.here += 1
        try:
            await self._turn()
            return await self._compiled(ask)
        finally:
            self.here -= 1

    async def _turn(self) -> None:
        """Until a thread is free; what others ask for is not the fault of whoever waits."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.free.acquire()
        except TimeoutError:
            raise ApiError(
                503, f"constraints of others have been compiled for {_PATIENCE_S:g} s; try again "
                "later", code="overloaded",
            ) from None  # fmt: skip

    async def _compiled(self, ask: Ask) -> Matcher | None:
        llm, param = ask.model.llm, ask.constraint_in
        request = Request((), ask.sampling, ask.constraint)

        def compiled() -> Matcher | None:
            matcher = llm.matcher(request)
            if matcher is not None:
                matcher.warm()
            return matcher

        made = self._begun(compiled)
        try:
            with naming(param), constrained_in(param):
                async with asyncio.timeout(_SECONDS):
                    return await asyncio.wrap_future(made)
        except TimeoutError:
            raise ApiError(
                400, f"the constraint takes more than {_SECONDS:g} s to compile; make it simpler",
                code="constraint_too_complex", param=param,
            ) from None  # fmt: skip

    def _begun(self, compiled: Callable[[], Matcher | None]) -> Future[Matcher | None]:
        """Has a thread begin, which is free again when it is done, whoever waits for it then."""
        loop = asyncio.get_running_loop()

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the server has ended, and did not wait for it
                loop.call_soon_threadsafe(self.free.release)

        try:
            made = begun(compiled)
        except BaseException:
            self.free.release()
            raise
        made.add_done_callback(done)
        return made
