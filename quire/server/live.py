"""`/v1/memory/events`: how memory, sessions and requests stand, while somebody listens.

One look serves all listeners, at most four times a second and less often where looks take long:
they get a fiftieth of the engine's time at most. What is sent is what changed since the last time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.models import ServedModel
from quire.server.page_map import Holder, PoolLook, budget_parts, look, pool_map
from quire.server.session import ServedSession, looked
from quire.server.wire import EventStream, encode, event

if TYPE_CHECKING:
    from quire.server.state import State

log = logging.getLogger("quire.server")
EVERY_S = 0.25
_SHARE = 50
"""Looks take at most one of so many parts of the engine's time."""
_SILENCE_S = 1.0
"""Listeners hear at least so often that nothing has changed."""


class ModelLook(NamedTuple):
    """One model's memory as it was at a moment."""

    name: str
    n_ctx: int
    pools: list[PoolLook]
    breakdown: dict[str, int]
    prefix: dict[str, Any]
    sessions: list[dict[str, Any]]
    holders: dict[str, Holder]
    limit: int
    took_s: float


def look_at(model: ServedModel, sessions: list[ServedSession]) -> ModelLook:
    """On the loop: only what is quickly copied."""
    begun = time.perf_counter()
    llm = model.llm
    seen: list[dict[str, Any]] = []
    holders: dict[str, Holder] = {}
    for one, told in looked(sessions):
        seen.append(told)
        sequence = one.session.sequence.id
        holders[f"sequence {sequence}"] = holders[f"parked sequence {sequence}"] = (
            "session", one.id,
        )  # fmt: skip
        for mark in one.session.marks.values():
            held_as = ("checkpoint", f"{one.id}/{mark.name}")  # forks have it too
            holders.setdefault(f"checkpoint {mark.checkpoint}", held_as)
    pools, prefix = look(llm.engine.memory), dict(llm.engine.prefix.index.stats())
    took = time.perf_counter() - begun
    return ModelLook(
        model.name, llm.n_ctx, pools, llm.budget.breakdown, prefix, seen, holders,
        llm.budget.limit, took,
    )  # fmt: skip


class Live:
    """Looks while anybody listens; only for the event loop's own thread."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._sections: dict[str, bytes] = {}
        self._looked = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self.listeners = 0

    @property
    def idle(self) -> bool:
        """Whether nobody looks."""
        return self._watching is None or self._watching.done()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: everything at first, then what is different."""
        sent: dict[str, bytes] = {}
        last = 0.0
        self.listeners += 1
        if self.idle:
            self._sections = {}
            self._watching = asyncio.create_task(self._watch())
        try:
            await self._looked.wait()  # what was seen for somebody before may be old
            while not self._state.admission.draining:
                now = self._sections
                changed = {
                    name: msgspec.Raw(body) for name, body in now.items() if sent.get(name) != body
                }
                if changed or (now and time.monotonic() - last >= _SILENCE_S):
                    sent, last = now, time.monotonic()
                    yield event({"time": time.time(), **changed})
                await self._looked.wait()
        finally:
            self.listeners -= 1

    async def _watch(self) -> None:
        while self.listeners:
            begun = time.monotonic()
            looks: list[ModelLook] = []
            try:
                for model in self._state.models.loaded:
                    if found := await self._look(model):
                        looks.append(found)
                self._sections = await asyncio.to_thread(sections, looks, self._told())
            except Exception:  # the next look may be luckier, and whoever listens goes on
                log.exception("memory could not be looked at")
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            rest = _SHARE * sum(one.took_s for one in looks)
            await asyncio.sleep(max(EVERY_S - (time.monotonic() - begun), rest, 0.05))

    def close(self) -> None:
        """Nobody is told of anything any more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _look(self, model: ServedModel) -> ModelLook | None:
        if not model.loaded:
            return None
        sessions = [one for one in self._state.sessions.by_id.values() if one.model is model]
        with model.kept():
            return await model.call(partial(look_at, model, sessions))

    def _told(self) -> dict[str, Any]:
        """What the event loop itself knows."""
        records = self._state.records
        return {"requests": records.told(), "counters": records.counters()}


def sections(looks: list[ModelLook], told: dict[str, Any]) -> dict[str, bytes]:
    """What is sent, each part by itself; in a thread."""
    several = len(looks) > 1
    parts: list[dict[str, Any]] = []
    pools: list[dict[str, Any]] = []
    for one in looks:
        mine = budget_parts(one.breakdown, one.pools)
        parts += [{**p, "name": f"{one.name}: {p['name']}"} for p in mine] if several else mine
        for pool in one.pools:
            pools.append({"model": one.name if several else "", **pool_map(pool, one.holders)})
    first = looks[0] if looks else None
    used = sum(part["bytes"] for part in parts)
    whole: dict[str, Any] = {
        "model": first and {"id": first.name, "n_ctx": first.n_ctx},
        "models": [one.name for one in looks],
        "budget": first and {
            "limit_bytes": first.limit, "used_bytes": used, "parts": parts,
        },
        "pools": pools,
        "sessions": [session for one in looks for session in one.sessions],
        "prefix": first and _sum([one.prefix for one in looks]),
        **told,
    }  # fmt: skip
    return {name: encode(value) for name, value in whole.items()}


def _sum(all_stats: list[dict[str, Any]]) -> dict[str, Any]:
    """The prefix caches of all models as one."""
    total: dict[str, Any] = {"misses": {}}
    for stats in all_stats:
        for name, value in stats.items():
            if name == "misses":
                for reason, n in value.items():
                    total["misses"][reason] = total["misses"].get(reason, 0) + n
            else:
                total[name] = total.get(name, 0) + value
    return total


async def events(request: Request) -> Response:
    """What the page follows."""
    live: Live = request.app.state.quire.live

    async def nothing() -> None:
        pass

    return EventStream(live.events(), nothing)
