"""Constraints are compiled apart from everything else, with a deadline: they come from anybody."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from quire.engine.constrain import Matcher
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
        self.threads = ThreadPoolExecutor(_THREADS, "compiler")
        self._most = _THREADS + most
        self._here = 0

    async def compile(self, ask: Ask) -> Matcher | None:
        """A request's constraint, if it has one, with what its first mask takes."""
        if ask.constraint is None:
            return None
        if self._here >= self._most:
            raise ApiError(
                429, f"{self._here} constraints are compiled or wait for it, which is as many as "
                "--max-queue allows; try again later", code="queue_full",
            )  # fmt: skip
        self._here += 1
        try:
            return await self._compiled(ask)
        finally:
            self._here -= 1

    async def _compiled(self, ask: Ask) -> Matcher | None:
        llm, param = ask.model.llm, ask.constraint_in
        request = Request((), ask.sampling, ask.constraint)
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compiled() -> Matcher | None:
            loop.call_soon_threadsafe(begun.set)
            matcher = llm.matcher(request)
            if matcher is not None:
                matcher.warm()
            return matcher

        made = loop.run_in_executor(self.threads, compiled)
        try:
            await _turn(begun)
            with naming(param), constrained_in(param):
                async with asyncio.timeout(_SECONDS):
                    return await made
        except TimeoutError:
            raise ApiError(
                400, f"the constraint takes more than {_SECONDS:g} s to compile; make it simpler",
                code="constraint_too_complex", param=param,
            ) from None  # fmt: skip
        finally:
            made.cancel()  # it may not have begun


async def _turn(begun: asyncio.Event) -> None:
    """Until a thread is free; what others ask for is not the fault of whoever waits."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await begun.wait()
    except TimeoutError:
        raise ApiError(
            503, f"constraints of others have been compiled for {_PATIENCE_S:g} s; try again later",
            code="overloaded",
        ) from None  # fmt: skip
