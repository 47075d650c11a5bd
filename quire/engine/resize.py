"""Changing the budget while it is used."""

from __future__ import annotations

from typing import Protocol

from quire.engine.engine import Engine
from quire.engine.room import Rank
from quire.errors import BudgetError
from quire.memory.build import MemorySettings, longest_sequence


class ContextSettings(MemorySettings, Protocol):
    """What a user chose about memory, and about the context."""

    @property
    def n_ctx(self) -> int | None: ...


def resize(engine: Engine, limit: int, settings: ContextSettings) -> None:
    """Lets an engine's memory hold so many bytes, and no more; BudgetError if that cannot be.

    Whoever holds too much gives way as when memory is short: cached prefixes first, then sequences,
    which come back when they are used. A context that nobody fixed becomes what fits now.
    """
    engine.check_open()
    budget = engine.budget.whole
    most = max(budget.limit, *(device.capacity for device in engine.memory.devices))
    if limit > most:
        raise BudgetError(f"a budget of {limit:,} bytes is more than the {most:,} that there are")
    room = _room_of_one(engine, limit, settings)
    budget.reclaim()
    engine.room.make(lambda: budget.used <= limit, None, Rank.RUNNING)
    budget.reclaim()  # what others gave way to may be idle now
    budget.resize(limit)
    engine.memory.grow()
    if settings.n_ctx is None:
        engine.n_ctx = min(engine.runner.model.n_ctx_train, room)


def _room_of_one(engine: Engine, limit: int, settings: ContextSettings) -> int:
    """How many tokens a sequence that is alone could have; it must do for each that runs."""
    budget, pools = engine.budget.whole, engine.memory.pools
    fixed = budget.used - sum(pool.committed for pool in pools)
    running = max((one.length + 1 for one in engine.scheduler.active), default=1)
    try:
        room = longest_sequence(engine.runner.model.groups, limit - fixed, settings)
    except BudgetError as error:
        raise BudgetError(
            f"the budget cannot become {limit:,} bytes: {fixed:,} are held by what stays, and "
            f"{error}"
        ) from error
    if room < running:
        raise BudgetError(
            f"the budget cannot become {limit:,} bytes: {fixed:,} are held by what stays, which "
            f"leaves room for {room:,} tokens, and a request that runs has {running - 1:,}; wait "
            "until it has ended, or pass more"
        )
    return room
