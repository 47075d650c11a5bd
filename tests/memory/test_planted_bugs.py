"""The random machine must notice: each of these is a small mistake in the real code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fake_kinds
import numpy as np
import pytest
from fake_kinds import LOG_TOKENS
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_memory_kinds_stateful import KindMachine

from quire.memory import parking, sequences
from quire.memory.append import SetAside
from quire.memory.attention import AttentionMemory
from quire.memory.hybrid import HybridMemory
from quire.memory.lease import AppendLease
from quire.memory.pool import PagePool
from quire.memory.recurrent import RecurrentMemory
from quire.memory.window import WindowMemory

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
    real = RecurrentMemory.__init__

    def init(memory: RecurrentMemory, *args: Any, **named: Any) -> None:
        real(memory, *args, **named)

        def fold(state_in: int, log: int, n: int, state_out: int, layout: Any) -> None:
            fake_kinds.fold(state_in, log, min(n + 1, LOG_TOKENS), state_out, layout)

        memory._pools = replace(memory._pools, fold=fold)

    patch.setattr(RecurrentMemory, "__init__", init)


@bug("window")
def a_window_is_one_too_short(patch: Patch) -> None:
    real = WindowMemory._first_seen
    patch.setattr(WindowMemory, "_first_seen", lambda memory, at: real(memory, at) + 1)


@bug("attention")
def a_lease_keeps_one_too_many(patch: Patch) -> None:
    real = AppendLease.commit

    def commit(lease: AppendLease, accepted: dict[int, int]) -> None:
        counts = lease._counts
        real(lease, {s: min(n + 1, counts[s]) if n else 0 for s, n in accepted.items()})

    patch.setattr(AppendLease, "commit", commit)


@bug("attention")
def replaced_pages_are_never_freed(patch: Patch) -> None:
    patch.setattr(SetAside, "drop_originals", lambda aside: aside.originals.clear())


@bug("attention")
def parking_takes_shared_pages_too(patch: Patch) -> None:
    every = lambda pool, pages: np.ones(len(pages), bool)  # noqa: E731
    patch.setattr(parking, "own_pages", every)
    patch.setattr(sequences, "own_pages", every)


@bug("attention")
def a_checkpoint_holds_nothing(patch: Patch) -> None:
    real = AttentionMemory.checkpoint_save

    def save(memory: AttentionMemory, seq: int, name: str | None = None) -> str:
        name = real(memory, seq, name)
        memory._let_go(memory.checkpoints.get(name).table)
        return name

    patch.setattr(AttentionMemory, "checkpoint_save", save)


@bug("attention and recurrent")
def only_one_part_removes(patch: Patch) -> None:
    patch.setattr(
        HybridMemory,
        "seq_rm",
        lambda memory, seq, p0, p1: (
            memory.can_rm(seq, p0, p1) and memory.parts[0].seq_rm(seq, p0, p1)
        ),
    )


@pytest.mark.parametrize("name", sorted(BUGS))
def test_the_machine_notices(name: str, monkeypatch: Patch) -> None:
    kind, plant = BUGS[name]
    plant(monkeypatch)
    machine = type("Machine", (KindMachine,), {"kind": kind})
    quick = settings(
        max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.raises(BaseException) as caught:
        run_state_machine_as_test(machine, settings=quick)
    assert not isinstance(caught.value, KeyboardInterrupt)
