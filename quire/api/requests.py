"""Requests on their way to the engine, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from quire.api.arguments import check_salt, constraint_of, sampling_of, stops_of
from quire.api.texts import Prompt, Texts, is_batch
from quire.engine.drafter import Speculator
from quire.engine.engine import Engine
from quire.engine.generation import Transcript
from quire.engine.loop import Job, Loop
from quire.engine.request import Request
from quire.engine.sequence import Sequence
from quire.models.active import ActiveSize
from quire.speculate import speculator
from quire.speculate.draft_model import Loaded
from quire.text.detokenize import Detokenizer
from quire.types import Completion, Constraint, Sampling, SamplingFields, Timings

Speculate: TypeAlias = str | Loaded | Speculator | None
"""Who drafts: a name of `quire.speculate.NAMES`, a smaller model, or a configured object."""


class Requests(Texts):
    """Starts requests on a model, from any thread."""

    engine: Engine
    loop: Loop
    load_s: float
    active: ActiveSize

    def starts(
        self, prompts: Prompt | Seq[Prompt], sampling: Sampling | None, speculate: Speculate,
        stop: str | Seq[str], constraint: Constraint | None, salt: str, fields: SamplingFields,
    ) -> list[Callable[[], Job]]:  # fmt: skip
        """What starts each request; the settings are checked now, once for all of them."""
        request = Request(
            (), sampling_of(sampling, fields), constraint_of(constraint), check_salt(salt),
            self.speculator(speculate),
        )  # fmt: skip

        def start(prompt: Prompt) -> Job:
            return self.start(replace(request, tokens=tuple(self.tokens_of(prompt))), stop)

        several: Any = prompts if is_batch(prompts) else [prompts]
        return [partial(start, prompt) for prompt in several]

    def start(
        self, request: Request, stop: str | Seq[str],
        session: Callable[[], Sequence] | None = None,
    ) -> Job:  # fmt: skip
        """A request under way, on a session's sequence or on one of its own.

        What takes long and touches no memory is done before the engine is asked.
        """
        stops = stops_of(stop)
        detokenizer = Detokenizer(self.tokenizer, stops, continuation=True)
        transcript = Transcript(detokenizer, watch=bool(stops))
        constraint = request.constraint
        matcher = None if constraint is None else self.engine.constrainer.compile(constraint)

        def begin() -> Job:
            sequence = session() if session else self.engine.new_sequence()
            return self.loop.start(sequence, request, transcript, matcher, keep=session is not None)

        return self.loop.call(begin)

    def end(self, job: Job) -> None:
        """Ends a request, or tidies up behind it."""
        if not job.done:
            self.loop.call(lambda: self.loop.end(job))

    async def done(self, job: Job) -> None:
        """Waits for a request."""
        while not job.done:
            job.take()
            await self.loop.wait_async(job)

    def completion(self, job: Job) -> Completion:
        """What a request came to; raises what made it fail."""
        if job.error:
            raise job.error
        cached = job.sequence.cached
        return Completion(
            text=job.text,
            token_ids=job.token_ids,
            logprobs=job.logprobs if job.request.sampling.logprobs is not None else None,
            finish_reason=job.finish_reason or "cancelled",
            prompt_tokens=job.prompt_tokens,
            cached_tokens=cached,
            timings=Timings(
                prefill_s=job.first - job.started,
                decode_s=job.last - job.first,
                first_token_s=job.first - job.started,
                prompt_tokens=job.prompt_tokens - cached,
                decoded_tokens=max(len(job.token_ids) - 1, 0),
                load_s=self.load_s,
                layers=self.active.layers,
                experts=self.active.experts,
            ),
            speculation=job.sequence.speculation,
        )

    def speculator(self, speculate: Speculate) -> Speculator | None:
        """Who drafts: by name, a loaded model, or as it is configured."""
        return None if speculate is None else speculator(speculate)
