"""`/v1/embeddings` and Ollama's `/api/embed`: texts as vectors."""

from __future__ import annotations

import base64
import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from quire.api.llm import LLM
from quire.api.vectors import unit
from quire.server.admission import Place
from quire.server.aside import computed
from quire.server.asking import in_thread
from quire.server.errors import ApiError, about
from quire.server.keep_alive import keep
from quire.server.models import ServedModel
from quire.server.ollama_routes import KINDS, served
from quire.server.prompts import prompts_of
from quire.server.state import State
from quire.server.wire import as_json, read_as, while_connected

_AT_ONCE = 16
Texts = str | dict[str, Any] | list[Any]
"""A text, token ids, both in turn, or a list of such."""


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """What OpenAI's clients send."""

    input: Texts
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


class EmbedBody(msgspec.Struct, kw_only=True):
    """What Ollama's clients send; `prompt` is the older form, for one vector."""

    model: str = ""
    input: Texts | None = None
    prompt: str | None = None
    keep_alive: float | str | None = None
    dimensions: int | None = None


async def embeddings(request: Request) -> Response:
    """Vectors in OpenAI's form."""
    state: State = request.app.state.quire
    body = await read_as(request, EmbeddingsBody)
    form = body.encoding_format or "float"
    if form not in ("float", "base64"):
        raise ApiError(400, "encoding_format is float or base64", param="encoding_format")
    model = state.models.find(body.model, strict=request.url.path.startswith("/v1/"))
    vectors, n_tokens = await _vectors(request, model, body.input, body.dimensions)
    data = [
        {"object": "embedding", "index": at, "embedding": _written(vector, form)}
        for at, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return as_json({"object": "list", "data": data, "model": model.name, "usage": usage})


async def embed(request: Request) -> Response:
    """Vectors in Ollama's form."""
    body = await read_as(request, EmbedBody, KINDS)
    model = served(request, body.model)
    keep(model, body.keep_alive)
    begun = time.perf_counter_ns()
    given = body.input if body.input is not None else body.prompt
    if given is None:
        raise ApiError(400, "input is missing: a text, or a list of them", param="input")
    vectors, n_tokens = await _vectors(request, model, given, body.dimensions)
    if body.input is None:
        return as_json({"embedding": vectors[0].tolist()})
    return as_json({
        "model": model.name, "embeddings": vectors.tolist(), "prompt_eval_count": n_tokens,
        "total_duration": time.perf_counter_ns() - begun, "load_duration": 0,
    })  # fmt: skip


async def _vectors(
    request: Request, model: ServedModel, given: Texts, width: int | None
) -> tuple[NDArray[np.float32], int]:
    """A vector of length 1 for each text, and how many tokens those have."""
    state: State = request.app.state.quire
    async with state.models.using(model) as llm:
        with about("input"):
            tokens: list[list[int]] = await in_thread(_tokens, llm, given)
            place = state.admission.enter(request.scope["quire.key"], 0, 1)
            vectors = await while_connected(request, _embedded(place, model, tokens))
        if width is not None:
            vectors = _shortened(vectors, width)
        return vectors, sum(map(len, tokens))


async def _embedded(
    place: AbstractAsyncContextManager[Place], model: ServedModel, tokens: list[list[int]]
) -> NDArray[np.float32]:
    """Waits for a place; then some at a time, so that others have their turn in between."""
    made = []
    async with place:
        for at in range(0, len(tokens), _AT_ONCE):
            make = partial(model.llm.embedding, tokens[at : at + _AT_ONCE])
            made.append((await computed(model, make)).vectors)
    return unit(np.concatenate(made))


def _tokens(llm: LLM, given: Texts) -> list[list[int]]:
    made = prompts_of(llm, given, param="input")
    if not all(made):
        raise ApiError(400, "input has a text without tokens", param="input")
    return made


def _shortened(vectors: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The first numbers of each, as long as before."""
    if not 1 <= width <= vectors.shape[1]:
        most = vectors.shape[1]
        raise ApiError(400, f"dimensions is 1 to {most} here, not {width}", param="dimensions")
    cut = vectors[:, :width].copy()
    cut /= np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return cut


def _written(vector: NDArray[np.float32], form: str) -> Any:
    if form == "float":
        return vector.tolist()
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
