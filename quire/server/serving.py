"""Runs the application: uvicorn, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from math import ceil
from typing import Any

import uvicorn
from starlette.applications import Starlette

from quire.errors import RequestError
from quire.server.app import build
from quire.server.protocol import Protocol
from quire.server.records import log_to_stderr
from quire.server.settings import ServeSettings
from quire.server.state import State

log = logging.getLogger("quire.server")
_THREADS = 64
"""For what takes its time off the event loop: long texts and files of some hold nobody else up."""
_IDLE_S = 65
"""How long a connection stays that nothing is asked on: longer than clients and proxies keep it, so
that it is not closed just as one of them asks."""
_LAST_S = 1.0
"""How long those who are cut off when a server ends have to be told so."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Opens and closes what is served with itself; told to end, it ends with status 0."""

    def __init__(self, config: uvicorn.Config, app: Starlette, settings: ServeSettings) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self.state: State | None = None
        self.when_ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Models first; then requests are taken."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "quire"))
        self.state = self._app.state.quire = State(self._settings)
        try:
            await self.state.open()
            await super().startup(sockets)
        except BaseException:
            await self.state.close()
            raise
        self.when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What runs comes to its end, or is cut off after a while; then all is given back."""
        assert self.state is not None
        self.state.stop_admitting()
        loop = asyncio.get_running_loop()
        over = [
            loop.call_later(self._settings.drain_s, self.state.cut_off),
            loop.call_later(self._settings.drain_s + _LAST_S / 2, self._drop_unread),
        ]
        await super().shutdown(sockets)
        for timer in over:
            timer.cancel()
        self.state.cut_off()  # whoever is there yet, where it was told twice and did not wait
        self._drop_unread()
        await self.state.close()

    def _drop_unread(self) -> None:
        """Closes connections that take nothing more: what is left for them would wait for ever."""
        all_open = [one for one in self.server_state.connections if isinstance(one, Protocol)]
        unread = [one for one in all_open if one.flow.write_paused]
        for one in unread:
            one.transport.abort()
        if unread:
            log.warning("%d who did not read their answers were cut off", len(unread))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server and are not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ending = {*_SIGNALS}
        if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            ending.add(signal.SIGHUP)  # its terminal is closed, and it was not started by `nohup`
        before = {number: signal.signal(number, self._told) for number in ending}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, number: int, frame: Any) -> None:
        if self.state is not None:
            self.state.stop_admitting()
        self.handle_exit(number, frame)


def make(settings: ServeSettings) -> Server:
    """A server that is ready to run."""
    app = build(settings)
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, http=Protocol, ws="none", lifespan="off",
        loop="uvloop" if find_spec("uvloop") else "asyncio", access_log=False, log_level="warning",
        server_header=False, date_header=True, proxy_headers=False, timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=ceil(settings.drain_s + _LAST_S), backlog=1024,
    )  # fmt: skip
    return Server(config, app, settings)


def serve(settings: ServeSettings, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serves until it is told to end; `ready` hears where, once requests are taken."""
    log_to_stderr()
    server = make(settings)
    with _listening(settings) as sock:
        address = replace(settings, port=sock.getsockname()[1])

        def when_ready() -> None:
            gc.collect()
            gc.freeze()  # looking for garbage among vocabularies would hold every stream up
            ready(address.url)

        server.when_ready = when_ready
        server.run(sockets=[sock])


def _listening(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        sock = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
        # A token is a small packet, and must not wait until the last one was acknowledged; what
        # is set here holds for every connection.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"cannot listen on {settings.host}, port {settings.port}: {error}; "
            "is another server there? --port takes another one, 0 any that is free"
        ) from error
