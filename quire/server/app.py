"""The application: routes, and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import QuireError
from quire.server import (
    about_routes,
    chat_routes,
    completions_routes,
    memory_routes,
    openapi,
    session_routes,
    text_routes,
)
from quire.server.errors import ApiError
from quire.server.guards import Guards
from quire.server.other_routes import other_routes
from quire.server.page_routes import page_routes
from quire.server.records import Recording
from quire.server.sessions import wrong_name
from quire.server.settings import ServeSettings
from quire.server.state import State
from quire.server.wire import Disconnected

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def routes() -> list[Route]:
    """Every path there is; most of OpenAI's are there without /v1 too.

    They are tried in this order, so what is asked most is first.
    """
    made: list[Route] = []
    for prefix in ("/v1", ""):
        made += [
            _route("GET", f"{prefix}/models", about_routes.models),
            _route("GET", f"{prefix}/models/{{id:path}}", about_routes.model),
            _route("POST", f"{prefix}/completions", completions_routes.completions),
            _route("POST", f"{prefix}/chat/completions", chat_routes.chat),
        ]
    made += [
        _route("GET", "/health", about_routes.ready),
        _route("GET", "/readyz", about_routes.ready),
        _route("GET", "/livez", about_routes.live),
        _route("GET", "/version", about_routes.version),
        _route("POST", "/tokenize", text_routes.tokenize),
        _route("POST", "/detokenize", text_routes.detokenize),
        _route("POST", "/apply-template", text_routes.apply_template),
        _route("GET", "/v1/memory", memory_routes.memory),
        _route("PATCH", "/v1/memory", memory_routes.resize),
        _route("POST", "/v1/memory/forget", memory_routes.forget),
        _route("POST", "/v1/sessions", session_routes.create),
        _route("GET", "/v1/sessions", session_routes.listed),
        _route("GET", "/v1/sessions/{id}", session_routes.shown),
        _route("DELETE", "/v1/sessions/{id}", session_routes.delete),
    ]
    for verb in ("append", "fork", "checkpoint", "rewind", "save"):
        handler: Handler = getattr(session_routes, verb)
        made.append(_route("POST", f"/v1/sessions/{{id}}/{verb}", handler))
    made += other_routes()
    made.append(_route("GET", "/openapi.json", openapi.endpoint(made)))
    return made + page_routes()


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(path, handler, methods=[method])


def build(settings: ServeSettings) -> Starlette:
    """The application of a server; `app.state.quire` is set before it is asked anything."""
    app = Starlette(
        routes=merged(routes()),
        exception_handlers={
            ApiError: _api_error, QuireError: _api_error, HTTPException: _http_error,
            Disconnected: _gone,
        },
    )  # fmt: skip
    app.router.redirect_slashes = False
    app.add_middleware(Guards, settings=settings)
    app.add_middleware(Recording)
    return app


def merged(all_routes: list[Route]) -> list[Route]:
    """Routes of one path that differ in their method, as one: so that 405 says which there are."""
    by_path: dict[str, list[Route]] = {}
    for route in all_routes:
        by_path.setdefault(route.path, []).append(route)
    return [same[0] if len(same) == 1 else _by_method(same) for same in by_path.values()]


def _by_method(same: list[Route]) -> Route:
    handlers: dict[str, Handler] = {m: r.endpoint for r in same for m in r.methods or ()}

    async def handle(request: Request) -> Response:
        return await handlers[request.method](request)

    return Route(same[0].path, handle, methods=list(handlers))


async def _api_error(request: Request, error: Exception) -> Response:
    state: State = request.app.state.quire
    return state.told(error).response(request.scope["path"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is nothing at", 405: "this method is not for"}.get(error.status_code)
    path, written = request.url.path, request.scope["raw_path"].lower()
    message = f"{what} {path!r:.140}" if what else str(error.detail)
    told = ApiError(error.status_code, message, headers=error.headers or {})
    if error.status_code == 404 and written.startswith(b"/v1/sessions/") and b"%2f" in written:
        told = wrong_name(path.removeprefix("/v1/sessions/"))  # a name that has a slash
    return told.response(path)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
