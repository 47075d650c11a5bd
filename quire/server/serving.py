"""Runs the application: uvicorn, deadlines for slow senders, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server.app import build
from quire.server.errors import ApiError
from quire.server.settings import ServeSettings

HEAD_S = 20.0
"""Seconds in which a request's head has to come."""
BODY_S = 50.0
"""Seconds in which its body has to come."""
_MOST_HEAD = 64 << 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Connection(h11.Connection):
    """Remembers what h11 thinks of a request that it refuses."""

    hint = 400

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.hint = error.error_status_hint
            raise


class Protocol(H11Protocol):
    """uvicorn's, with a deadline for whoever sends too slowly, and errors in our form."""

    _deadline: asyncio.TimerHandle | None = None
    _body_begun = False

    def connection_made(self, transport: Any) -> None:
        """The head has to come soon."""
        super().connection_made(transport)
        listening = transport.get_extra_info("socket")
        if listening is not None and listening.family in (socket.AF_INET, socket.AF_INET6):
            # A token is a small packet, and must not wait until the last one was acknowledged.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.conn = _Connection(h11.SERVER, _MOST_HEAD)
        self._set_deadline(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """A head in time, then a body in time, then nothing is waited for."""
        super().data_received(data)
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

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody sends any more."""
        self._set_deadline(None)
        super().connection_lost(exc)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = (seconds and self.loop.call_later(seconds, self._too_slow)) or None

    def _too_slow(self) -> None:
        if not (self.cycle and self.cycle.response_started) and not self.transport.is_closing():
            self.transport.write(_raw(408, "the request did not come in time"))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or too much of it."""
        status = getattr(self.conn, "hint", 400)
        text = f"a request's head has at most {_MOST_HEAD:,} bytes" if status == 431 else msg
        self.transport.write(_raw(status, text))
        self.transport.close()


def _raw(status: int, message: str) -> bytes:
    body = msgspec.json.encode(ApiError(status, message).as_dict())
    head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class Server(uvicorn.Server):
    """Ends with status 0 when it is told to end; a second signal does not wait for anybody."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server and are not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._told) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, number: int, frame: Any) -> None:
        state = getattr(self.app_state, "quire", None)
        if state is not None:
            state.stop_admitting()
        self.handle_exit(number, frame)

    app_state: Any = None


def make(settings: ServeSettings) -> Server:
    """A server that is ready to run."""
    app = build(settings)
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, http=Protocol, ws="none", lifespan="on",
        loop="uvloop" if find_spec("uvloop") else "asyncio", access_log=False, log_level="warning",
        server_header=False, date_header=True, proxy_headers=False, timeout_keep_alive=15,
        timeout_graceful_shutdown=int(settings.drain_s) or None, backlog=1024,
    )  # fmt: skip
    server = Server(config)
    server.app_state = app.state
    return server


def serve(settings: ServeSettings) -> None:
    """Serves until it is told to end."""
    make(settings).run()
