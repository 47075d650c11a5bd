"""Bodies in and out: JSON with limits, server-sent events, and noticing that a client left."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import quire
from quire.server.errors import ApiError

T = TypeVar("T")
JSON = "application/json"
FINGERPRINT = f"quire-{quire.__version__}"
"""What answers are made by."""
PING_S = 10.0
"""Seconds of silence after which a stream says that it is alive."""
_MOST_VALUES = 2_000_000
"""In one body: nobody else is served while they are made, which takes a second."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
_WITH_POINT = re.compile(rb"-?\d{1,20}(\.\d{1,20}|(?=e))(e\+?\d{1,2})?", re.IGNORECASE)

_encoder = msgspec.json.Encoder()
encode = _encoder.encode
"""Any plain value or msgspec structure as JSON."""


class Disconnected(Exception):
    """The client is gone: nobody waits for what was asked."""


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(encode(value), status, headers, media_type="application/json")


async def read_as(request: Request, form: type[T], kinds: tuple[str, ...] = (JSON,)) -> T:
    """The body of a request as a type; refused where it is none, or comes as another kind."""
    body = await _body(request)
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise ApiError(415, f"bodies are read as they are, not as Content-Encoding {packed!r:.80}")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind not in kinds:
        raise ApiError(415, f"bodies are JSON (Content-Type: application/json), not {kind!r:.80}")
    if _has_too_many(body):
        what = f"the body has more than {_MOST_VALUES:,} values; send fewer at a time"
        raise ApiError(413, what, code="body_too_large")
    try:
        return _decoded(body or b"{}", form)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.rstrip("`").lstrip(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
            param, what = f"{param}.{missing[1]}".lstrip("."), "this field is required"
        raise ApiError(400, f"{param or 'the body'}: {what}", param=param or None) from None
    except RecursionError:
        raise ApiError(400, "the body is JSON nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid JSON: it is not UTF-8") from None


def _has_too_many(body: bytes) -> bool:
    """Whether there are too many values in it; what texts are made of is none."""
    if len(body) <= _MOST_VALUES or _marks(body) <= _MOST_VALUES:
        return False
    return body.count(b'"') > 4 * _MOST_VALUES or _marks(_TEXT.sub(b"", body)) > _MOST_VALUES


def _marks(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


def _decoded(body: bytes, form: type[T]) -> T:
    """JSON as a type; nulls are fields that were left out, and 16.0 is a whole number."""
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as error:
        if not str(error).partition(" - ")[0].endswith(("got `null`", "got `float`")):
            raise
    fields: Any = form  # a class can be hashed, whatever mypy thinks
    told = msgspec.structs.asdict(msgspec.json.decode(body, type=_fields(fields)))
    kept = {name: _whole(raw) for name, raw in told.items() if bytes(raw) not in (b"", b"null")}
    return msgspec.json.decode(encode(kept), type=form)


@cache
def _fields(form: Any) -> type[msgspec.Struct]:
    """The same fields, as they are written: whatever else is in a body is not made anything of."""
    names = [field.encode_name for field in msgspec.structs.fields(form)]
    return msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in names])


def _whole(raw: msgspec.Raw) -> msgspec.Raw:
    if not _WITH_POINT.fullmatch(bytes(raw)):
        return raw
    return msgspec.Raw(encode(whole(float(bytes(raw)))))


def whole(number: Any) -> Any:
    """A number without a fraction as a whole one: not every language has both."""
    if isinstance(number, float) and number.is_integer() and abs(number) < 2**53:
        return int(number)
    return number


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise Disconnected from error


async def while_connected(
    request: Request, work: Coroutine[Any, Any, T],
    unwanted: Callable[[T], Awaitable[None]] | None = None,
) -> T:  # fmt: skip
    """What comes of some work; it is cancelled as soon as the client is gone.

    Work may come to its end just as it is cancelled: that goes to `unwanted`.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(gone(request.receive))
    wanted = False
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        wanted = True
        return task.result()
    finally:
        left.cancel()
        if not wanted:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if unwanted and not task.cancelled() and task.exception() is None:
                await unwanted(task.result())


async def gone(receive: Receive) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from an iterator of ready-made chunks; it ends when its client leaves.

    A silent stream is kept alive by comments. Errors are the iterator's to put into words.
    """

    media_type = "text/event-stream"
    ping = b": ping\n\n"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(None, 200, {"Cache-Control": "no-cache", **(headers or {})})
        self._chunks = chunks
        self._close = close
        self._last = 0.0

    def init_headers(self, headers: Any = None) -> None:
        """Without a length, which is not known."""
        super().init_headers(headers)
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends what comes; with the client everything behind the stream goes too."""
        if scope["method"] == "HEAD":  # nothing comes behind the head
            await self._chunks.aclose()
        writer = asyncio.ensure_future(self._write(send))
        left = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({writer, left}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in (writer, left):
                task.cancel()
            await asyncio.gather(writer, left, return_exceptions=True)
            await self._close()

    async def _write(self, send: Send) -> None:
        chunks = self._chunks
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pings = asyncio.ensure_future(self._pings(send))
        try:
            async for chunk in chunks:
                self._last = time.monotonic()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            pings.cancel()
            await chunks.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _pings(self, send: Send) -> None:
        self._last = time.monotonic()
        while True:
            quiet = time.monotonic() - self._last
            if quiet < PING_S:
                await asyncio.sleep(PING_S - quiet)
                continue
            self._last = time.monotonic()
            await send({"type": "http.response.body", "body": self.ping, "more_body": True})


def in_a_line(value: Any) -> bytes:
    """JSON without characters that clients may take for the end of a line, as Python's do."""
    made = encode(value)
    if not made.isascii():
        for written, told in _LINE_ENDS:
            made = made.replace(written, told)
    return made


_LINE_ENDS = [(end.encode(), json.dumps(end)[1:-1].encode()) for end in "\u0085\u2028\u2029"]


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + in_a_line(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def refused(error: ApiError) -> bytes:
    """How a stream in OpenAI's form ends that cannot be answered."""
    return event(error.as_dict()) + DONE
