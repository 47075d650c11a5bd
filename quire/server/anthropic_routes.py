"""`/v1/messages`: Anthropic's form of conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server import turn as turns
from quire.server.anthropic_blocks import Blocks, add_to, event_of
from quire.server.chat_routes import ChatBody, begin_chat, counted
from quire.server.conversation import spoken
from quire.server.dialect import new_id, stopped_by
from quire.server.errors import ApiError
from quire.server.turn import Turn
from quire.server.wire import as_json, event, read_as

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_WORDS = {"stop": "stop_sequences", "response_format": "output_config"}


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools are called, and which."""

    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the answer must look like."""

    format: dict[str, Any] | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """What a client sends; a session and a salt may be named as everywhere."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older place of what is `output_config.format` now."""
    session_id: str | None = None
    cache_salt: str | None = None

    def as_chat(self) -> ChatBody:
        """The same in OpenAI's words."""
        choice = self.tool_choice or ToolChoice()
        kind = choice.type
        if kind != "tool" and kind not in _CHOICES:
            known = ", ".join(_CHOICES)
            raise ApiError(400, f"tool_choice.type is {known} or tool", param="tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
        return ChatBody(
            model=self.model, messages=_conversation(self), max_tokens=self.max_tokens,
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            stop=self.stop_sequences, stream=self.stream,
            tools=[_tool(tool) for tool in self.tools or []] or None,
            tool_choice=named if kind == "tool" else _CHOICES[kind],
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            chat_template_kwargs=_thinking(self.thinking),
            response_format=(self.output_config or OutputConfig()).format or self.output_format,
            session_id=self.session_id, cache_salt=self.cache_salt,
        )  # fmt: skip


def _thinking(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """Templates of models that can think or not ask for this."""
    return {"enable_thinking": wanted.get("type") != "disabled"} if wanted else None


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        raise ApiError(400, f"tools are yours here, with a schema, not {kind!r:.80}", param="tools")
    schema = tool.get("input_schema", {"type": "object"})
    function = {"name": tool.get("name"), "parameters": schema}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _conversation(body: MessagesBody) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if body.system:
        made.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ApiError(400, f"messages[{number}].role is user or assistant", param="messages")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif isinstance(content, list):
            made += _blocks(str(role), content, f"messages[{number}]")
        else:
            raise ApiError(400, f"messages[{number}].content is missing", param="messages")
    return made


def _blocks(role: str, blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """A message of blocks: results of tools are messages of their own, before what is said."""
    texts, calls, results, thoughts = [], [], [], []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(id)}:
                told = _text(block.get("content") or "", where)
                results.append({"role": "tool", "tool_call_id": id, "content": told})
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                raise ApiError(
                    400, f"{where} has a block of type {kind!r:.80}; this model reads text only",
                    param="messages",
                )  # fmt: skip
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    said = bool(texts or calls or thoughts)
    return [*results, *([message] if said or not results else [])]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            raise ApiError(400, f"{where} has a block that is no text", param=where)
        texts.append(block["text"])
    return "".join(texts)


ERROR = {
    "type": "object", "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": {"type": "object"}},
}  # fmt: skip
"""The form of its errors."""


def _refused_event(error: ApiError) -> bytes:
    return event(error.as_anthropic(), "error")


async def messages(request: Request) -> Response:
    """The next turn of a conversation."""
    body = await read_as(request, MessagesBody)
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens: Field required", param="max_tokens")
    chat = body.as_chat()

    def answer(turn: Turn) -> _Answer:
        return _Answer(turn, chat.one_call, body.stop_sequences)

    beginning = begin_chat(request, chat, _WORDS)
    if chat.streams:
        return await turns.stream(
            request, beginning, lambda turn: answer(turn).events(), _refused_event
        )
    return as_json(await turns.finish(request, beginning, lambda turn: answer(turn).whole()))


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has."""
    body = (await read_as(request, MessagesBody)).as_chat()
    return as_json(await counted(request, body))


class _Answer:
    """Writes what comes in Anthropic's form."""

    def __init__(self, turn: Turn, one_call: bool, stops: list[str] | None) -> None:
        self._stops = stops
        self._state = turn.state
        self._run = turn.run
        self._one_call = one_call
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        self._head["model"] = turn.run.ask.model.name

    async def whole(self) -> dict[str, Any]:
        """One object."""
        content: list[dict[str, Any]] = []
        finish = "stop"
        async for part in spoken(self._run, self._one_call):
            add_to(content, part.answer)
            finish = part.finish_reason or finish
        content = content or [{"type": "text", "text": ""}]
        return {**self._head, "content": content, **self._end(finish), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each with its name."""
        blocks = Blocks()
        finish = "stop"
        try:
            start: dict[str, Any] = {
                **self._head, "content": [], "stop_reason": None, "stop_sequence": None,
                "usage": self._usage(),
            }  # fmt: skip
            yield event_of("message_start", message=start)
            async for part in spoken(self._run, self._one_call):
                finish = part.finish_reason or finish
                for made in blocks.add(part.answer):
                    yield made
            for made in blocks.close():
                yield made
            yield event_of("message_delta", delta=self._end(finish), usage=self._usage())
            yield event_of("message_stop")
        except Exception as error:
            yield _refused_event(self._state.told(error))

    def _end(self, finish: str) -> dict[str, Any]:
        stop = stopped_by(self._run, self._stops)
        reason = "stop_sequence" if stop else _REASONS.get(finish, "end_turn")
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, int]:
        """Tokens that were in memory already are counted apart."""
        job = self._run.jobs[0]
        cached = job.sequence.cached
        return {
            "input_tokens": job.prompt_tokens - cached, "output_tokens": len(job.token_ids),
            "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
        }  # fmt: skip
