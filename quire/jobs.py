"""Requests on their way from tokens to text: one job each, driven by the engine's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from quire.engine.engine import Engine
from quire.engine.sequence import Sequence
from quire.errors import QuireError, RequestError
from quire.models.extent import Extent
from quire.text.detokenize import Detokenizer
from quire.types import Completion, FinishReason, Request, StepOutput, Timings, TokenLogprob


class Job:
    """One request: collects its tokens, turns them into text, watches for stop strings."""

    def __init__(
        self, sequence: Sequence, request: Request, detokenizer: Detokenizer, keep: bool,
        text_ends: Callable[[int], bool] | None = None,
    ) -> None:  # fmt: skip
        self.sequence = sequence
        self.keep = keep  # whether the sequence lives on when the job is done
        self.request = request
        self.text_ends = text_ends  # for the engine, where a step can add more than one token
        self.prompt_tokens = len(sequence.tokens) + len(request.tokens)
        self.finish_reason: FinishReason | None = None
        self.error: QuireError | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._detokenizer = detokenizer
        self._pieces: list[str] = []
        self._taken = 0
        self._started = time.perf_counter()
        self._first = self._last = self._started

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    def take(self) -> str:
        """The text that came since the last call."""
        text = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return text

    def receive(self, output: StepOutput, end_ids: frozenset[int]) -> None:
        """Takes in what a step added."""
        self.error = output.error
        self._last = time.perf_counter()
        if not self.token_ids:
            self._first = self._last
        self.logprobs.extend(output.logprobs)
        for token in output.token_ids:
            self.token_ids.append(token)
            if token not in end_ids or self.request.sampling.ignore_eos:
                self._pieces.append(self._detokenizer.push(token))
        if self._detokenizer.stopped is not None:
            self.finish_reason = "stop"
        elif output.finish_reason:
            self.finish_reason = output.finish_reason
            self._pieces.append(self._detokenizer.flush())

    def completion(self, load_s: float, extent: Extent) -> Completion:
        """The whole result; raises what made the request fail."""
        if self.error:
            raise self.error
        return Completion(
            text="".join(self._pieces),
            token_ids=self.token_ids,
            logprobs=self.logprobs if self.request.sampling.logprobs is not None else None,
            finish_reason=self.finish_reason or "cancelled",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.sequence.cached,
            timings=Timings(
                prefill_s=self._first - self._started,
                decode_s=self._last - self._first,
                first_token_s=self._first - self._started,
                prompt_tokens=self.prompt_tokens - self.sequence.cached,
                decoded_tokens=max(len(self.token_ids) - 1, 0),
                load_s=load_s,
                layers=extent.layers,
                experts=extent.experts,
            ),
            speculation=self.sequence.speculation,
        )


class JobRunner:
    """Steps the engine and hands each output to the job it belongs to."""

    def __init__(self, engine: Engine, end_ids: frozenset[int]) -> None:
        self._engine = engine
        self._end_ids = end_ids
        self._jobs: dict[int, Job] = {}
        self._later: deque[Callable[[], None]] = deque()

    def start(self, job: Job) -> None:
        """Sets a job going on its sequence."""
        self.tidy()
        self.check_idle(job.sequence)
        self._jobs[job.sequence.id] = job
        try:
            self._deliver(self._engine.start(job.sequence, job.request, job.text_ends))
        except BaseException:
            self.drop(job)
            raise

    def check_idle(self, sequence: Sequence) -> None:
        """Refuses to work on a sequence that is generating."""
        if sequence.id in self._jobs:
            raise RequestError("a stream runs on this session; read it to its end or close it")

    def later(self, action: Callable[[], None]) -> None:
        """Does something before the next step: what is collected as garbage may come in one."""
        self._later.append(action)

    def tidy(self) -> None:
        """Does what was put off."""
        while self._later:
            self._later.popleft()()

    def finish(self, jobs: Seq[Job]) -> None:
        """Steps until all of these are done."""
        while any(not job.done for job in jobs):
            self.step()

    def step(self) -> None:
        """One step for everybody."""
        self.tidy()
        self._deliver(self._engine.step())

    def close(self) -> None:
        """Ends all jobs."""
        self.tidy()
        for job in list(self._jobs.values()):
            self.drop(job)

    def cancel(self, sequence: Sequence) -> None:
        """Ends what runs on a sequence, if anything does."""
        if job := self._jobs.get(sequence.id):
            self.drop(job)

    def drop(self, job: Job) -> None:
        """Ends a job, and its sequence unless that is to be kept; once is enough."""
        if self._jobs.get(job.sequence.id) is job:
            del self._jobs[job.sequence.id]
            if not job.done:
                job.finish_reason = "cancelled"
            end = self._engine.stop if job.keep else self._engine.close
            end(job.sequence)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            job = self._jobs.get(output.sequence)
            if job:
                job.receive(output, self._end_ids)
                if job.done:
                    self.drop(job)
