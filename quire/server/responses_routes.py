"""`/v1/responses`: OpenAI's newer form, without what would have to be stored between requests."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server import turn as turns
from quire.server.chat_routes import ChatBody, begin_chat, counted
from quire.server.errors import ApiError
from quire.server.responses_stream import ResponseWriter, refused
from quire.server.turn import Turn
from quire.server.wire import as_json, read_as

_WORDS = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}
_ROLES = ("user", "assistant", "system", "developer")


class Reasoning(msgspec.Struct, kw_only=True):
    """How much a model thinks before it answers."""

    effort: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """What a client sends; a session and a salt may be named as everywhere."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None

    def as_chat(self) -> ChatBody:
        """The same as a chat."""
        for name in ("previous_response_id", "conversation", "background"):
            if getattr(self, name):
                raise ApiError(
                    400, f"{name} is not supported: nothing is stored between requests; send the "
                    "conversation, or name a session_id", param=name,
                )  # fmt: skip
        return ChatBody(
            model=self.model, messages=_messages(self), max_tokens=self.max_output_tokens,
            temperature=self.temperature, top_p=self.top_p, stream=self.stream,
            tools=[_tool(tool) for tool in self.tools or []] or None,
            tool_choice=self.tool_choice, parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text), chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=(self.reasoning or Reasoning()).effort,
            session_id=self.session_id, cache_salt=self.cache_salt,
            return_progress=self.return_progress, timings_per_token=self.timings_per_token,
        )  # fmt: skip

    def echoed(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        return {
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p,
            "tools": self.tools or [], "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": self.text or {"format": {"type": "text"}}, "metadata": self.metadata or {},
            "previous_response_id": None, "store": False, "background": False,
            "truncation": "disabled",
            "reasoning": {"effort": (self.reasoning or Reasoning()).effort, "summary": None},
        }  # fmt: skip


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise ApiError(400, "text.format is an object with a type", param="text")
    return form


async def responses(request: Request) -> Response:
    """The next turn of a conversation."""
    body = await read_as(request, ResponsesBody)
    chat = body.as_chat()

    def writer(turn: Turn) -> ResponseWriter:
        head = {"created_at": int(time.time()), "model": turn.run.ask.model.name, **body.echoed()}
        return ResponseWriter(turn, head, chat)

    beginning = begin_chat(request, chat, _WORDS)
    if chat.streams:
        return await turns.stream(request, beginning, lambda turn: writer(turn).events(), refused)
    return as_json(await turns.finish(request, beginning, lambda turn: writer(turn).whole()))


async def input_tokens(request: Request) -> Response:
    """How many tokens a conversation has, without answering it."""
    chat = (await read_as(request, ResponsesBody)).as_chat()
    return as_json({"object": "response.input_tokens", **await counted(request, chat)})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = tool.get("type")
        raise ApiError(400, f"tools are functions here, not {kind!r:.80}", param="tools")
    function = {k: tool[k] for k in ("name", "description", "parameters") if k in tool}
    return {"type": "function", "function": function}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if body.instructions:
        made.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        made += _item(item, number, made[-1] if made else {})
    return made


def _item(item: dict[str, Any], number: int, before: dict[str, Any]) -> list[dict[str, Any]]:
    """The message that an item is; calls one after the other are one message."""
    match item:
        case {
            "type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(given),
        }:  # fmt: skip
            function = {"name": name, "arguments": given or "{}"}
            call = {"id": id, "type": "function", "function": function}
            if before.get("role") == "assistant":
                before.setdefault("tool_calls", []).append(call)
                return []
            return [{"role": "assistant", "content": "", "tool_calls": [call]}]
        case {"type": "function_call_output", "call_id": str(id), "output": output}:
            return [{"role": "tool", "tool_call_id": id, "content": _content(output, number)}]
        case {"type": "reasoning"}:
            return []
        case {"role": str(role), "content": content} if role in _ROLES:
            return [{"role": role, "content": _content(content, number)}]
    kind = item.get("type", item.get("role"))
    raise ApiError(
        400, f"input[{number}] is {kind!r:.80}; there are messages, function_call, "
        "function_call_output and reasoning", param="input",
    )  # fmt: skip


def _content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ApiError(
                400, f"input[{number}] has a part that is no text; this model reads text only",
                param="input",
            )  # fmt: skip
        texts.append(text)
    return "".join(texts)
