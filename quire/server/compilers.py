"""Constraints are compiled apart from everything else, with a deadline: they come from anybody."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from quire.api.llm import LLM
from quire.engine.constrain import Matcher
from quire.engine.request import Request
from quire.server.errors import ApiError, constrained_in, naming

_SECONDS = 5.0
_THREADS = 2


class Compilers:
    """A few threads; what overruns its time holds up constraints, and nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "compiler")

    async def compile(self, llm: LLM, request: Request, param: str | None) -> Matcher | None:
        """A request's constraint, with what its first mask takes; `param` is where it came from."""

        def compiled() -> Matcher | None:
            matcher = llm.matcher(request)
            if matcher is not None:
                matcher.warm()
            return matcher

        made = asyncio.get_running_loop().run_in_executor(self._threads, compiled)
        try:
            with naming(param), constrained_in(param):
                async with asyncio.timeout(_SECONDS):
                    return await made
        except TimeoutError:
            raise ApiError(
                400, f"the constraint takes more than {_SECONDS:g} s to compile; make it simpler",
                code="constraint_too_complex", param=param,
            ) from None  # fmt: skip
