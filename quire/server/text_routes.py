"""Text to tokens and back, and conversations to text."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.llm import LLM
from quire.api.texts import ChatPrompt
from quire.server.asking import check_ids, in_thread
from quire.server.conversation import most_read, read_prompt
from quire.server.errors import ApiError
from quire.server.state import State
from quire.server.wire import as_json, read_as


class TokenizeBody(msgspec.Struct, kw_only=True):
    """llama.cpp says content, vLLM prompt; messages are written by the template first."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class TemplateBody(msgspec.Struct, kw_only=True):
    """A conversation."""

    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation."""
    state: State = request.app.state.quire
    body = await read_as(request, TokenizeBody)
    async with state.models.using(state.models.find(body.model, strict=False)) as llm:
        special = body.add_special if body.add_special is not None else body.add_special_tokens
        if body.messages is not None:
            prompt: ChatPrompt = await in_thread(
                read_prompt, llm, body.messages, body.tools, None, body.chat_template_kwargs,
                body.add_generation_prompt,
            )  # fmt: skip
            ids = prompt.tokens
        else:
            given = body.content if body.content is not None else body.prompt
            if given is None:
                raise ApiError(400, "content is missing: the text to cut up", param="content")
            # vLLM's form adds the tokens that texts begin with, llama.cpp's does not.
            add = special if special is not None else body.content is None
            parse = body.parse_special is not False
            encode = partial(llm.tokenizer.encode, max_tokens=most_read(llm))
            ids = await in_thread(encode, given, add, parse)
        told: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": llm.n_ctx}
        if body.with_pieces:
            told["tokens"] = await in_thread(_pieces, llm, ids)
        return as_json(told)


def _pieces(llm: LLM, ids: list[int]) -> list[dict[str, Any]]:
    return [{"id": i, "piece": _piece(llm.tokenizer.token_bytes(i))} for i in ids]


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are no text by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state: State = request.app.state.quire
    body = await read_as(request, DetokenizeBody)
    async with state.models.using(state.models.find(body.model, strict=False)) as llm:
        if len(body.tokens) > (most := most_read(llm)):
            raise ApiError(400, f"at most {most:,} tokens at a time", param="tokens")
        text = await in_thread(llm.decode, check_ids(llm, body.tokens, "tokens"))
        return as_json({"content": text, "prompt": text})


async def apply_template(request: Request) -> Response:
    """A conversation as the model's template writes it."""
    state: State = request.app.state.quire
    body = await read_as(request, TemplateBody)
    async with state.models.using(state.models.find(body.model, strict=False)) as llm:
        prompt: ChatPrompt = await in_thread(
            read_prompt, llm, body.messages, body.tools, None, body.chat_template_kwargs,
            body.add_generation_prompt, body.continue_final_message,
        )  # fmt: skip
        return as_json({"prompt": prompt.text})
