"""The OpenAPI description, made from the types that bodies are read as."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import quire
from quire.server import (
    chat_routes,
    completions_routes,
    memory_routes,
    session_routes,
    text_routes,
)
from quire.server.other_routes import OTHER_BODIES, OTHER_ERRORS
from quire.server.wire import as_json

BODIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/tokenize"): text_routes.TokenizeBody,
    ("POST", "/detokenize"): text_routes.DetokenizeBody,
    ("POST", "/apply-template"): text_routes.TemplateBody,
    ("PATCH", "/v1/memory"): memory_routes.BudgetBody,
    ("POST", "/v1/memory/forget"): memory_routes.ForgetBody,
    ("POST", "/v1/completions"): completions_routes.CompletionBody,
    ("POST", "/completions"): completions_routes.CompletionBody,
    ("POST", "/v1/chat/completions"): chat_routes.ChatBody,
    ("POST", "/chat/completions"): chat_routes.ChatBody,
    ("POST", "/v1/sessions"): session_routes.SessionBody,
    ("POST", "/v1/sessions/{id}/append"): session_routes.AppendBody,
    ("POST", "/v1/sessions/{id}/fork"): session_routes.ForkBody,
    ("POST", "/v1/sessions/{id}/checkpoint"): session_routes.CheckpointBody,
    ("POST", "/v1/sessions/{id}/rewind"): session_routes.RewindBody,
    ("POST", "/v1/sessions/{id}/save"): session_routes.SaveBody,
    **OTHER_BODIES,
}
"""What each route reads."""

QUERIES = {("GET", "/v1/memory"): "model", ("GET", "/v1/sessions/{id}"): "tokens"}
"""What is asked for behind a path."""

_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "code", "param"],
        "properties": {
            "message": {"type": "string"}, "type": {"type": "string"},
            "code": {"type": ["string", "null"]}, "param": {"type": ["string", "null"]},
        },
    }},
}  # fmt: skip


def description(routes: Iterable[Route]) -> dict[str, Any]:
    """All routes, what they read, and how they refuse."""
    types = list(dict.fromkeys(BODIES.values()))
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": quire.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, route: Route) -> dict[str, Any]:
    form = OTHER_ERRORS.get(path) or {"$ref": "#/components/schemas/Error"}
    error = {"application/json": {"schema": form}}
    told: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").strip().splitlines()[0],
        "responses": {
            "2XX": {"description": "It was done."},
            "4XX": {"description": "It was refused.", "content": error},
            "503": {"description": "No room, a failing disk, or a server's end.", "content": error},
        },
    }
    wanted = [("id", "path")] if "{id}" in path else []
    if name := QUERIES.get((method, path)):
        wanted.append((name, "query"))
    if wanted:
        told["parameters"] = [
            {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}
            for name, where in wanted
        ]
    if body := BODIES.get((method, path)):
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        required = bool(msgspec.json.schema(body)["$defs"][body.__name__].get("required"))
        content = {"application/json": {"schema": schema}}
        told["requestBody"] = {"required": required, "content": content}
    return told


def endpoint(routes: list[Route]) -> Any:
    """The handler of `/openapi.json`."""
    made = description(routes)

    async def openapi(request: Request) -> Response:
        """This description."""
        return as_json(made)

    return openapi
