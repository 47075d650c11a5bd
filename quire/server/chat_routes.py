"""`/v1/chat/completions`: conversations, as the model's own template writes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.llm import LLM
from quire.api.texts import ChatPrompt
from quire.server import turn as turns
from quire.server.asking import MOST_TOPS, Common, in_thread
from quire.server.conversation import Spoken, chat_prompt, read_prompt, spoken
from quire.server.errors import ApiError, worded
from quire.server.logprobs import chat_form
from quire.server.progress import Watched
from quire.server.run import Ask
from quire.server.session import ServedSession
from quire.server.state import State
from quire.server.turn import Turn, asked_model
from quire.server.wire import DONE, FINGERPRINT, as_json, event, read_as, refused
from quire.text.answers import Answer
from quire.types import Constraint


class ChatBody(Common, kw_only=True):
    """What a client sends."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: Any = None
    """What tools were called before; it is not read, and nobody is to think that it is."""
    function_call: Any = None

    @property
    def template_options(self) -> dict[str, Any]:
        """What the template is told besides; how much to think, in words that templates know."""
        effort, told = self.reasoning_effort, {}
        if effort is not None:
            told = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return told | (self.chat_template_kwargs or {})

    @property
    def one_call(self) -> bool:
        """Whether an answer calls one tool at most."""
        return self.parallel_tool_calls is False

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tops(self) -> int | None:
        """How many likeliest tokens are told, if log-probabilities are."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        if not 0 <= (self.top_logprobs or 0) <= MOST_TOPS:
            raise ApiError(400, f"top_logprobs is 0 to {MOST_TOPS}", param="top_logprobs")
        return self.top_logprobs or 0


async def chat(request: Request) -> Response:
    """The next turn of a conversation."""
    body = await read_as(request, ChatBody)
    newer = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    beginning = begin_chat(request, body, newer)
    if body.streams:
        return await turns.stream(
            request, beginning, lambda turn: _Answer(turn, body).chunks(), refused
        )
    return as_json(await turns.finish(request, beginning, lambda turn: _Answer(turn, body).whole()))


async def begin_chat(request: Request, body: ChatBody, words: Mapping[str, str]) -> Turn:
    """Puts a conversation on the engine, whatever dialect and words it came in."""
    with worded(words):
        return await _begun(request, body, words)


async def _begun(request: Request, body: ChatBody, words: Mapping[str, str]) -> Turn:
    state: State = request.app.state.quire
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, old):
            raise ApiError(400, f"{old} is not read any more: send it as {new}", param=old)
    body.sampling(body.most_tokens, body.tops)  # refused before it waits for a model
    n, stops, constraint, salt = body.choices, body.stops(), body.constraint(), body.salt
    constraint_in = body.constraint_in or "tools"
    model = await asked_model(request, body)

    async def ask(llm: LLM, session: ServedSession | None) -> Ask:
        def read() -> tuple[ChatPrompt, Constraint | None]:
            prompt = chat_prompt(
                llm, body.messages, body.tools, body.tool_choice, body.template_options,
                body.add_generation_prompt, body.continue_final_message, body.one_call,
            )  # fmt: skip
            return prompt, prompt.only(constraint)

        prompt, only = await in_thread(read)
        sampling = body.sampling(body.most_tokens, body.tops, llm.chat_sampling)
        return Ask(
            model, [prompt.tokens], sampling, n, (*stops, *prompt.stop), only,
            words.get(constraint_in, constraint_in), salt, request.scope["quire.key"],
            body.rank, session, prompt, whole=True,
        )  # fmt: skip

    return await Turn(state).begin(model, body.session_id, ask, "messages")


async def input_tokens(request: Request) -> Response:
    """How many tokens a conversation has, without answering it."""
    body = await read_as(request, ChatBody)
    return as_json({"object": "chat.completion.input_tokens", **await counted(request, body)})


async def counted(request: Request, body: ChatBody) -> dict[str, int]:
    """The tokens that the model would read before it answers."""
    state: State = request.app.state.quire
    model = state.models.find(body.model, strict=request.url.path.startswith("/v1/"))
    async with state.models.using(model) as llm:
        prompt: ChatPrompt = await in_thread(
            read_prompt, llm, body.messages, body.tools, body.tool_choice,
            body.template_options, body.add_generation_prompt, body.continue_final_message,
        )  # fmt: skip
        return {"input_tokens": len(prompt.tokens)}


class _Answer:
    """Writes what comes in OpenAI's form for chats."""

    def __init__(self, turn: Turn, body: ChatBody) -> None:
        self._state = turn.state
        self._run = turn.run
        self._llm = turn.run.llm
        self._body = body
        self._one_call = body.one_call
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._model = turn.run.ask.model.name
        self._created = int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        """One object."""
        parts: list[list[Spoken]] = [[] for _ in range(self._run.choices)]
        async for part in spoken(self._run, self._one_call):
            parts[part.choice].append(part)
        choices = []
        for index, said in enumerate(parts):
            answer = Answer.of([one.answer for one in said])
            logprobs = await self._logprobs([one for part in said for one in part.logprobs])
            choices.append({
                "index": index, "message": _message(answer), "logprobs": logprobs,
                "finish_reason": said[-1].finish_reason,
            })  # fmt: skip
        return {**self._head("chat.completion"), "choices": choices, **self._end()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        going = self._run.choices
        calls: dict[int, int] = {}  # how many each choice has made
        head = self._head("chat.completion.chunk")
        usage = {"usage": None} if self._body.wants_usage else {}
        watched = Watched(self._run, self._body.return_progress, self._body.timings_per_token)
        try:
            async for progress in watched.prompt():
                yield event({**head, "choices": [_choice(0, {}, None, None)], **usage, **progress})
            async for part in spoken(self._run, self._one_call):
                if part.choice not in calls:
                    calls[part.choice] = 0
                    first = _choice(part.choice, {"role": "assistant", "content": ""}, None, None)
                    yield event({**head, "choices": [first], **usage})
                if part.answer or part.logprobs:
                    delta = _delta(part.answer, calls[part.choice])
                    calls[part.choice] += len(part.answer.tool_calls)
                    logprobs = await self._logprobs(part.logprobs)
                    choice = _choice(part.choice, delta, logprobs, None)
                    yield event(
                        {**head, "choices": [choice], **usage, **watched.token(part.choice)}
                    )
                if part.finish_reason:
                    going -= 1
                    end = self._end(usage=False) if not going and not usage else {}
                    choice = _choice(part.choice, {}, None, part.finish_reason)
                    yield event({**head, "choices": [choice], **usage, **end})
            if self._body.wants_usage:
                yield event({**head, "choices": [], **self._end()})
        except Exception as error:
            yield event(self._state.told(error).as_dict())
        yield DONE

    async def _logprobs(self, logprobs: list[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return await chat_form(self._llm.tokenizer, logprobs)

    def _end(self, usage: bool = True) -> dict[str, Any]:
        run = self._run
        end = {"timings": run.timings(), "memory": run.memory()}
        return {"usage": run.usage(), **end} if usage else end


def _choice(index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [call.as_dict() for call in answer.tool_calls]
    return message


def _delta(answer: Answer, calls_before: int) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if answer.reasoning:
        delta["reasoning_content"] = answer.reasoning
    if answer.text or not answer:
        delta["content"] = answer.text
    if answer.tool_calls:
        numbered = enumerate(answer.tool_calls, calls_before)
        delta["tool_calls"] = [{"index": at, **call.as_dict()} for at, call in numbered]
    return delta
