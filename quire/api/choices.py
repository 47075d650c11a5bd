"""Several answers to one prompt: it is computed once, and forks of it go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire.api.arguments import Stop, whole_number
from quire.api.stream import end_all_soon, off_the_loop
from quire.api.texts import Prompt
from quire.engine.endings import Holder
from quire.engine.request import Request
from quire.engine.sequence import Sequence
from quire.engine.work import Job
from quire.errors import RequestError
from quire.types import Completion

if TYPE_CHECKING:
    from quire.api.generating import Generating
    from quire.api.session import Session

_MOST = 1024


def _count(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None or not 1 <= number <= _MOST:
        raise RequestError(f"{name} must be a whole number from 1 to {_MOST}, not {value!r:.80}")
    return number


@dataclass(frozen=True)
class Choices:
    """How many answers are made, and how many of them are given: those that are likeliest."""

    n: int
    made: int

    @classmethod
    def of(cls, n: int | None, best_of: int | None) -> Choices:
        """What was asked for."""
        asked = 1 if n is None else _count("n", n)
        made = asked if best_of is None else _count("best_of", best_of)
        if made < asked:
            raise RequestError(f"best_of is {made}, but {asked} answers (n) are to be given")
        return cls(asked, made)

    def request(self, request: Request) -> Request:
        """The request of all of them; to find the best, log-probabilities are needed."""
        if self.made == self.n or request.sampling.logprobs is not None:
            return request
        return replace(request, sampling=request.sampling.replace(logprobs=0))

    def start(
        self, llm: Generating, request: Request, stop: Stop, prompt: Prompt, holder: Holder
    ) -> list[Job]:
        """All answers to a prompt, under way for as long as the holder waits."""
        if self.made == 1:
            return [llm.start_prompt(request, stop, prompt, holder)]
        fork = self._forks(llm, request, stop, holder)
        with _root(llm, request, holder) as root:
            root.append(prompt)
            return llm.loop.call(lambda: fork(root.sequence))

    async def astart(
        self, llm: Generating, request: Request, stop: Stop, prompt: Prompt, holder: Holder
    ) -> list[Job]:
        """The same for coroutines; one that is cancelled does not wait for the whole prompt."""
        if self.made == 1:
            start = partial(self.start, llm, request, stop, prompt, holder)
            return await off_the_loop(start, end_all_soon)
        fork = await off_the_loop(partial(self._forks, llm, request, stop, holder))
        root = await off_the_loop(partial(_root, llm, request, holder))
        try:
            await root.aappend(prompt)
            begin = partial(llm.loop.call, lambda: fork(root.sequence))
            return await off_the_loop(begin, end_all_soon)
        finally:
            llm.loop.later(root.close)

    def _forks(
        self, llm: Generating, request: Request, stop: Stop, holder: Holder
    ) -> Callable[[Sequence], list[Job]]:
        """Sets all answers going on forks of the prompt, once that is computed; on the loop."""
        started = time.perf_counter()
        texts = llm.transcripts(stop, self.made)
        matcher = llm.matcher(request)
        requests = [_numbered(request, i) for i in range(self.made)]

        def fork(source: Sequence) -> list[Job]:
            jobs: list[Job] = []
            try:
                for one, text in zip(requests, texts, strict=True):
                    own, twin = matcher and matcher.copy(), llm.engine.fork(source)
                    jobs.append(llm.loop.start(twin, one, text, own, keep=False, holder=holder))
                    jobs[-1].started = started
                    twin.count_cached(source.cached)
            except BaseException:
                for job in jobs:
                    llm.loop.end(job)
                raise
            return jobs

        return fork

    def best(self, completions: list[Completion], request: Request) -> list[Completion]:
        """The likeliest ones, by the mean over their tokens, the best first."""
        if self.made == self.n:
            return completions
        ranked = sorted(completions, key=_likelihood, reverse=True)[: self.n]
        if request.sampling.logprobs is not None:
            return ranked
        return [replace(completion, logprobs=None) for completion in ranked]


def _root(llm: Generating, request: Request, holder: Holder) -> Session:
    """Where the prompt is computed."""
    return llm.loop.call(lambda: llm.new_session(request.salt).end_with(holder))


def _numbered(request: Request, number: int) -> Request:
    """The request of one of several answers: each has its own seed."""
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = sampling.replace(seed=(sampling.seed + number) % 2**64)
    return replace(request, tokens=(), sampling=sampling)


def _likelihood(completion: Completion) -> float:
    tokens = completion.logprobs or []
    return float(np.mean([token.logprob for token in tokens])) if tokens else -np.inf
