"""Changing budgets while they are used."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.engine.engine import Engine
from quire.engine.room import Rank
from quire.errors import BudgetError
from quire.memory.build import MemorySettings, longest_on_each, sequence_bytes


class ContextSettings(MemorySettings, Protocol):
    """What a user chose about memory, and about the context."""

    @property
    def n_ctx(self) -> int | None: ...


def resize(engine: Engine, limits: Mapping[Budget, int], settings: ContextSettings) -> None:
    """Lets an engine's memory hold so many bytes, and no more; BudgetError if that cannot be.

    Whoever holds too much gives way as when memory is short: cached prefixes first, then sequences,
    which come back when they are used. A context that nobody fixed becomes what fits now.
    """
    engine.check_open()
    by_whole = {budget.whole: limit for budget, limit in limits.items()}
    for device in engine.runner.devices:
        most = max(device.budget.limit, device.capacity)
        if by_whole.get(device.budget.whole, 0) > most:
            raise BudgetError(
                f"a budget of {by_whole[device.budget.whole]:,} bytes is more than the {most:,} "
                f"that {device.name} has"
            )
    others = [one for budget in by_whole for one in budget.lenders if one is not engine.room]
    for one in (engine.room, *others):  # what the last step computed in says nothing of the next
        one.trim()
    room = _room_of_one(engine, by_whole, settings)  # before anybody gives up what is missed
    _reclaim(by_whole)
    engine.room.make(lambda: _within(by_whole), None, Rank.RUNNING)
    _reclaim(by_whole)  # what others gave way to may be idle now
    before = {budget: budget.limit for budget in by_whole}
    try:
        for budget, limit in by_whole.items():
            budget.resize(limit)
    except BudgetError:
        for budget, limit in before.items():
            budget.resize(max(limit, budget.used))
        raise
    _fit(engine, room, settings)
    for budget in by_whole:
        for follow in budget.followers:  # others have their share of it
            follow()


def refit(engine: Engine, settings: ContextSettings) -> None:
    """Takes a budget for what somebody has made of it: pools and context are what it can pay for.

    Where there is no room for a page, the context stays: requests will tell what they lack.
    """
    with suppress(BudgetError):
        _fit(engine, _room_of_one(engine, {}, settings), settings)


def _fit(engine: Engine, room: int, settings: ContextSettings) -> None:
    engine.memory.grow()
    if settings.n_ctx is None:
        engine.n_ctx = min(engine.runner.model.n_ctx_train, room)


def _reclaim(limits: Mapping[Budget, int]) -> None:
    for budget in limits:
        budget.reclaim()


def _within(limits: Mapping[Budget, int]) -> bool:
    return all(budget.used <= limit for budget, limit in limits.items())


def _room_of_one(engine: Engine, limits: Mapping[Budget, int], settings: ContextSettings) -> int:
    """How many tokens a sequence that is alone could have; it must do for each that runs.

    Others on the same budget lend what they can do without.
    """
    running = max((one.length + 1 for one in engine.scheduler.active), default=1)
    left: dict[Device, int] = {}
    for device in engine.runner.devices:
        groups = engine.memory.specs_by_device.get(device, [])  # none where there are only weights
        budget = device.budget.whole
        limit = limits.get(budget, budget.limit)
        others = [one for one in budget.lenders if one is not engine.room]
        lent = sum(one.lendable(budget) for one in others)
        pages = sum(pool.committed for pool in engine.memory.pools if pool.device is device)
        stays = budget.used - lent - pages
        takes = sequence_bytes(groups, running, settings, device.granularity)
        least = stays + max(takes, pages - engine.room.own(budget))
        if limit < least:
            held = ", ".join(f"{use} {size:,}" for use, size in sorted(budget.breakdown.items()))
            most = max(device.budget.limit, device.capacity)
            enough = f", or pass at least {least:,}"
            if least > most:
                enough = f": {least:,} would do, and {device.name} has {most:,}"
            who = f"a request of {running - 1:,} tokens that runs" if running > 1 else "a sequence"
            raise BudgetError(
                f"the budget of {device.name} cannot become {limit:,} bytes: {stays:,} of the "
                f"{budget.used:,} that are held stay (held: {held}), and {who} takes {takes:,} at "
                f"least; close sessions or wait{enough}"
            )
        left[device] = limit - stays
    return longest_on_each(engine.memory.specs_by_device, left.__getitem__, settings)
