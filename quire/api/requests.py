"""Requests on their way to the engine, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.api.arguments import Stop, check_salt, constraint_of, sampling_of, stops_of
from quire.api.texts import Prompt, Texts
from quire.config import LoadConfig
from quire.engine.constrain import Matcher
from quire.engine.drafter import Speculator
from quire.engine.endings import Holder
from quire.engine.engine import Engine
from quire.engine.generation import Transcript
from quire.engine.loop import Loop
from quire.engine.request import Request
from quire.engine.sequence import Sequence
from quire.engine.work import Job
from quire.models.active import ActiveSize
from quire.speculate import speculator
from quire.speculate.draft_model import Loaded
from quire.text.calls import ToolChoice
from quire.text.detokenize import Detokenizer, StopStrings
from quire.text.gbnf import as_lark
from quire.types import Behind, Completion, Constraint, Grammar, Sampling, SamplingFields, Timings

if TYPE_CHECKING:
    from quire.api.session import Session

Speculate: TypeAlias = str | Loaded | Speculator | None
"""Who drafts: a name of `quire.speculate.NAMES`, a smaller model, or a configured object."""


class Options(SamplingFields, total=False):
    """What goes with a prompt, as keyword arguments."""

    best_of: int | None
    speculate: Speculate
    stop: Stop
    constraint: Constraint | None
    cache_salt: str


class ChatOptions(Options, total=False):
    """What goes with a conversation, as keyword arguments."""

    tools: Seq[Mapping[str, Any]] | None
    tool_choice: ToolChoice
    template_options: Mapping[str, Any] | None


class Requests(Texts):
    """Starts requests on a model, from any thread."""

    engine: Engine
    loop: Loop
    load_s: float
    active: ActiveSize
    settings: LoadConfig

    def session(self, cache_salt: str = "") -> Session:
        """An empty session."""
        raise NotImplementedError

    def new_session(self, salt: str) -> Session:
        """An empty session; on the loop."""
        raise NotImplementedError

    def request(
        self, sampling: Sampling | None, speculate: Speculate, constraint: Constraint | None,
        salt: str, fields: SamplingFields,
    ) -> Request:  # fmt: skip
        """A request without its prompt; the settings are checked now."""
        return Request(
            (), sampling_of(sampling, fields), constraint_of(constraint), check_salt(salt),
            self.speculator(speculate),
        )  # fmt: skip

    def start_prompt(
        self, request: Request, stop: Stop, prompt: Prompt, holder: Holder | None = None
    ) -> Job:
        """A request under way for a prompt."""
        asked = replace(request, tokens=tuple(self.tokens_of(prompt)))
        return self.start(asked, stop, holder=holder)

    def start(
        self, request: Request, stop: Stop,
        session: Callable[[], Sequence] | None = None, holder: Holder | None = None,
    ) -> Job:  # fmt: skip
        """A request under way, on a session's sequence or on one of its own.

        What takes long and touches no memory is done before the engine is asked.
        """
        (transcript,), matcher = self.transcripts(stop), self.matcher(request)

        def begin() -> Job:
            sequence = session() if session else self.engine.new_sequence()
            keep = session is not None
            return self.loop.start(sequence, request, transcript, matcher, keep, holder)

        return self.loop.call(begin)

    def transcripts(self, stop: Stop, n: int = 1) -> list[Transcript]:
        """Where the texts of n answers to a request come together."""
        watch = bool(stops := stops_of(stop))
        found = StopStrings(stops)
        texts = [Detokenizer(self.tokenizer, found, continuation=True) for _ in range(n)]
        return [Transcript(text, watch) for text in texts]

    def matcher(self, request: Request) -> Matcher | None:
        """A request's constraint, compiled."""
        constraint = request.constraint
        match constraint:
            case Grammar(str(text)):
                constraint = Grammar(as_lark(text))
            case Behind(constraint=Grammar(str(text))):
                constraint = replace(constraint, constraint=Grammar(as_lark(text)))
        return None if constraint is None else self.engine.constrainer.compile(constraint)

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
            exact_batches=self.settings.exact_batches,
        )

    def speculator(self, speculate: Speculate) -> Speculator | None:
        """Who drafts: by name, a loaded model, or as it is configured."""
        return None if speculate is None else speculator(speculate)
