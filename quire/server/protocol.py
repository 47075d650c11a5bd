"""What comes over a connection: HTTP by h11 and uvicorn, with deadlines for slow senders."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server.errors import ApiError
from quire.server.guards import LINGER_S

HEAD_S = 20.0
"""Seconds in which a request's head has to come."""
BODY_S = 50.0
"""Seconds in which its body has to come."""
_MOST_HEAD = 64 << 10
_ADDRESS = re.compile(rb"https?://[^/?]*(.*)", re.IGNORECASE)
_LOOK_S = 0.02
"""How often it is looked whether a client that sends no more is there."""


class _Connection(h11.Connection):
    """Remembers what h11 thinks of a request that it refuses, and frames chunks by itself."""

    hint = 400
    _chunks = False
    _ahead = False

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if type(event) is not h11.Request:
                return event
            if _head_bytes(event) > _MOST_HEAD:
                # A head that came in one piece was never incomplete, which is all that h11 limits.
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
            if _two_lengths(event):
                raise h11.RemoteProtocolError("a body has one length", error_status_hint=400)
            return _with_path(event)
        except h11.RemoteProtocolError as error:
            self.hint = error.error_status_hint
            raise

    def send(self, event: Any) -> Any:
        """What to write for an event; a chunk of a body changes no state, and there are many."""
        if self._chunks and type(event) is h11.Data:
            data, self._ahead = event.data, self._ahead and not event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        written = super().send(event)
        if self._ahead and written:
            written, self._ahead = written[1:], False
        if type(event) is h11.Response:
            self._chunks = b"\r\ntransfer-encoding: chunked\r\n" in (written or b"").lower()
        return written

    def ahead(self) -> bytes:
        """A byte that what comes next begins with, or may: of `HTTP/1.1`, or of a chunk's size."""
        in_chunks = self._chunks and self.our_state is h11.SEND_BODY
        first = b"H" if self.our_state is h11.SEND_RESPONSE else b"0" if in_chunks else b""
        self._ahead = bool(first)
        return first


def _with_path(request: h11.Request) -> h11.Request:
    """The same where the target is a whole address, as clients of proxies write it."""
    address = _ADDRESS.fullmatch(request.target)
    if address is None:
        return request
    return h11.Request(
        method=request.method, headers=request.headers, http_version=request.http_version,
        target=address[1] if address[1].startswith(b"/") else b"/" + address[1],
    )  # fmt: skip


def _two_lengths(request: h11.Request) -> bool:
    """Whether a body has a length and comes in chunks: a proxy may see another one than we."""
    names = {name for name, _ in request.headers}
    return b"content-length" in names and b"transfer-encoding" in names


def _head_bytes(request: h11.Request) -> int:
    return len(request.target) + sum(len(name) + len(value) for name, value in request.headers)


class Protocol(H11Protocol):
    """uvicorn's, with a deadline for whoever sends too slowly, and errors in our form."""

    _deadline: asyncio.TimerHandle | None = None
    _body_begun = False
    _refused = False
    _half_closed = False
    conn: _Connection

    def connection_made(self, transport: Any) -> None:
        """The head has to come soon."""
        super().connection_made(transport)
        self.conn = _Connection(h11.SERVER, _MOST_HEAD)
        self._set_deadline(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """A head in time, then a body in time, then nothing is waited for."""
        if self._refused:
            return
        super().data_received(data)
        self._wait_for_rest()
        if self.conn.their_state is h11.DONE and len(self._unread) <= _MOST_HEAD:
            self.flow.resume_reading()  # else nobody hears that whoever asks ahead has left

    def _wait_for_rest(self) -> None:
        """Sets when the rest of what has begun to come must be there."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if not self._body_begun:
                self._body_begun = True
                self._set_deadline(BODY_S)
            return
        self._body_begun = False
        if state is not h11.IDLE:
            self._set_deadline(None)
        elif self._deadline is None:  # the first bytes of the next request
            self._set_deadline(HEAD_S)

    @property
    def _unread(self) -> bytes:
        """What came of requests behind the one that is answered."""
        return self.conn.trailing_data[0]

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody sends any more."""
        self._set_deadline(None)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes whatever it says
        """Nobody sends any more; whether somebody reads is seen when something is written.

        So a byte of the answer goes ahead: a client that is gone resets the connection, and one
        that has only ended its part does not notice.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        self.transport.write(self.conn.ahead())
        if not self._half_closed:  # it comes again with every request that is read behind it
            self._half_closed = True
            self.loop.call_soon(self._look)
        return True

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_S, self._look)

    def on_response_complete(self) -> None:
        """What was asked before the client ended its part is answered; then it is over."""
        super().on_response_complete()
        if self._unread or self.conn.their_state is h11.SEND_BODY:
            self._wait_for_rest()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def shutdown(self) -> None:
        """The server ends: what has not come by now is not waited for."""
        if self._body_begun and not self.cycle.response_started:
            self.transport.write(_raw(503, "the server is about to end", "draining"))
            self.transport.close()
        else:
            super().shutdown()

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = (seconds and self.loop.call_later(seconds, self._too_slow)) or None

    def _too_slow(self) -> None:
        answered = self.cycle and self.cycle.response_started and self._body_begun
        if not answered and not self.transport.is_closing():
            self.transport.write(_raw(408, "the request did not come in time"))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or too much of it."""
        status = getattr(self.conn, "hint", 400)
        text = f"a request's head has at most {_MOST_HEAD:,} bytes" if status == 431 else msg
        self.transport.write(_raw(status, text))
        self._refused = True
        # Closed while more comes in, a connection is reset, and its client never reads why.
        self._unset_keepalive_if_required()
        self._set_deadline(None)
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _raw(status: int, message: str, code: str | None = None) -> bytes:
    error = ApiError(status, message, code=code)
    body = msgspec.json.encode(error.as_dict())
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **error.headers,
    }
    head = [f"HTTP/1.1 {status} Refused", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*head, "Connection: close\r\n\r\n"]).encode() + body
