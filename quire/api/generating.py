"""Generating from prompts and conversations, on a model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import chain
from typing import Any, Unpack, overload

from quire.api.arguments import Stop, stops_of
from quire.api.choices import Choices
from quire.api.requests import ChatOptions, Options, Speculate
from quire.api.stream import AsyncStream, Stream, end_soon
from quire.api.texts import Messages, Prompt, Several, prompts_of
from quire.api.vectors import Vectors
from quire.engine.endings import Holder, Readers
from quire.engine.request import Request
from quire.engine.work import Job
from quire.text.calls import ToolChoice
from quire.types import Completion, Constraint, Sampling, SamplingFields


class Generating(Vectors):
    """Continues prompts and conversations, from any thread."""

    chat_sampling: Sampling
    """How `chat` samples where its caller leaves that open: as the model's files say."""

    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: None = None,
        **options: Unpack[Options],
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: int,
        **options: Unpack[Options],
    ) -> list[Completion]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Several, sampling: Sampling | None = None, *, n: None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Several, sampling: Sampling | None = None, *, n: int,
        **options: Unpack[Options],
    ) -> list[list[Completion]]: ...  # fmt: skip

    def generate(
        self, prompt: Prompt | Several, sampling: Sampling | None = None, *,
        n: int | None = None, best_of: int | None = None, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None, cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Any:  # fmt: skip
        """Continues a prompt, or several at once; a list of prompts gives a list of completions.

        With `n` there are that many answers to a prompt, in a list; it is computed once. `best_of`
        makes more of them and gives the likeliest. Fields of `Sampling` can be given by name.
        """
        request = self.request(sampling, speculate, constraint, cache_salt, fields)
        choices = Choices.of(n, best_of)
        prompts, several = prompts_of(prompt)
        jobs: list[list[Job]] = []
        holder = Holder()
        with holder.lock:
            try:
                for one in prompts:
                    jobs.append(choices.start(self, choices.request(request), stop, one, holder))
                for job in chain(*jobs):
                    self.loop.wait(job)
                answers = [self._answers(some, choices, request, n) for some in jobs]
            finally:
                for job in chain(*jobs):
                    self.end(job)
        return answers if several else answers[0]

    def _answers(
        self, jobs: list[Job], choices: Choices, request: Request, n: int | None
    ) -> Completion | list[Completion]:
        """What came of a prompt: one answer, or a list where n says so."""
        found = choices.best([self.completion(job) for job in jobs], request)
        return found[0] if n is None else found

    @overload
    async def agenerate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: None = None,
        **options: Unpack[Options],
    ) -> Completion: ...  # fmt: skip

    @overload
    async def agenerate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: int,
        **options: Unpack[Options],
    ) -> list[Completion]: ...  # fmt: skip

    @overload
    async def agenerate(
        self, prompt: Several, sampling: Sampling | None = None, *, n: None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...  # fmt: skip

    @overload
    async def agenerate(
        self, prompt: Several, sampling: Sampling | None = None, *, n: int,
        **options: Unpack[Options],
    ) -> list[list[Completion]]: ...  # fmt: skip

    async def agenerate(
        self, prompt: Prompt | Several, sampling: Sampling | None = None, *,
        n: int | None = None, best_of: int | None = None, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None, cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Any:  # fmt: skip
        """`generate` for coroutines; cancelling the task gives its pages back."""
        from quire.engine.guest import guest_holder

        request = self.request(sampling, speculate, constraint, cache_salt, fields)
        choices = Choices.of(n, best_of)
        prompts, several = prompts_of(prompt)
        jobs: list[list[Job]] = []
        holder = guest_holder()
        with holder.lock:
            try:
                for one in prompts:
                    asked = choices.request(request)
                    jobs.append(await choices.astart(self, asked, stop, one, holder))
                for job in chain(*jobs):
                    await self.done(job)
                answers = [self._answers(some, choices, request, n) for some in jobs]
            finally:
                for job in chain(*jobs):
                    end_soon(job)
        return answers if several else answers[0]

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None,
        cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> Stream:  # fmt: skip
        """Continues a prompt piece by piece; its `completion` is there once it is used up."""
        request = self.request(sampling, speculate, constraint, cache_salt, fields)
        readers = Readers()
        return Stream(self.start_prompt(request, stop, prompt, readers), readers, self.completion)

    def astream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, speculate: Speculate = None,
        stop: Stop = None, constraint: Constraint | None = None, cache_salt: str = "",
        **fields: Unpack[SamplingFields],
    ) -> AsyncStream:  # fmt: skip
        """`stream` for `async for`; leaving it early gives its pages back."""
        request = self.request(sampling, speculate, constraint, cache_salt, fields)
        return AsyncStream(partial(self.start_prompt, request, stop, prompt), self.completion)

    @overload
    def chat(
        self, messages: Messages, sampling: Sampling | None = None, *, n: None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Messages, sampling: Sampling | None = None, *, n: int,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...  # fmt: skip

    def chat(
        self, messages: Messages, sampling: Sampling | None = None, *,
        tools: Seq[Mapping[str, Any]] | None = None, tool_choice: ToolChoice = "auto",
        template_options: Mapping[str, Any] | None = None, n: int | None = None,
        stop: Stop = None, constraint: Constraint | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """The model's next turn in a conversation.

        It may call `tools` (functions with JSON schemas, as OpenAI has them): `tool_calls` of the
        completion has the calls, `reasoning` what it thought, `text` the rest. `tool_choice` is
        "auto", "none", "required", or the tool to call, by its name or as OpenAI has it; the
        arguments then fit the schema. `template_options` are the template's own, such as
        `{"enable_thinking": False}`. All other options are those of `generate`. Without `sampling`,
        the fields that are not given are those of `chat_sampling`, the model's own; `temperature=0`
        is greedy here too.
        """
        prompt = self.chat_prompt(messages, tools, tool_choice, template_options)
        chosen, stops = sampling or self.chat_sampling, [*stops_of(stop), *prompt.stop]
        return prompt.answered(
            self.generate(
                prompt.tokens, chosen, n=n, stop=stops, constraint=prompt.only(constraint),
                **options,
            )
        )  # fmt: skip

    @overload
    async def achat(
        self, messages: Messages, sampling: Sampling | None = None, *, n: None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...  # fmt: skip

    @overload
    async def achat(
        self, messages: Messages, sampling: Sampling | None = None, *, n: int,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...  # fmt: skip

    async def achat(
        self, messages: Messages, sampling: Sampling | None = None, *,
        tools: Seq[Mapping[str, Any]] | None = None, tool_choice: ToolChoice = "auto",
        template_options: Mapping[str, Any] | None = None, n: int | None = None,
        stop: Stop = None, constraint: Constraint | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """`chat` for coroutines."""
        from asyncio import to_thread

        prompt = await to_thread(self.chat_prompt, messages, tools, tool_choice, template_options)
        chosen, stops = sampling or self.chat_sampling, [*stops_of(stop), *prompt.stop]
        return prompt.answered(
            await self.agenerate(
                prompt.tokens, chosen, n=n, stop=stops, constraint=prompt.only(constraint),
                **options,
            )
        )  # fmt: skip
