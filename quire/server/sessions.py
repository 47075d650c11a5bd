"""All sessions of a server: by id, and by the names they are saved under."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quire.api.opening import notes_in
from quire.errors import OutOfMemory, SessionFileError
from quire.server.errors import ApiError, naming, not_found
from quire.server.models import Models, ServedModel
from quire.server.session import NOTE, ServedSession, looked

T = TypeVar("T")
log = logging.getLogger("quire.server")
_REMEMBERED = 10_000
LONGEST_TTL = 10 * 365 * 86400.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def checked_name(name: object, what: str = "a session's id") -> str:
    """A name that is safe as a file's, or 400."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong_name(name, what)
    return name


def wrong_name(name: object, what: str = "a session's id") -> ApiError:
    """A name that is none."""
    return ApiError(
        400, f"{what} is 1 to 128 letters, digits, '.', '_' or '-' and begins with a letter or "
        f"digit, not {name!r:.140}", code="invalid_name",
    )  # fmt: skip


def _taken(id: str, but: str = "") -> ApiError:
    message = f"there is a session {id!r} already{but}"
    return ApiError(409, message, code="session_exists", param="id")


def _of_a_session(path: Path) -> bool:
    """Whether a server wrote a file by itself: a session of that id goes on from it."""
    with suppress(SessionFileError):
        told: Any = notes_in(path).get(NOTE) if path.is_file() else None
        return isinstance(told, dict) and told.get("kept") is False
    return False


class Sessions:
    """The store; only for the event loop's own thread."""

    def __init__(self, models: Models, folder: Path, saves: bool) -> None:
        self.models = models
        self.folder = folder
        self._saves = saves
        """Whether the server saves sessions by itself, each under its id."""
        self.by_id: dict[str, ServedSession] = {}
        self._deleted: dict[str, None] = {}  # the oldest first
        self._named: dict[str, tuple[ServedModel | None, asyncio.Task[ServedSession]]] = {}
        """Those that are being opened because somebody named them, and for which model."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Whatever is opened, or closed because nobody waits for it any more."""
        self._written: Counter[str] = Counter()
        """Names of files that are being written."""

    async def free_id(self, id: str | None, opened: str | None = None) -> str:
        """An id for a new session, which may be opened from a file; a taken one is refused."""
        if id is None:
            return f"s-{secrets.token_hex(8)}"
        await self.close_expired()
        with naming("id"):
            checked_name(id)
            self._check_free(id, opened)
        return id

    def _check_free(self, id: str, opened: str | None) -> None:
        """Refuses an id that a session has, or its file: it would be saved over that."""
        if id in self.by_id:
            raise _taken(id)
        if self._saves and id != opened and (self._written[id] or self.path(id).exists()):
            raise _taken(id, f", in a file: open it ({{'open': {id!r}}}), or take another id")

    def add(self, session: ServedSession) -> ServedSession:
        """Takes a session in; its model stays loaded as long as it is here."""
        self._check_free(session.id, session.saved)
        self.by_id[session.id] = session
        self._deleted.pop(session.id, None)
        session.model.users += 1
        return session

    async def get(self, id: str, model: ServedModel | None = None) -> ServedSession:
        """A session by its id; one that is not here but saved under that name is opened.

        All who name it meanwhile wait for the same, which goes on if they leave.
        """
        checked_name(id)
        if id in self.by_id and self.by_id[id].expired:  # nobody has tidied up yet
            await self.close(self.by_id[id])
        await self._open_named(id, model)
        found = self.by_id.get(id)
        if found is None:  # somebody else was quick to close it
            raise not_found("session", id, code="session_not_found")
        if model is not None and found.model is not model:
            raise ApiError(
                409, f"session {id!r} belongs to model {found.model.name!r}, not {model.name!r}",
                code="session_model",
            )  # fmt: skip
        return found

    async def _open_named(self, id: str, model: ServedModel | None) -> None:
        """Opens one that is not here, or waits for whoever does so already."""
        while id not in self.by_id:
            if id in self._deleted or not self.path(id).is_file():
                raise not_found("session", id, code="session_not_found")
            if id not in self._named:
                self._named[id] = model, self._task(self._opened(id, model))
            meant, opening = self._named[id]
            try:
                await asyncio.shield(opening)
                return
            except (ApiError, SessionFileError) as error:
                if id in self.by_id:
                    return  # somebody opened it by its file's name meanwhile
                if meant in (None, model) or isinstance(error, ApiError):
                    raise  # else it may be of this model, and not of the one that another named

    async def _opened(self, id: str, model: ServedModel | None) -> ServedSession:
        try:
            return await self._open(id, id, model)
        finally:  # before it is done: whoever waits for what is done lets nobody else go on
            del self._named[id]

    def path(self, name: str) -> Path:
        """Where a session of this name is saved; never through a link."""
        path = self.folder / f"{checked_name(name, 'the name of a saved session')}.quire"
        if path.is_symlink():
            raise ApiError(400, f"{name!r} is a link, and links are not followed")
        return path

    async def open(
        self, name: str, id: str | None = None, model: ServedModel | None = None
    ) -> ServedSession:
        """A saved session, under an id of its own; whoever is cancelled has opened nothing."""
        task = self._task(self._open(name, id, model))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unwanted)  # a file that is read is read to its end
            raise

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Something that goes on though nobody waits for it, until the server ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _unwanted(self, task: asyncio.Task[ServedSession]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._task(self.close(task.result()))

    async def settled(self, within_s: float) -> None:
        """Until nothing is opened any more, or so many seconds are over."""
        until = time.monotonic() + within_s
        while self._tasks and time.monotonic() < until:
            await asyncio.wait(self._tasks, timeout=until - time.monotonic())

    async def _open(self, name: str, id: str | None, model: ServedModel | None) -> ServedSession:
        path = self.path(name)
        if not path.is_file():
            raise not_found("saved session", name, code="session_not_found")
        new_id = await self.free_id(id, name)
        tried = [model] if model else await asyncio.to_thread(self._likely, path)
        refused: SessionFileError | None = None
        for one in tried:
            async with self.models.using(one) as llm:
                try:
                    session = await asyncio.to_thread(llm.open, path)
                except SessionFileError as error:
                    if isinstance(error.__cause__, OutOfMemory):  # it is of this one
                        raise
                    refused = refused or error  # what the likeliest says is likest to be true
                    continue
                found = ServedSession(new_id, session, one)
                self._recall(found, name)
                try:
                    return self.add(found)
                except ApiError:  # somebody took its id meanwhile
                    await asyncio.to_thread(session.close)
                    raise
        assert refused is not None, "there is at least one model"
        raise refused

    def _likely(self, path: Path) -> list[ServedModel]:
        """All models, first the one that the file says it is of: others need not be loaded."""
        with suppress(SessionFileError):
            told: Any = notes_in(path).get(NOTE)
            name = told.get("model") if isinstance(told, dict) else None
            return sorted(self.models.by_name.values(), key=lambda one: one.name != name)
        return list(self.models.by_name.values())

    def _recall(self, found: ServedSession, name: str) -> None:
        """What the file says of how it was served; it is not trusted, so only what fits."""
        told: Any = found.session.notes.pop(NOTE, None)
        found.saved, found.kept = name, True if found.id == name else None
        if isinstance(told, dict) and found.id == name == told.get("id", name):
            found.kept = told.get("kept") is not False
            created, ttl_s = told.get("created"), told.get("ttl_s")
            found.created = created if isinstance(created, int) else found.created
            timed = isinstance(ttl_s, (int, float)) and 0 < ttl_s <= LONGEST_TTL
            found.ttl_s = ttl_s if timed else None
            for field in ("parent", "root"):
                if isinstance(told.get(field), str) and _NAME.fullmatch(told[field]):
                    setattr(found, field, told[field])

    async def save(
        self, session: ServedSession, name: str | None = None, kept: bool = False
    ) -> dict[str, Any]:
        """Writes a session under a name, by default its id; `kept`: because a client asked."""
        name = session.id if name is None else name
        with naming("name"):
            path = self.path(name)
        others = name != session.id and await asyncio.to_thread(_of_a_session, path)
        if others or self.by_id.get(name, session) is not session:
            raise ApiError(  # the other one's own file would not outlive it
                409, f"{name!r} is the id of another session; save under another name",
                code="session_exists", param="name",
            )  # fmt: skip
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SessionFileError(f"{name}: cannot be saved: {error.strerror}") from error
        kept = kept or bool(session.kept)
        self._written[name] += 1
        try:
            size = await asyncio.to_thread(session.save, path, kept)
        finally:
            self._written -= Counter([name])
        session.saved = name
        if name == session.id:
            session.kept = kept
        position = session.session.position
        return {"object": "session.file", "name": name, "bytes": size, "position": position}

    async def try_to_save(self, session: ServedSession) -> None:
        """Saves a session unasked; whoever operates the server is told where that fails."""
        try:
            await self.save(session)
        except (ApiError, SessionFileError) as error:  # a disk that is full says so every turn
            log.error("session %s could not be saved: %s", session.id, error)
        except Exception:
            log.exception("session %s could not be saved", session.id)

    async def close(self, session: ServedSession) -> None:
        """Gives a session's pages back; a saved file stays."""
        if self.by_id.get(session.id) is session:
            del self.by_id[session.id]
            session.model.users -= 1
            session.model.last_used = time.monotonic()
            await asyncio.to_thread(session.session.close)

    async def delete(self, session: ServedSession) -> None:
        """Closes a session for good: it is not opened again because somebody names it."""
        self._deleted[session.id] = None  # first: its file is there while its pages are given back
        await self.close(session)
        if session.kept is False and session.id in self._deleted:  # nobody has opened it since
            await asyncio.to_thread(self.path(session.id).unlink, missing_ok=True)
        while len(self._deleted) > _REMEMBERED:
            del self._deleted[next(iter(self._deleted))]

    async def close_expired(self) -> None:
        """Closes those whose time is over."""
        for session in list(self.by_id.values()):
            if session.expired:
                await self.close(session)

    async def look(self) -> list[dict[str, Any]]:
        """What clients see of all of them."""
        await self.close_expired()
        seen: list[dict[str, Any]] = []
        for model in self.models.loaded:
            mine = [s for s in self.by_id.values() if s.model is model]
            if mine:
                seen += [told for _, told in await model.call(partial(looked, mine))]
        return seen
