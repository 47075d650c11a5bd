"""`/v1/chat/completions`: conversations, as the model's own template writes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.llm import LLM
from quire.server import turn as turns
from quire.server.asking import Common, in_thread
from quire.server.conversation import chat_text
from quire.server.errors import ApiError
from quire.server.logprobs import chat_form
from quire.server.run import Ask, Delta
from quire.server.state import State
from quire.server.turn import Turn
from quire.server.wire import DONE, as_json, event, read_as


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
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

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
        return self.top_logprobs or 0


async def chat(request: Request) -> Response:
    """The next turn of a conversation."""
    state: State = request.app.state.quire
    body = await read_as(request, ChatBody)
    model = state.models.find(body.model, strict=request.url.path.startswith("/v1/"))
    sampling = body.sampling(body.most_tokens, body.tops)
    n, stops, constraint = body.choices, body.stops(), body.constraint()

    async def ask(llm: LLM) -> Ask:
        session = None
        if body.session_id is not None:
            session = await state.sessions.get(body.session_id, model)
        text = await in_thread(
            chat_text, llm, body.messages, body.tools, body.chat_template_kwargs,
            body.add_generation_prompt, body.continue_final_message,
        )  # fmt: skip
        tokens = await in_thread(llm.text_tokens, text)
        return Ask(
            model, [tokens], sampling, n, stops, constraint, body.cache_salt or "",
            request.scope["quire.key"], body.rank, session, whole=True,
        )  # fmt: skip

    turn = await turns.begin(request, state, model, ask)
    answer = _Answer(turn, model.name, body)
    if body.streams:
        return turns.stream(turn, answer.chunks())
    return as_json(await turns.finish(request, turn, answer.whole()))


class _Answer:
    """Writes what comes in OpenAI's form for chats."""

    def __init__(self, turn: Turn, model: str, body: ChatBody) -> None:
        self._state = turn.state
        self._run = turn.run
        self._llm = turn.run.ask.model.llm
        self._body = body
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._model = model
        self._created = int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    async def whole(self) -> dict[str, Any]:
        """One object."""
        parts: list[list[Delta]] = [[] for _ in self._run.jobs]
        async for delta in self._run.deltas():
            parts[delta.choice].append(delta)
        choices = []
        for index, deltas in enumerate(parts):
            message = {"role": "assistant", "content": "".join(d.text for d in deltas)}
            logprobs = self._logprobs([one for d in deltas for one in d.logprobs])
            choices.append({
                "index": index, "message": message, "logprobs": logprobs,
                "finish_reason": deltas[-1].finish_reason,
            })  # fmt: skip
        return {**self._head("chat.completion"), "choices": choices, **self._end()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        going = len(self._run.jobs)
        fresh = set(range(going))
        head = self._head("chat.completion.chunk")
        usage = {"usage": None} if self._body.wants_usage else {}
        try:
            async for delta in self._run.deltas():
                if delta.choice in fresh:
                    fresh.discard(delta.choice)
                    first = _choice(delta.choice, {"role": "assistant", "content": ""}, None, None)
                    yield event({**head, "choices": [first], **usage})
                if delta.text or delta.logprobs:
                    logprobs = self._logprobs(delta.logprobs)
                    choice = _choice(delta.choice, {"content": delta.text}, logprobs, None)
                    yield event({**head, "choices": [choice], **usage})
                if delta.finish_reason:
                    going -= 1
                    end = self._end(usage=False) if not going and not usage else {}
                    choice = _choice(delta.choice, {}, None, delta.finish_reason)
                    yield event({**head, "choices": [choice], **usage, **end})
            if self._body.wants_usage:
                yield event({**head, "choices": [], **self._end()})
        except Exception as error:
            yield event(self._state.told(error).as_dict())
        yield DONE

    def _logprobs(self, logprobs: list[Any]) -> dict[str, Any] | None:
        return chat_form(self._llm.tokenizer, logprobs) if self._body.logprobs else None

    def _end(self, usage: bool = True) -> dict[str, Any]:
        run = self._run
        end = {"timings": run.timings(), "memory": run.memory()}
        return {"usage": run.usage(), **end} if usage else end


def _choice(index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
