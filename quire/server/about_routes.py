"""What the server is: its health, its version, its models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.server.errors import ApiError
from quire.server.models import ServedModel
from quire.server.state import State
from quire.server.wire import as_json


async def live(request: Request) -> Response:
    """The process is there."""
    return as_json({"status": "ok"})


async def ready(request: Request) -> Response:
    """Requests are taken."""
    state: State = request.app.state.quire
    if not state.ready:
        raise ApiError(503, "the server is loading, or about to end", code="not_ready")
    return as_json({"status": "ok"})


async def version(request: Request) -> Response:
    """Which Quire this is."""
    return as_json({"version": quire.__version__})


async def models(request: Request) -> Response:
    """All models."""
    state: State = request.app.state.quire
    data = [await _told(state, one) for one in state.models.by_name.values()]
    names = list(state.models.by_name)
    ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}  # for Anthropic's client
    return as_json({"object": "list", "data": data, **ends})


async def model(request: Request) -> Response:
    """One model; without a name, as if the slash behind were none, all of them."""
    state: State = request.app.state.quire
    name = request.path_params["id"]
    return as_json(await _told(state, state.models.find(name))) if name else await models(request)


async def _told(state: State, model: ServedModel) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": model.name, "object": "model", "created": model.created, "owned_by": "quire",
        "loaded": model.loaded, "max_model_len": await state.models.context(model),
        "type": "model", "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
    }  # fmt: skip
    if model.loaded:
        told["meta"] = {
            "n_vocab": model.llm.tokenizer.n_vocab, "n_ctx": model.llm.n_ctx,
            "n_ctx_train": model.llm.model.n_ctx_train,
        }  # fmt: skip
    return told
