"""Browsers: which pages of other servers may ask. None, unless somebody says so."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Send

from quire.server.errors import ApiError

_METHODS = "GET, POST, PATCH, DELETE"
_SHOWN = "x-request-id, retry-after"
_AGAIN_S = 600
"""How long a browser need not ask again whether it may."""


class Origins:
    """Those that were named, as `https://chat.example`, or `*` for all."""

    def __init__(self, named: Collection[str]) -> None:
        self._named = frozenset(named)

    def other(self, headers: Headers) -> str | None:
        """Where a page of another server came from that may ask; others are refused."""
        origin = headers.get("origin")
        if origin is None or origin.partition("://")[2] == headers.get("host"):
            return None
        if self._named.isdisjoint((origin, "*")):
            raise ApiError(
                403, "pages of other servers are not answered; start this one with --allow-origin "
                "and the page's origin where they are to be",
            )  # fmt: skip
        return origin

    def asked_before(self, method: str, headers: Headers) -> Response | None:
        """The answer to a browser that asks whether a page may ask."""
        if method != "OPTIONS" or "access-control-request-method" not in headers:
            return None
        wanted = headers.get("access-control-request-headers", "")
        told = {
            "Access-Control-Allow-Methods": _METHODS, "Access-Control-Allow-Headers": wanted,
            "Access-Control-Max-Age": str(_AGAIN_S),
        }  # fmt: skip
        return Response(status_code=204, headers=told)

    def shown(self, origin: str, send: Send) -> Send:
        """Sends answers that a browser shows to the page that asked."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["access-control-allow-origin"] = origin
                headers["access-control-expose-headers"] = _SHOWN
                headers.add_vary_header("origin")
            await send(message)

        return sending
