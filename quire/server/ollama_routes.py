"""Ollama's `/api/generate` and `/api/chat`: streams of JSON lines."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Coroutine
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server import turn as turns
from quire.server.chat_routes import ChatBody, begin_chat
from quire.server.completions_routes import CompletionBody, begin_completion
from quire.server.conversation import Spoken, spoken
from quire.server.dialect import LineStream, line
from quire.server.errors import ApiError
from quire.server.keep_alive import keep
from quire.server.logprobs import chat_form
from quire.server.models import ServedModel
from quire.server.run import Run
from quire.server.state import State
from quire.server.turn import Turn
from quire.server.wire import JSON, as_json, read_as, whole
from quire.text.answers import Answer
from quire.types import TokenLogprob

_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
_WORDS = {ours: theirs for theirs, ours in _NAMES.items()} | {"response_format": "format"}
_TAKEN = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "num_predict",
)  # fmt: skip


class OllamaBody(msgspec.Struct, kw_only=True):
    """What both have in common."""

    model: str = ""
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    session_id: str | None = None
    cache_salt: str | None = None

    def common(self) -> dict[str, Any]:
        """Fields of our own requests."""
        said = {k: whole(v) for k, v in (self.options or {}).items() if v is not None}
        chosen = _DEFAULTS | said
        fields = {_NAMES.get(name, name): chosen[name] for name in _TAKEN if name in chosen}
        if fields.get("max_tokens") in (-1, -2):  # until it ends by itself
            fields["max_tokens"] = None
        if self.format:
            if self.format != "json" and isinstance(self.format, str):
                raise ApiError(400, "format is 'json' or a JSON schema", param="format")
            schema = self.format if isinstance(self.format, dict) else {"type": "object"}
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        return {
            **fields, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs,
            "stream": self.streams, "model": self.model.removesuffix(":latest"),
            "session_id": self.session_id, "cache_salt": self.cache_salt,
        }  # fmt: skip

    @property
    def streams(self) -> bool:
        """Here a stream is what comes unless it is not wanted."""
        return self.stream is not False

    @property
    def template(self) -> dict[str, Any] | None:
        """What the model's template is told besides."""
        if self.think is None:
            return None
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **effort}


class GenerateBody(OllamaBody, kw_only=True):
    """A prompt."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: list[str] | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """A conversation."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {"type": ["string", "object"]}},
}  # fmt: skip
"""The form of its errors: a text, or OpenAI's, which is that of what keeps anybody from a route."""


KINDS = (JSON, "", "application/x-www-form-urlencoded", "application/octet-stream")
"""Ollama takes JSON whatever it is called: to curl it is a form, to aiohttp bytes, to some nothing.

Pages of other servers cannot make use of that: where a request comes from is checked before.
"""


def served(request: Request, name: str) -> ServedModel:
    """A model by its name; Ollama's clients may add a tag."""
    state: State = request.app.state.quire
    return state.models.find(name.removesuffix(":latest"))


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def generate(request: Request) -> Response:
    """Continues a prompt, or answers it as the first message of a conversation."""
    body = await read_as(request, GenerateBody, KINDS)
    model = served(request, body.model)
    if body.images:
        raise ApiError(400, "images are not supported; leave them out")
    keep(model, body.keep_alive)
    if not body.prompt:
        return await _only_kept(request, model, {"response": ""})
    if body.raw or body.suffix:
        plain = _typed(CompletionBody, body, prompt=body.prompt, suffix=body.suffix)
        beginning = begin_completion(request, plain, _WORDS)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
        chat = _typed(ChatBody, body, messages=messages, chat_template_kwargs=body.template)
        beginning = begin_chat(request, chat, _WORDS)
    return await _answer(request, beginning, body.streams, _generated)


async def chat(request: Request) -> Response:
    """The next turn of a conversation."""
    body = await read_as(request, OllamaChatBody, KINDS)
    model = served(request, body.model)
    keep(model, body.keep_alive)
    if not body.messages:
        return await _only_kept(request, model, {"message": {"role": "assistant", "content": ""}})
    messages = [_message(one, number) for number, one in enumerate(body.messages)]
    fields = {"messages": messages, "tools": body.tools, "chat_template_kwargs": body.template}
    beginning = begin_chat(request, _typed(ChatBody, body, **fields), _WORDS)
    return await _answer(request, beginning, body.streams, _said)


def _typed(form: Any, body: OllamaBody, **fields: Any) -> Any:
    """One of our own requests; options of a wrong type are refused."""
    try:
        return msgspec.convert({**body.common(), **fields}, form)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"options: {error}", param="options") from None


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message in OpenAI's words: arguments of calls are text there."""
    if message.get("images"):
        raise ApiError(400, f"messages[{number}] has images; this model reads text only")
    said = {name: value for name, value in message.items() if value is not None}
    made = {"content": "", **said}  # Ollama's own client leaves out what is empty
    if thought := made.pop("thinking", None):
        made["reasoning_content"] = thought
    calls = []
    called = made.pop("tool_calls", [])
    for at, call in enumerate(called if isinstance(called, list) else [called]):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise ApiError(400, f"messages[{number}] has a call that is none", param="messages")
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        calls.append({"id": f"call_{number}_{at}", "type": "function", "function": function})
    return made | ({"tool_calls": calls} if calls else {})


async def _only_kept(request: Request, model: ServedModel, empty: dict[str, Any]) -> Response:
    """Nothing is asked for but that the model is there, or is not."""
    state: State = request.app.state.quire
    reason = "unload" if model.keep_s == 0 else "load"
    if reason == "unload":
        await state.models.unload_idle()
        if not model.loaded:  # nor was it: what was said is over
            model.keep_s = None
    else:
        async with state.models.using(model):
            pass
    told = {"model": model.name, "created_at": now(), **empty}
    return as_json({**told, "done": True, "done_reason": reason})


def _generated(answer: Answer) -> dict[str, Any]:
    thinking = {"thinking": answer.reasoning} if answer.reasoning else {}
    return {"response": answer.text, **thinking}


def _said(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["thinking"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in answer.tool_calls
        ]
    return {"message": message}


async def _answer(
    request: Request, beginning: Coroutine[Any, Any, Turn], streams: bool, form: Any
) -> Response:
    if streams:
        return await turns.stream(
            request, beginning, lambda turn: _lines(turn, form), _refused_line, LineStream
        )
    return as_json(await turns.finish(request, beginning, lambda turn: _whole(turn.run, form)))


def _refused_line(error: ApiError) -> bytes:
    return line(error.as_ollama())


async def _parts(run: Run) -> AsyncGenerator[Spoken, None]:
    """What comes, with or without a template."""
    if run.ask.chat is None:
        async for delta in run.deltas():
            yield Spoken(0, Answer(delta.text), delta.logprobs, delta.finish_reason)
    else:
        async for part in spoken(run):
            yield part


async def _logprobs(run: Run, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    """Of the tokens that came, where that was asked for."""
    if run.ask.sampling.logprobs is None:
        return {}
    return {"logprobs": (await chat_form(run.llm.tokenizer, logprobs))["content"]}


async def _whole(run: Run, form: Any) -> dict[str, Any]:
    said = [part async for part in _parts(run)]
    logprobs = await _logprobs(run, [one for part in said for one in part.logprobs])
    answer = Answer.of([part.answer for part in said])
    return {**_head(run), **form(answer), **_end(run, said[-1].finish_reason or "stop"), **logprobs}


async def _lines(turn: Turn, form: Any) -> AsyncGenerator[bytes, None]:
    run, finish = turn.run, "stop"
    try:
        async for part in _parts(run):
            finish = part.finish_reason or finish
            if part.answer or part.logprobs:
                told = {**form(part.answer), **await _logprobs(run, part.logprobs)}
                yield line({**_head(run), **told, "done": False})
        yield line({**_head(run), **form(Answer()), **_end(run, finish)})
    except Exception as error:
        yield _refused_line(turn.state.told(error))


def _head(run: Run) -> dict[str, Any]:
    return {"model": run.ask.model.name, "created_at": now()}


def _end(run: Run, finish: str) -> dict[str, Any]:
    """Durations are nanoseconds."""
    job = run.jobs[0]
    read, made = int((job.first - job.started) * 1e9), int((job.last - job.first) * 1e9)
    return {
        "done": True, "done_reason": "length" if finish == "length" else "stop",
        "total_duration": read + made, "load_duration": 0,
        "prompt_eval_count": job.prompt_tokens, "prompt_eval_duration": read,
        "eval_count": len(job.token_ids), "eval_duration": made,
    }  # fmt: skip
