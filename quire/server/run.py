"""One request on the engine, followed from the event loop.

A dialect makes an `Ask` out of what a client sent, starts it, iterates over the deltas of its run
and writes the end from `usage`, `timings` and `memory`. Leaving the run ends it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.api.stream import end_soon
from quire.api.texts import ChatPrompt
from quire.engine.constrain import Matcher
from quire.engine.drafter import Speculator
from quire.engine.generation import Transcript
from quire.engine.request import Request
from quire.engine.work import Job
from quire.server.admission import Place
from quire.server.errors import constrained_in
from quire.server.follow import News, Signal
from quire.server.models import ServedModel
from quire.server.scored import Scored
from quire.server.timings import timings
from quire.server.usage import memory, usage
from quire.types import Constraint, Sampling, TokenLogprob

if TYPE_CHECKING:
    from quire.server.session import ServedSession

GoesOn = Callable[[Request, Transcript, Matcher | None], Callable[[], Job]]
"""Makes what starts a job on something that is there already."""


@dataclass(frozen=True)
class Ask:
    """What is asked of the engine, whatever dialect it was written in."""

    model: ServedModel
    prompts: list[list[int]]
    """Token ids; with a session, one prompt that comes behind what it holds."""
    sampling: Sampling
    n: int = 1
    """Answers to each prompt."""
    stop: tuple[str, ...] = ()
    constraint: Constraint | None = None
    constraint_in: str | None = None
    """The field of the request that it came from, as its client calls it."""
    salt: str = ""
    key: str = ""
    """Who asks, for fairness."""
    priority: int = 0
    """Lower comes first."""
    session: ServedSession | None = None
    chat: ChatPrompt | None = None
    """The conversation that the prompt was made from, which says how to read the answer."""
    scores: int | None = None
    """Whether prompts' own tokens are scored, with so many of the likeliest at each place."""
    answers: bool = True
    """Whether anything is generated, or prompts are only scored."""
    whole: bool = False
    """With a session: whether the prompt is the whole conversation, which it goes back for."""


class Delta(NamedTuple):
    """What came for one choice since the last time."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class Run:
    """Jobs of one request: choice `i` belongs to prompt `i // n`.

    At most so many run at a time as it has places for; others begin as those end.
    """

    def __init__(
        self, ask: Ask, news: News, matcher: Matcher | None, speculate: Speculator | None,
        place: Place,
    ) -> None:  # fmt: skip
        self.ask = ask
        self.llm = ask.model.llm
        """Its model, also once that is given back: a slow client is still told of its answer."""
        self._speculate = speculate
        self._place = place
        self.jobs: list[Job] = []
        self._live: list[Job] = []
        self._rest: deque[Request] = deque()
        self._begun = False
        self._filling: asyncio.Future[None] | None = None
        self.scores: list[list[TokenLogprob]] = []
        """Of all tokens of each prompt but the first, where they are scored."""
        self._news = news
        self._matcher = matcher
        self._texts = iter(self.llm.transcripts(ask.stop, self.choices))
        self.at_end: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Gives back what was held for it, besides pages; it may be called more than once."""
        self._ending: asyncio.Future[None] | None = None
        self._changed = Signal()
        self.failure: BaseException | None = None

    async def begin(self) -> None:
        """Puts it on the engine, or what there is a place for."""
        if self.ask.scores is None:
            for prompt in self.ask.prompts:
                self._rest += self._requests(prompt)
            await self._begin_more()
        else:
            for prompt in self.ask.prompts:
                await self._begin_scored(prompt, self.ask.scores)
        self._begun = True
        self.wake()  # what came before anybody listened

    async def _begin_more(self) -> None:
        free = self._place.answers - self._going
        more = [self._rest.popleft() for _ in range(min(free, len(self._rest)))]
        await self._begin([self._prepared(one) for one in more])

    async def _fill(self) -> None:
        """Begins more in the places of those that ended."""
        try:
            self._place.fit(self._going, len(self._rest))
            await self._begin_more()
        except Exception as error:
            self._rest.clear()
            self.failure = error
        finally:
            self._filling = None
        self.wake()  # more may have ended meanwhile

    async def _begin(self, begins: list[Callable[[], Job]]) -> None:
        jobs = await self.ask.model.call(partial(_begin_all, begins, self._tell), self._undo)
        self.jobs += jobs
        self._live += jobs

    def _undo(self, jobs: list[Job]) -> None:
        """Its client left as they began; on the loop."""
        for job in jobs:
            job.loop.end(job)
            if self.ask.session is not None:
                self.ask.session.settle(job, self.failure)

    async def _begin_scored(self, prompt: list[int], top: int) -> None:
        """A prompt's own tokens first; the first answer goes on from them, others share them."""
        ask = self.ask
        scored = await Scored.of(ask.model, prompt, top, ask.salt)
        try:
            goes_on = partial(scored.beginning, answers=ask.answers)
            first, *others = self._requests(prompt)
            begins = [self._prepared(first, goes_on)]
            begins += [self._prepared(one) for one in others]
            await self._begin(begins)
        finally:
            await scored.close()
        self.scores.append(scored.logprobs)

    def _requests(self, prompt: list[int]) -> list[Request]:
        """One for each answer to a prompt."""
        ask, made = self.ask, []
        for n in range(ask.n):
            sampling = ask.sampling
            if sampling.seed is not None and n:
                sampling = replace(sampling, seed=(sampling.seed + n) % 2**64)
            made.append(Request(
                tuple(prompt), sampling, ask.constraint, ask.salt, self._speculate, ask.key,
                ask.priority,
            ))  # fmt: skip
        return made

    def _prepared(self, request: Request, goes_on: GoesOn | None = None) -> Callable[[], Job]:
        """What starts a job, on the loop."""
        ask, llm = self.ask, self.llm
        transcript = next(self._texts)
        matcher = self._matcher and self._matcher.copy()  # one for all answers, a copy for each
        if goes_on is not None:
            return goes_on(request, transcript, matcher)
        if ask.session is not None:
            return ask.session.beginning(request, transcript, matcher, ask.whole)

        def begin() -> Job:
            sequence = llm.engine.new_sequence()
            return llm.loop.start(sequence, request, transcript, matcher, keep=False)

        return begin

    def _tell(self) -> None:
        self._news.tell(self)

    def wake(self) -> None:
        """Something came of one of its jobs.

        What was held is given back when all of them are done, whether or not somebody reads it.
        """
        self._changed.wake()
        if self._filling is not None or not self._begun:
            return
        if self._rest and self._going < self._place.answers:
            self._filling = asyncio.ensure_future(self._fill())
        elif self.at_end and self._ending is None and not self._going and not self._rest:
            self._ending = asyncio.ensure_future(self.at_end())

    @property
    def _going(self) -> int:
        self._live = [job for job in self._live if not job.done]  # it is asked at every token
        return len(self._live)

    def fail(self, error: BaseException) -> None:
        """The engine broke down; from any thread."""
        self.failure = error
        self._tell()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, until all jobs are done; raises what made one fail."""
        error: BaseException | None = None
        seen, going = [0] * self.choices, list(range(self.choices))
        while going and error is None:
            for index in going[: bisect_left(going, len(self.jobs))]:  # others have not begun
                job = self.jobs[index]
                done = job.done  # asked first: what comes later is taken next time
                if error := job.error:
                    break
                text, at = job.take(), seen[index]
                tokens = job.token_ids[at:]
                seen[index] += len(tokens)
                if done:
                    going.remove(index)
                if text or tokens or done:
                    logprobs = job.logprobs[at : seen[index]]
                    yield Delta(index, text, tokens, logprobs, _finish(job) if done else None)
            if going and error is None:
                await self._changed.wait()
                error = self.failure
        if self.at_end:  # before a client hears of the end, and asks for the next thing
            await self.at_end()
        if error is not None:
            with constrained_in(self.ask.constraint_in):
                raise error

    def close(self) -> None:
        """Ends what still runs, before the next step, and begins no more."""
        self._rest.clear()
        if self._filling is not None:
            self._filling.cancel()
        _end_all(self.jobs)

    # -- what it came to ------------------------------------------------------------------------

    @property
    def choices(self) -> int:
        """How many answers there will be."""
        return len(self.ask.prompts) * self.ask.n

    @property
    def firsts(self) -> list[Job]:
        """The first job of each prompt."""
        return self.jobs[:: self.ask.n]

    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI counts them, and why those that were computed had to be."""
        return usage(self.jobs, self.firsts, self.ask.chat, self.llm.tokenizer)

    def memory(self) -> dict[str, int]:
        """What the jobs held when they ended, and at most."""
        return memory(self.jobs)

    def timings(self) -> dict[str, float]:
        """Under llama.cpp's names; of several choices, from the first start to the last token."""
        return timings(self.jobs, self.firsts)


def _begin_all(begins: list[Callable[[], Job]], tell: Callable[[], None]) -> list[Job]:
    """All of them, or none."""
    jobs: list[Job] = []
    try:
        for begin in begins:
            jobs.append(job := begin())
            job.told.append(tell)
    except BaseException:
        _end_all(jobs)
        raise
    return jobs


def _end_all(jobs: list[Job]) -> None:
    for job in jobs:
        end_soon(job)


def _finish(job: Job) -> str:
    return {"cancelled": "abort"}.get(str(job.finish_reason), str(job.finish_reason))
