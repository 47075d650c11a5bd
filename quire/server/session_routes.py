"""`/v1/sessions`: contexts as resources."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.llm import LLM
from quire.api.session import Session
from quire.engine.loop import PATIENCE_S
from quire.engine.sequence import Mark
from quire.engine.waiting import NAP
from quire.server.asking import check_ids, in_thread
from quire.server.conversation import chat_prompt
from quire.server.errors import ApiError, about, naming, not_found
from quire.server.session import ServedSession
from quire.server.sessions import LONGEST_TTL, Sessions, checked_name
from quire.server.state import State
from quire.server.wire import as_json, encode, read_as, while_connected

_MOST_NOTES = 64 << 10
"""They are told with every look at a session."""


class SessionBody(msgspec.Struct, kw_only=True):
    """A new session, or one to open."""

    id: str | None = None
    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    ttl_s: float | None = None
    notes: dict[str, Any] | str | None = None
    """Anything by name; a text alone is kept under the name `text`."""
    open: str | None = None


class AppendBody(msgspec.Struct, kw_only=True):
    """What comes behind."""

    prompt: str | list[int]


class ForkBody(msgspec.Struct, kw_only=True):
    """What the fork is called."""

    id: str | None = None


class CheckpointBody(msgspec.Struct, kw_only=True):
    """What the mark is called."""

    name: str | None = None


class RewindBody(msgspec.Struct, kw_only=True):
    """Back to a mark, or by so many tokens."""

    to: str | None = None
    tokens: int | None = None


class SaveBody(msgspec.Struct, kw_only=True):
    """What the file is called."""

    name: str | None = None


async def create(request: Request) -> Response:
    """A new session, with something in it or not; or one that was saved."""
    state: State = request.app.state.quire
    body = await read_as(request, SessionBody)
    model = state.models.find(body.model)
    if body.ttl_s is not None and not 0 < body.ttl_s <= LONGEST_TTL:
        most = f"{LONGEST_TTL:.0f}"
        raise ApiError(400, f"ttl_s is a number of seconds above 0, at most {most}", param="ttl_s")
    if len(encode(body.notes)) > _MOST_NOTES:
        raise ApiError(400, f"notes has at most {_MOST_NOTES:,} bytes", param="notes")
    if body.open is not None:
        for name in ("prompt", "messages", "notes", "cache_salt"):
            if getattr(body, name) is not None:
                raise ApiError(
                    400, f"open takes a session as it was saved; leave {name} out", param=name
                )
        where = model if body.model else None
        opening = state.sessions.open(body.open, body.id, where)
        with naming("open"):
            found = await while_connected(request, opening, state.sessions.close)
        found.ttl_s = body.ttl_s if body.ttl_s is not None else found.ttl_s
        return as_json(await _look(found), 201)
    id = await state.sessions.free_id(body.id)
    async with state.models.using(model) as llm:
        with about("prompt" if body.messages is None else "messages"):
            tokens = await in_thread(_prompt, llm, body)
        session = await model.call(lambda: llm.session(body.cache_salt or ""), Session.close)
        notes = {"text": body.notes} if isinstance(body.notes, str) else body.notes
        session.notes.update(notes or {})
        served = ServedSession(id, session, model, ttl_s=body.ttl_s)
        try:
            state.sessions.add(served)
        except ApiError:
            await in_thread(session.close)
            raise
        try:
            if tokens:
                with about("prompt"), served.owned("reading a prompt"):
                    await while_connected(request, _append(request, served, tokens))
        except BaseException:
            await state.sessions.close(served)
            raise
    return as_json(await _look(served), 201)


def _prompt(llm: LLM, body: SessionBody) -> list[int]:
    if body.messages is not None:
        if body.prompt is not None:
            raise ApiError(400, "prompt and messages exclude each other", param="prompt")
        return chat_prompt(
            llm, body.messages, add_generation_prompt=False, continue_final=False
        ).tokens
    return _tokens(llm, body.prompt or "", 0)


def _tokens(llm: LLM, prompt: str | list[int], behind: int) -> list[int]:
    if isinstance(prompt, str):
        return llm.tokens_of(prompt, behind) if prompt else []
    return check_ids(llm, prompt)


async def _append(request: Request, served: ServedSession, tokens: list[int]) -> None:
    """Computes more tokens of a session; whoever leaves meanwhile has appended nothing."""
    state: State = request.app.state.quire
    async with state.admission.enter(request.scope["quire.key"], 0, 1):
        await served.append(tokens)


async def listed(request: Request) -> Response:
    """All sessions."""
    state: State = request.app.state.quire
    return as_json({"object": "list", "data": await state.sessions.look()})


async def shown(request: Request) -> Response:
    """One session."""
    session = await _session(request)
    tokens = request.query_params.get("tokens") not in (None, "", "0", "false")

    def look() -> dict[str, Any]:  # at once: between two looks somebody may go on with it
        return session.look() | ({"tokens": session.session.tokens} if tokens else {})

    return as_json(await session.model.call(look))


async def append(request: Request) -> Response:
    """Adds text or token ids, and computes them."""
    body = await read_as(request, AppendBody)
    session = await _session(request)
    with session.owned("reading a prompt"):
        llm = session.model.llm
        with about("prompt"):
            tokens = await in_thread(_tokens, llm, body.prompt, session.session.position)
            if tokens:
                await while_connected(request, _append(request, session, tokens))
    return as_json(await _look(session))


async def fork(request: Request) -> Response:
    """A second session with the same past; the two share every page."""
    body = await read_as(request, ForkBody)
    session = await _session(request)
    store = _store(request)
    id = await store.free_id(body.id)
    with session.owned("forked"):
        twin = await _on_loop(session, session.session.fork, Session.close)
        made = ServedSession(
            id, twin, session.model, parent=session.id, root=session.root, ttl_s=session.ttl_s
        )
        try:
            store.add(made)
        except ApiError:  # somebody took the id meanwhile
            await in_thread(twin.close)
            raise
    return as_json(await _look(made), 201)


async def checkpoint(request: Request) -> Response:
    """A mark of where a session is."""
    body = await read_as(request, CheckpointBody)
    session = await _session(request)
    named = None if body.name is None else _mark_name(body.name, "name")
    with session.owned("marked"):
        name = named or session.free_mark()
        if name in session.marks:
            raise ApiError(
                409, f"session {session.id!r} has a checkpoint {name!r} already",
                code="checkpoint_exists",
            )  # fmt: skip
        mark: Mark = await _on_loop(session, lambda: session.session.checkpoint(name))
    told = {"object": "session.checkpoint", "session_id": session.id, "name": mark.name}
    return as_json({**told, "position": len(mark.record.tokens)}, 201)


async def rewind(request: Request) -> Response:
    """Back to a mark, or by some tokens."""
    body = await read_as(request, RewindBody)
    session = await _session(request)
    if (body.to is None) == (body.tokens is None):
        raise ApiError(400, "rewind takes 'to', the name of a checkpoint, or 'tokens', how many")
    with session.owned("rewound"), naming("to" if body.tokens is None else "tokens"):
        if body.to is not None:
            mark = session.marks.get(_mark_name(body.to, "to"))
            if mark is None:
                raise not_found("checkpoint", body.to, code="checkpoint_not_found")
            await _on_loop(session, lambda: session.session.rewind(mark))
        elif body.tokens:
            count, held = body.tokens, session.session.position
            if not 0 < count <= held:
                raise ApiError(400, f"tokens is 0 to {held} here, not {count}", param="tokens")
            await _on_loop(session, lambda: session.session.rewind(-count))
    return as_json(await _look(session))


async def save(request: Request) -> Response:
    """Writes a session to a file of the server's folder."""
    body = await read_as(request, SaveBody)
    session = await _session(request)
    with session.owned("saved"):
        return as_json(await _store(request).save(session, body.name, kept=True))


async def delete(request: Request) -> Response:
    """Closes a session; a file that a client saved stays."""
    session = await _session(request)
    with session.owned("closed"):
        await _store(request).delete(session)
    return as_json({"id": session.id, "object": "session", "deleted": True})


def _mark_name(name: str, param: str) -> str:
    with naming(param):
        return checked_name(name, "a checkpoint's name")


def _store(request: Request) -> Sessions:
    state: State = request.app.state.quire
    return state.sessions


async def _session(request: Request) -> ServedSession:
    return await _store(request).get(request.path_params["id"])


async def _look(session: ServedSession) -> dict[str, Any]:
    return await session.model.call(session.look)


async def _on_loop(
    session: ServedSession, fn: Callable[[], Any], unwanted: Callable[[Any], Any] = lambda _: None
) -> Any:
    """What came of something, as soon as no file that is read or written holds what it lacks."""
    loop, until = session.model.llm.loop, time.monotonic() + PATIENCE_S

    def unwanted_all(made: list[Any]) -> None:
        for one in made:
            unwanted(one)

    while not (made := await session.model.call(lambda: loop.tried(fn, until), unwanted_all)):
        await asyncio.sleep(NAP)
    return made[0]
