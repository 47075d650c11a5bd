"""Log-probabilities in OpenAI's two forms.

Those of many tokens, with many others each, take long to write: a thread does that, and the event
loop goes on.
"""

from __future__ import annotations

import asyncio
import math
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from quire.server.wire import encode
from quire.text.tokenizer import Tokenizer
from quire.types import TokenLogprob

T = TypeVar("T")
_FEW = 1000
"""So many log-probabilities are written in a few milliseconds."""


async def _written(
    write: Callable[[Sequence[TokenLogprob]], T], logprobs: Sequence[TokenLogprob]
) -> T:
    if sum(1 + len(one.top) for one in logprobs) <= _FEW:
        return write(logprobs)
    return await asyncio.to_thread(write, logprobs)


async def chat_form(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As `/v1/chat/completions` tells them: bytes too, and the likeliest others."""
    return await _written(partial(_chat_form, tokenizer), logprobs)


def _chat_form(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def told(one: TokenLogprob) -> dict[str, Any]:
        top = [_told(tokenizer, token, value) for token, value in one.top]
        return {**_told(tokenizer, one.token_id, one.logprob), "top_logprobs": top}

    return {"content": _one_by_one(map(told, logprobs)), "refusal": None}


async def with_ids(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> msgspec.Raw:
    """As llama.cpp's `/completion` tells them: those of chats, with token ids."""
    return await _written(partial(_with_ids, tokenizer), logprobs)


def _with_ids(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> msgspec.Raw:
    def told(one: TokenLogprob) -> dict[str, Any]:
        top = [{"id": token, **_told(tokenizer, token, value)} for token, value in one.top]
        mine = {"id": one.token_id, **_told(tokenizer, one.token_id, one.logprob)}
        return {**mine, "top_logprobs": top}

    return _one_by_one(map(told, logprobs))


def _one_by_one(values: Iterable[Any]) -> msgspec.Raw:
    """A list as JSON: of a million values at once the event loop would write for half a second."""
    return msgspec.Raw(b"[" + b",".join(map(encode, values)) + b"]")


def _told(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def of_prompt(tokens: Sequence[int], scores: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Those of a whole prompt; nothing comes before its first token, so that has none."""
    return [TokenLogprob(tokens[0], math.nan, ()), *scores]


class Legacy:
    """As `/v1/completions` tells them, piece by piece: it knows where in the text it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    async def form(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """What is told of the next tokens."""
        return await _written(self._form, logprobs)

    def _form(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float | None] | None] = []
        for one in logprobs:
            data = self._tokenizer.token_bytes(one.token_id)
            tokens.append(_text_or_bytes(data))
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(data))
            top: dict[str, float | None] = {}
            for token, value in one.top:  # the likelier of two with the same text comes first
                text = _text_or_bytes(self._tokenizer.token_bytes(token))
                top.setdefault(text, _finite(value))
            top.setdefault(tokens[-1], _finite(one.logprob))  # OpenAI tells of the chosen one too
            tops.append(None if math.isnan(one.logprob) else top)
        return {
            "tokens": tokens, "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": tops, "text_offset": offsets,
        }  # fmt: skip


def _text_or_bytes(data: bytes) -> str:
    """A token's text; of one that is a part of a character its bytes, as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _finite(logprob: float) -> float | None:
    """JSON has no infinity; OpenAI says -9999 for what cannot be, and null where there is none."""
    return None if math.isnan(logprob) else max(float(logprob), -9999.0)
