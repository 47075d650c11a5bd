"""What memory holds, and how much it may."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import OutOfMemory
from quire.server.errors import ApiError, worded
from quire.server.models import ServedModel
from quire.server.state import State
from quire.server.wire import as_json, read_as


class BudgetBody(msgspec.Struct, kw_only=True):
    """A new budget."""

    budget_bytes: int
    model: str | None = None


class ForgetBody(msgspec.Struct, kw_only=True):
    """Whose cached prefixes go; without a salt, everybody's."""

    salt: str | None = None
    model: str | None = None


_SIZES = ("budget_bytes", "used_bytes", "compute_bytes", "process_bytes")
_PARTS = (
    "breakdown", "devices", "uses", "stats", "checkpoints", "prefix", "tiers", "preemption",
)  # fmt: skip


def _meant(state: State, name: str | None) -> ServedModel:
    """The model that is named; without a name the first, or rather the first that is loaded."""
    found = state.models.find(name)
    return found if found.loaded or name or not state.models.loaded else state.models.loaded[0]


async def report(state: State, name: str | None = None) -> dict[str, Any]:
    """`llm.memory.as_dict()` of a model, and what all of several hold together.

    To look is not to use: nothing is loaded for it, or stays loaded.
    """
    models, model = state.models, _meant(state, name)
    told: dict[str, Any] = {"model": model.name, **dict.fromkeys(_SIZES, 0)}
    told |= {part: {} for part in _PARTS}
    with model.kept():
        if model.loaded:
            told |= await model.call(model.llm.memory.as_dict)
        if (budget := models.budget) is not None:
            held = {one.name: one.llm.budget.used for one in models.loaded}
            all_of_them = {"used_bytes": sum(held.values()), "models": held}
            told |= {"budget_bytes": budget.limit, "shared": all_of_them}
    return told


async def memory(request: Request) -> Response:
    """What memory holds now."""
    state: State = request.app.state.quire
    return as_json(await report(state, request.query_params.get("model")))


async def resize(request: Request) -> Response:
    """Another budget from now on; 409 where what is held does not fit it."""
    state: State = request.app.state.quire
    body = await read_as(request, BudgetBody)
    if body.budget_bytes < 1:
        raise ApiError(400, "budget_bytes is a number of bytes above 0", param="budget_bytes")
    model = _meant(state, body.model)
    async with state.models.using(model) as llm:
        try:
            await model.call(lambda: llm.resize(body.budget_bytes))
        except OutOfMemory as error:
            raise ApiError(409, str(error), code="budget", param="budget_bytes") from error
        model.budget_bytes = body.budget_bytes
    return as_json(await report(state, body.model))


async def forget(request: Request) -> Response:
    """Drops cached prefixes of a model, or of all."""
    state: State = request.app.state.quire
    body = await read_as(request, ForgetBody)
    models = [state.models.find(body.model)] if body.model else state.models.loaded
    for model in models:
        with model.kept():
            if model.loaded:  # one that is not has none
                with worded({"cache_salt": "salt"}):
                    await model.call(partial(model.llm.forget, body.salt))
    return as_json({"object": "memory.forgotten", "salt": body.salt})
