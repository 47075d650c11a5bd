"""What all requests of one server share."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, TypeVar

from quire.server.admission import Admission
from quire.server.arrivals import Arrivals
from quire.server.compilers import Compilers
from quire.server.errors import ApiError, told
from quire.server.follow import News
from quire.server.live import Live
from quire.server.models import Models
from quire.server.records import Records
from quire.server.run import Run
from quire.server.sessions import Sessions
from quire.server.settings import ServeSettings

log = logging.getLogger("quire.server")
T = TypeVar("T")


class State:
    """Made in the event loop that serves; `app.state.quire` everywhere else."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.started = time.time()
        self.news = News()
        self.runs: set[Run] = set()
        """Requests that are on the engine."""
        self.models = Models(settings, self._broken)
        self.sessions = Sessions(
            self.models, settings.sessions_in, settings.save_sessions != "never"
        )
        self.compilers = Compilers(settings.max_queue)
        self.admission = Admission(settings.max_running, settings.max_queue)
        self.arrivals = Arrivals()
        self.records = Records(settings.log_text, self.models.by_name)
        self.live = Live(self)
        self.ready = False
        self._over: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._tidying: asyncio.Task[None] | None = None

    def told(self, error: BaseException, param: str | None = None) -> ApiError:
        """What a client is told of an error: without paths of this machine."""
        found = told(error, param)
        if found.status == 500:
            log.error("a request failed", exc_info=error)
        for path, name in self._hidden():
            found.message = found.message.replace(path, name)
        return found

    def _hidden(self) -> list[tuple[str, str]]:
        """Paths, and what clients call what lies there."""
        loaded = [(str(model.llm.path), model.name) for model in self.models.loaded]
        named = [(model.source, model.name) for model in self.models.by_name.values()]
        return [*loaded, *named, (f"{self.sessions.folder}/", ""), (str(Path.home()), "~")]

    async def open(self) -> None:
        """Loads the model, if there is only one; several are loaded when they are used."""
        if len(self.models.by_name) == 1:
            try:
                async with self.models.using(self.models.default):
                    pass
            except ApiError as error:
                raise error.__cause__ or error from None
        self._tidying = asyncio.create_task(self._tidy())
        self.ready = True

    async def _tidy(self) -> None:
        """Ends what is over: sessions past their time, models that nobody uses."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self.sessions.close_expired()
                await self.models.unload_idle()
            except Exception:
                log.exception("tidying up failed")

    def stop_admitting(self) -> None:
        """Takes nothing more in: the server is about to end."""
        self.ready, self.admission.draining = False, True

    def cut_off(self) -> None:
        """Ends what still runs or waits: there is no more time, and whoever asked is told so."""
        error = ApiError(503, "the server ends, and this took too long", code="draining")
        self.admission.refuse(error)
        for run in list(self.runs):
            run.fail(error)
        if not self._over.done():
            self._over.set_result(error)

    async def unless_over(self, coming: asyncio.Future[T]) -> T:
        """What comes, however long that takes, as long as the server has time to wait for it."""
        either: set[asyncio.Future[Any]] = {coming, self._over}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise self._over.result()
        return coming.result()

    async def close(self) -> None:
        """Saves sessions if that was asked for, and gives everything back."""
        self.live.close()
        if self._tidying:
            self._tidying.cancel()
        await self.sessions.settled(self.settings.drain_s)
        for session in list(self.sessions.by_id.values()):
            if self.settings.save_sessions in ("turn", "drain"):
                await self.sessions.try_to_save(session)
            await self.sessions.close(session)
        await self.models.close()

    def _broken(self, error: BaseException) -> None:
        """The engine met an error that is no request's own; from its thread."""
        log.error("the engine failed: %s", type(error).__name__, exc_info=error)
        for run in list(self.runs):
            run.fail(error)
