"""The oracle must notice: each of these is a small mistake in engine, session or memory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.devices.device import Device
from quire.engine import judge
from quire.engine.endings import Endings
from quire.engine.history import History
from quire.engine.prefix_cache import PrefixCache
from quire.engine.sequence import Sequence
from quire.engine.signals import SignalsLater
from quire.engine.way_back import WayBack
from quire.errors import RequestError
from quire.memory import audit
from quire.memory.lease import Lease
from quire.memory.memory import Memory
from quire.memory.pages.pool import PagePool
from quire.memory.prefix.keys import Keys
from quire.memory.status import Status
from quire.memory.tiers.parking import Away
from quire.memory.tokens import Tokens
from tests import session_kinds
from tests.models.test_session_oracle import one_world
from tests.session_truth import Truth

pytestmark = pytest.mark.host
Patch = pytest.MonkeyPatch
BUGS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def bug(kind: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """A mistake, and a kind of model in which it shows."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__.replace("_", " ")] = (kind, plant)
        return plant

    return add


@bug("dense")
def an_interrupt_lands_in_the_middle_of_a_step(patch: Patch) -> None:
    patch.setattr(SignalsLater, "__enter__", lambda block: setattr(block, "_handlers", []))


@bug("dense")
def pages_come_back_from_a_tier_in_the_wrong_order(patch: Patch) -> None:
    real = Away.arrive
    patch.setattr(Away, "arrive", lambda away, fresh: real(away, fresh[::-1]))


@bug("dense")
def an_edited_session_is_computed_again(patch: Patch) -> None:
    real = Sequence.cut_out

    def cut_out(sequence: Sequence, start: int, stop: int) -> None:
        real(sequence, start, stop)
        sequence.whole = None

    patch.setattr(Sequence, "cut_out", cut_out)


@bug("dense")
def an_edited_session_keeps_logits_that_saw_what_is_gone(patch: Patch) -> None:
    real = Sequence.cut_out

    def cut_out(sequence: Sequence, start: int, stop: int) -> None:
        logits = sequence.logits
        real(sequence, start, stop)
        sequence.logits = logits

    patch.setattr(Sequence, "cut_out", cut_out)
    patch.setattr(History, "_drop_last", lambda history, sequence: None)


@bug("dense")
def removing_leaves_holes_where_room_is_short(patch: Patch) -> None:
    def move_up(history: History) -> None:
        room = history.memory.pools[0].has(4)
        with history.memory.init_update(optimize=room) as update:
            if update.status is Status.SUCCESS:
                update.apply()

    patch.setattr(History, "_move_up", move_up)


@bug("dense")
def a_failed_append_keeps_its_tokens(patch: Patch) -> None:
    patch.setattr(WayBack, "go", lambda way_back: None)


@bug("dense")
def a_page_that_a_mark_sees_is_written(patch: Patch) -> None:
    real = PagePool.share_one
    patch.setattr(PagePool, "share_one", lambda pool, page, seen, by: real(pool, page, 0, by))
    patch.setattr(audit, "_audit_writers", lambda pool, holders: [])


@bug("dense")
def a_prefix_of_another_salt_is_given(patch: Patch) -> None:
    real = Keys.root
    patch.setattr(Keys, "root", lambda keys, salt: real(keys, ""))


@bug("dense")
def a_stop_string_keeps_tokens_behind_it(patch: Patch) -> None:
    real = judge.Trial.follow

    def follow(trial: judge.Trial) -> None:
        one = trial.accepted
        reason, one.finish_reason = one.finish_reason, None
        real(trial)
        one.finish_reason = reason

    patch.setattr(judge.Trial, "follow", follow)


@bug("hybrid")
def a_rewound_session_keeps_its_logits(patch: Patch) -> None:
    real = Sequence.truncate

    def truncate(sequence: Sequence, length: int) -> None:
        logits = sequence.logits
        real(sequence, length)
        sequence.logits = logits

    patch.setattr(Sequence, "truncate", truncate)


@bug("dense")
def a_mark_shares_its_list_of_tokens(patch: Patch) -> None:
    patch.setattr(Tokens, "fork", lambda tokens: tokens)


@bug("dense")
def the_index_offers_a_token_that_is_not_computed(patch: Patch) -> None:
    real = PrefixCache.adopt

    def adopt(cache: PrefixCache, sequence: Sequence) -> None:
        real(cache, sequence)
        if 0 < sequence.computed < sequence.length - 1:
            sequence.adopt(sequence.computed + 1, sequence.branch_at)

    patch.setattr(PrefixCache, "adopt", adopt)


@bug("hybrid")
def work_on_pages_is_not_run(patch: Patch) -> None:
    patch.setattr(Device, "run", lambda device, work: None)


@bug("recurrent")
def a_draft_that_was_wrong_is_kept(patch: Patch) -> None:
    real = Lease.commit

    def commit(lease: Lease, accepted: dict[int, int]) -> None:
        counts = lease._counts
        real(lease, {s: min(n + 1, counts[s]) if n else 0 for s, n in accepted.items()})

    patch.setattr(Lease, "commit", commit)


@bug("moe")
def what_nobody_holds_runs_on(patch: Patch) -> None:
    real = Endings.when_gone
    patch.setattr(Endings, "when_gone", lambda self, handle, _: real(self, handle, lambda: None))


@bug("recurrent")
def a_mark_comes_back_with_zeros(patch: Patch) -> None:
    real = Memory.checkpoint_unpark

    def unpark(memory: Memory, name: str) -> None:
        parked = memory.checkpoints.get(name).parked is not None
        real(memory, name)
        if parked:
            for pool, pages, _ in memory.held_by(memory.checkpoints.get(name)):
                pool.bytes.fill(pages[-1:], 0)

    patch.setattr(Memory, "checkpoint_unpark", unpark)


@bug("dense")
def a_page_is_read_back_short(patch: Patch) -> None:
    real = Away.read

    def read(away: Away) -> Any:
        fresh = real(away)
        last = away.pool.bytes.read(fresh[-1:])[0]
        last[: len(last) // 8] = 0
        return fresh

    patch.setattr(Away, "read", read)


@bug("dense")
def forks_that_come_back_together_both_append(patch: Patch) -> None:
    real = Away.arrive

    def arrive(away: Away, fresh: Any) -> None:
        holders = list(away.holders)
        real(away, fresh)
        if len(holders) > 1:
            away.pool.frozen[fresh] = 0
            away.pool.appender[fresh] = max(part.seq for part, _ in holders)

    patch.setattr(Away, "arrive", arrive)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_the_oracle_notices(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    kind, plant = BUGS[name]
    path = session_kinds.write(kind, tmp_path)
    with quire.load(path, n_ctx=session_kinds.N_CTX, threads=1) as roomy:
        truth = Truth(roomy)
        plant(monkeypatch)
        with pytest.raises((AssertionError, RequestError)):  # refusals that nobody expects count
            for seed in range(1, 30):
                one_world(path, kind, truth, seed, tmp_path, 150)
        monkeypatch.undo()
