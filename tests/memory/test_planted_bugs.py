"""The random machine must notice: each of these is a small mistake in the real code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_kinds
import numpy as np
import pytest
from fake_kinds import LOG_TOKENS
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_memory_kinds_stateful import KindMachine

from quire.devices.device import PageWork
from quire.errors import QuireError
from quire.memory import keeping
from quire.memory.groups.window import WindowGroup
from quire.memory.lease import Lease
from quire.memory.memory import Memory
from quire.memory.pages.pool import PagePool
from quire.memory.pages.reserved import ReservedPages
from quire.memory.tiers import parking

Patch = pytest.MonkeyPatch
BUGS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def bug(kind: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """A mistake, and a kind of memory in which it shows."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__.replace("_", " ")] = (kind, plant)
        return plant

    return add


@bug("attention")
def frozen_is_one_too_low(patch: Patch) -> None:
    real = PagePool.share_one
    patch.setattr(
        PagePool,
        "share_one",
        lambda pool, page, seen, appender: real(pool, page, seen - 1, appender),
    )


@bug("attention")
def a_shared_page_is_not_counted(patch: Patch) -> None:
    real = PagePool.share_full
    patch.setattr(PagePool, "share_full", lambda pool, ids, slots: real(pool, ids[1:], slots))


@bug("recurrent")
def a_draft_is_folded_before_it_is_kept(patch: Patch) -> None:
    real = fake_kinds.fold

    def fold(states: int, logs: int, layout: Any, *rows: Any) -> None:
        state_in, log, n, state_out = rows
        real(states, logs, layout, state_in, log, np.minimum(n + 1, LOG_TOKENS), state_out)

    patch.setattr(fake_kinds, "fold", fold)


@bug("window")
def a_window_is_one_too_short(patch: Patch) -> None:
    real = WindowGroup._first_seen
    patch.setattr(WindowGroup, "_first_seen", lambda memory, at: real(memory, at) + 1)


@bug("attention")
def a_lease_keeps_one_too_many(patch: Patch) -> None:
    real = Lease.commit

    def commit(lease: Lease, accepted: dict[int, int]) -> None:
        counts = lease._counts
        real(lease, {s: min(n + 1, counts[s]) if n else 0 for s, n in accepted.items()})

    patch.setattr(Lease, "commit", commit)


@bug("attention")
def replaced_pages_are_never_freed(patch: Patch) -> None:
    patch.setattr(ReservedPages, "drop_originals", lambda reserved: reserved.originals.clear())


@bug("attention")
def parking_takes_shared_pages_too(patch: Patch) -> None:
    every = lambda pool, pages, but: np.ones(len(pages), bool)  # noqa: E731
    patch.setattr(parking, "leaving", every)
    patch.setattr(keeping, "leaving", every)


@bug("attention")
def a_checkpoint_holds_nothing(patch: Patch) -> None:
    real = Memory.checkpoint_save

    def save(memory: Memory, seq: int, name: str | None = None, cached: bool = False) -> str:
        name = real(memory, seq, name)
        memory._let_go(memory.checkpoints.get(name).tables)
        return name

    patch.setattr(Memory, "checkpoint_save", save)


@bug("attention and recurrent")
def only_the_first_group_removes(patch: Patch) -> None:
    def remove(memory: Memory, seq: int, p0: int, p1: int) -> bool:
        if not memory.can_rm(seq, p0, p1):
            return False
        for tables in memory._named(seq):
            memory.groups[0].remove(tables[0], p0, p1)
        memory._trim()
        return True

    patch.setattr(Memory, "seq_rm", remove)


@bug("attention")
def pages_are_not_copied(patch: Patch) -> None:
    real = Memory.run

    def run(memory: Memory, work: PageWork) -> None:
        work.copies.clear()
        real(memory, work)

    patch.setattr(Memory, "run", run)


@bug("recurrent")
def work_on_pages_is_not_run(patch: Patch) -> None:
    patch.setattr(Memory, "run", lambda memory, work: None)


@bug("attention")
def page_work_runs_in_the_wrong_order(patch: Patch) -> None:
    real = Memory.run

    def run(memory: Memory, work: PageWork) -> None:
        first, rest = PageWork(), PageWork()
        first.rotations = work.rotations
        rest.copies, rest.folds, rest.moves = work.copies, work.folds, work.moves
        for part in (first, rest):
            real(memory, part)

    patch.setattr(Memory, "run", run)


@bug("attention")
def cached_pages_are_not_counted(patch: Patch) -> None:
    patch.setattr(PagePool, "cache", lambda pool, ids, by: None)


@bug("attention")
def a_page_that_only_the_index_holds_is_not_noticed(patch: Patch) -> None:
    real = PagePool.release

    def release(pool: PagePool, ids: Any) -> None:
        only = pool.cached_only
        real(pool, ids)
        pool.cached_only = min(pool.cached_only, only)

    patch.setattr(PagePool, "release", release)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_the_machine_notices(name: str, monkeypatch: Patch) -> None:
    kind, plant = BUGS[name]
    plant(monkeypatch)
    machine = type("Machine", (KindMachine,), {"kind": kind})
    quick = settings(
        max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.raises((AssertionError, QuireError)):
        run_state_machine_as_test(machine, settings=quick)
