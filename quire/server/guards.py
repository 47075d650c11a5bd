"""What every request passes before a route sees it. Pure ASGI: nothing hides a disconnect."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import ApiError, told
from quire.server.origins import Origins
from quire.server.page_routes import is_file, is_page
from quire.server.settings import ServeSettings

log = logging.getLogger("quire.server")
LINGER_S = 5.0
"""How long what comes of a refused request is still taken in, to be thrown away."""
_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class Guards:
    """Host, origin, key and size, in this order."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._origins = Origins(settings.origins)
        sent = [form for key in settings.api_keys for form in _sent(key)]
        self._keys = [hashlib.sha256(form).digest() for form in sent]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or says why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        came = _Body(receive, self._settings.max_body)
        try:
            self._check_host(headers)
            if (page := self._origins.other(headers)) is not None:
                send = self._origins.shown(page, send)
                if may := self._origins.asked_before(scope["method"], headers):
                    await may(scope, receive, send)
                    return
            scope["quire.key"] = self._key_for(scope["path"], headers)
            self._check_length(headers)
            await self._answer(scope, came, came.drained(send))
        except ApiError as error:
            # Ollama's clients read OpenAI's form as well as their own, and so does everybody else.
            path = scope["path"] if scope["path"].startswith("/v1/") else ""
            answer = error.response(path)
            await answer(scope, receive, came.drained(send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What goes wrong in a route is said here, once, and not to the client in detail."""
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:  # the server ends, and does not wait any longer
            if started:  # what is open of it is closed, which uvicorn says in a line
                return
            raise ApiError(503, "the server ended before this was done", code="draining") from None
        except Exception as error:
            log.error("%s %r failed", scope["method"], scope["path"], exc_info=error)
            if started:
                raise
            raise told(error) from error

    def _check_host(self, headers: Headers) -> None:
        """A page elsewhere whose name was made to point here is not let in."""
        host = headers.get("host")  # no browser leaves it out, and only HTTP/1.0 may
        if self._settings.on_loopback and host is not None and not _LOCAL.fullmatch(host):
            raise ApiError(403, f"this server answers to localhost, not to {host!r:.80}")

    def _key_for(self, path: str, headers: Headers) -> str | None:
        """Who asks; None for a page that asks for the key, and its files."""
        try:
            return self._check_key(headers)
        except ApiError:
            if is_file(path) or is_page(path, headers.get("accept", "")):
                return None
            raise

    def _check_key(self, headers: Headers) -> str:
        """Who asks; every key is compared, in constant time."""
        given = headers.get("x-api-key", "")
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = rest.strip()
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if self._keys and not any(matches):
            told = "this key is not the server's" if given else "a key is needed"
            raise ApiError(
                401, f"{told}: Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return digest.hex()[:16] if given else ""

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._settings.max_body:
            raise too_large(self._settings.max_body)


def _sent(key: str) -> set[bytes]:
    """What clients send for a key: most of them UTF-8, browsers Latin-1."""
    forms = {key.encode()}
    with suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms


def too_large(most: int) -> ApiError:
    """The body is more than a server takes."""
    return ApiError(413, f"a body has at most {most:,} bytes", code="body_too_large")


class _Body:
    """A body as it comes: it is counted, and what nobody read does not lose the answer."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._came = 0
        self._ended = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        if message["type"] == "http.request":
            self._came += len(message.get("body", b""))
            if self._came > self._most:
                raise too_large(self._most)
        return message

    def drained(self, send: Send) -> Send:
        """Sends; before it ends, the rest of the body comes in, for a while.

        Closed while more comes in, a connection is reset, and its client never reads the answer.
        """

        async def sending(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and not self._ended:
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while not self._ended:
                            self._ended = not (await self._receive()).get("more_body", False)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        return sending
