"""What every kind of memory must do, said through the interface and run against all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from fake_kernel import FakeOps, entry
from fake_kinds import (
    KINDS,
    LOG_TOKENS,
    append,
    by_position,
    check_saved,
    check_seq,
    check_view,
    empty,
    make_kind,
    snapshot,
    tokens_at,
    write,
)

from quire.devices.device import GroupKernels
from quire.errors import OutOfMemory, PagesError, RequestError
from quire.memory.audit import AuditError
from quire.memory.batch import SeqTokens
from quire.memory.memory import Memory
from quire.memory.pages.pool import PagePool
from quire.memory.pages.reserved import ReservedPages
from quire.memory.status import Status


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def memory(kind: str) -> Iterator[Memory]:
    memory = make_kind(kind)
    yield memory
    memory.audit()


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that moves bytes of a page or makes a new one."""
    made: list[str] = []
    for of, name in (
        (FakeOps, "copy_pages"), (PagePool, "allocate_one"), (PagePool, "_lowest_free"),
    ):  # fmt: skip
        real = getattr(of, name)

        def counted(*args: Any, real: Any = real, name: str = name) -> Any:
            made.append(name)
            return real(*args)

        monkeypatch.setattr(of, name, counted)
    return made


# -- steps ----------------------------------------------------------------------------------------


def test_a_lease_shows_where_tokens_go_and_keeps_what_is_accepted(memory: Memory) -> None:
    append(memory, 3, 10, 11, 12)
    with memory.reserve([entry(3, 13, 14, 15), entry(0, 20)]) as lease:
        assert sorted(lease.views) == sorted(group.name for group in memory.groups)
        write(memory, lease.ubatch)
        check_view(memory, lease.ubatch, 0, tokens_at(*range(10, 16)))
        check_view(memory, lease.ubatch, 1, tokens_at(20))
        memory.audit()
        assert (lease.seqs, lease.tokens.tolist()) == ([3, 0], [13, 14, 15, 20])
        assert (lease.positions.tolist(), lease.seq_rows.tolist()) == ([3, 4, 5, 0], [0, 0, 0, 1])
        lease.commit({3: 2, 0: 1})
    check_seq(memory, 3, tokens_at(*range(10, 15)))
    check_seq(memory, 0, tokens_at(20))
    assert (memory.seq_pos_max(3), memory.seq_pos_max(0), memory.seq_pos_max(9)) == (4, 0, -1)
    assert memory.seqs == [0, 3]


@pytest.mark.parametrize("before", [1, 4, 5, 13])
@pytest.mark.parametrize("new", [1, 2, LOG_TOKENS, LOG_TOKENS + 1, 23])
def test_an_undone_step_leaves_everything_as_it_was(memory: Memory, before: int, new: int) -> None:
    """Whether it would have appended, copied, folded or scanned, and with forks beside it."""
    append(memory, 0, *range(100, 100 + before))
    append(memory, 0, 90)
    memory.seq_cp(0, 1)
    memory.checkpoint_save(0)
    was, was_held = snapshot(memory), snapshot(memory, bytes_too=False)
    drafts = range(200, 200 + new)
    entries = [entry(0, *drafts), entry(1, *drafts), entry(5, *drafts)]
    with pytest.raises(ZeroDivisionError), memory.reserve(entries):
        raise ZeroDivisionError
    assert snapshot(memory) == was
    with memory.reserve(entries) as lease:
        memory.audit()
        write(memory, lease.ubatch)
        memory.audit()
    with memory.reserve(entries) as lease:
        write(memory, lease.ubatch)
        lease.commit({0: 0, 1: 0, 5: 0})
    # Entries nobody sees may have been written; everything else is as it was.
    assert snapshot(memory, bytes_too=False) == was_held
    expected = tokens_at(*range(100, 100 + before), 90)
    check_seq(memory, 0, expected)
    check_seq(memory, 1, expected)
    assert memory.seqs == [0, 1]


@pytest.mark.parametrize("n", range(1, LOG_TOKENS + 1))
def test_any_part_of_a_draft_can_be_kept(memory: Memory, n: int) -> None:
    assert memory.room_for_draft(0) >= n
    expected: list[int] = []
    for step, kept in enumerate([*range(n + 1), *range(n, -1, -1)] * 2):
        draft = range(1000 * step, 1000 * step + n)
        with memory.reserve([entry(0, *draft)]) as lease:
            write(memory, lease.ubatch)
            check_view(memory, lease.ubatch, 0, tokens_at(*expected, *draft))
            lease.commit({0: kept})
        expected += draft[:kept]
        if expected:
            check_seq(memory, 0, tokens_at(*expected))
        memory.audit()


def test_what_cannot_be_kept_is_refused_before_anything_changes(memory: Memory) -> None:
    append(memory, 0, 1, 2)
    room = memory.room_for_draft(0)
    n = LOG_TOKENS + 3
    with memory.reserve([entry(0, *range(10, 10 + n)), entry(1, 7)]) as lease:
        write(memory, lease.ubatch)
        if n > room:
            was = snapshot(memory)
            with pytest.raises(RequestError, match=r"keep [36] or more, or none.*room_for_draft"):
                lease.commit({0: 2, 1: 1})
            assert snapshot(memory) == was
            lease.commit({0: n, 1: 1})
        else:
            lease.commit({0: 4, 1: 1})
    kept = n if n > room else 4
    check_seq(memory, 0, tokens_at(1, 2, *range(10, 10 + kept)))
    check_seq(memory, 1, tokens_at(7))


def test_commit_wants_a_number_for_each_sequence_once(memory: Memory) -> None:
    for accepted in ({}, {0: 3}, {0: -1}, {1: 1}, {0: 1, 1: 1}):
        with (
            pytest.raises(RequestError, match="commit"),
            memory.reserve([entry(0, 1, 2)]) as lease,
        ):
            lease.commit(accepted)
        assert empty(memory)
    with memory.reserve([entry(0, 1, 2)]) as lease:
        lease.commit({0: 2})
        with pytest.raises(RequestError, match="once"):
            lease.commit({0: 1})
    assert memory.seq_pos_max(0) == 1


@pytest.mark.parametrize("size", [64, 4160, 10_048])
def test_no_room_is_said_before_anything_changes(kind: str, size: int) -> None:
    memory = make_kind(
        kind, head_dim=max(size // 64, 2), state_bytes=size, limit=12 * size + 40_960
    )
    ids = itertools.count(1)
    held: dict[int, list[int]] = {}
    for seq in itertools.count():
        tokens = [next(ids) for _ in range(9)]
        if not memory.fits([(seq, 9)]):
            break
        append(memory, seq, *tokens)
        held[seq] = tokens
    was = snapshot(memory)
    with pytest.raises(OutOfMemory, match=r"free sequences.*raise"):
        memory.reserve([entry(seq, *range(9))])
    context = memory.init_batch([entry(seq, *range(9))], 9)
    assert context.status is Status.FAILED_PREPARE and isinstance(context.error, OutOfMemory)
    with pytest.raises(RequestError, match="free sequences"):
        context.apply()
    assert snapshot(memory) == was and len(held) > 1
    memory.seq_free(0)
    append(memory, seq, *range(500, 509))
    for other in range(1, seq):
        check_seq(memory, other, tokens_at(*held[other]))
    memory.audit()


def step_of_all_kinds(memory: Memory) -> list[SeqTokens]:
    """What takes new pages, copies and folds, and scans."""
    append(memory, 0, *range(1, 4))
    memory.seq_cp(0, 1)
    memory.checkpoint_save(1)
    return [entry(0, *range(10, 14)), entry(1, 20), entry(2, *range(30, 40))]


def each_call_fails(
    memory: Memory, step: Callable[[], None], patch: Callable[[Callable[..., Any]], None]
) -> int:
    """Does a step until no call of what is patched fails any more; returns how many did."""
    was = snapshot(memory)
    calls: Iterator[int] = itertools.count()
    failing = -1

    def fails(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            if next(calls) == failing:
                raise PagesError("injected")
            return real(*args)

        return wrapper

    patch(fails)
    for failing in range(100):
        calls = itertools.count()
        try:
            step()
        except PagesError:
            assert snapshot(memory) == was
            memory.audit()
            continue
        assert next(calls) <= failing, "the injected failure was swallowed"
        break
    return failing


def test_whatever_fails_in_a_step_is_undone(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each allocation, and each call of a device, of a step that needs all of them."""
    entries = step_of_all_kinds(memory)

    def patch(fails: Callable[..., Any]) -> None:
        device = memory.devices[0]
        for pool in memory.pools:
            monkeypatch.setattr(pool, "allocate", fails(pool.allocate))
        monkeypatch.setattr(device.ops, "copy_pages", fails(device.ops.copy_pages))
        for name, bound in device._groups.items():
            if bound.kernels.fold:
                broken = replace(bound, kernels=GroupKernels(fold=fails(bound.kernels.fold)))
                monkeypatch.setitem(device._groups, name, broken)

    def step() -> None:
        with memory.reserve(entries) as lease:
            memory.run(lease.ubatch.work)

    # A page for new tokens and a copy; or states, logs, a copy and a fold.
    assert each_call_fails(memory, step, patch) >= 2


@pytest.mark.parametrize("how", ["reserve", "init_batch"])
def test_whatever_fails_while_applying_is_undone(
    memory: Memory, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each use of a page that was set aside."""
    entries = step_of_all_kinds(memory)

    def patch(fails: Callable[..., Any]) -> None:
        monkeypatch.setattr(ReservedPages, "take", fails(ReservedPages.take))

    def step() -> None:
        if how == "reserve":
            memory.reserve(entries).abort()
            return
        with memory.init_batch(entries, 100) as context:
            try:
                context.apply()
            except PagesError:
                assert context.status is Status.FAILED_COMPUTE
                raise
        ends = [memory.seq_pos_max(seq) for seq in range(3)]
        assert ends == [6, 3, 9]  # what was applied is kept

    assert each_call_fails(memory, step, patch) >= 2


def test_one_thing_at_a_time(memory: Memory) -> None:
    append(memory, 0, 1, 2)
    name = memory.checkpoint_save(0)
    refused: list[Callable[[], object]] = [
        lambda: memory.reserve([entry(1, 1)]),
        lambda: memory.init_batch([entry(1, 1)], 1),
        lambda: memory.init_update(),
        lambda: memory.clear(False),
        lambda: memory.seq_new(),
        lambda: memory.seq_free(0),
        lambda: memory.seq_rm(0, 0, -1),
        lambda: memory.seq_cp(0, 1),
        lambda: memory.seq_keep(0),
        lambda: memory.seq_add(0, 0, -1, 1),
        lambda: memory.seq_div(0, 0, -1, 2),
        lambda: memory.checkpoint_save(0),
        lambda: memory.checkpoint_restore(0, name),
        lambda: memory.checkpoint_delete(name),
        lambda: memory.check_idle(),
        lambda: memory.close(),
    ]
    with memory.reserve([entry(0, 3)]) as lease:
        write(memory, lease.ubatch)
        was = snapshot(memory)
        for operation in refused:
            with pytest.raises(RequestError, match="open lease"):
                operation()
        assert snapshot(memory) == was
        lease.commit({0: 1})
    memory.check_idle()
    check_seq(memory, 0, tokens_at(1, 2, 3))


# -- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ubatch", [1, 3, LOG_TOKENS + 2, 100])
def test_a_batch_is_computed_in_micro_batches(memory: Memory, n_ubatch: int) -> None:
    append(memory, 0, 90, 91)
    memory.seq_cp(0, 1)
    batch = {0: range(100, 123), 1: range(200, 204), 7: range(300, 313)}
    expected = {0: [90, 91], 1: [90, 91], 7: []}
    with memory.init_batch([entry(s, *t) for s, t in batch.items()], n_ubatch) as context:
        assert context.status is Status.SUCCESS
        with pytest.raises(RequestError, match="apply"):
            _ = context.ubatch
        while True:
            used = [pool.used for pool in memory.pools]
            context.apply()
            now = [pool.used for pool in memory.pools]
            assert all(a >= b for a, b in zip(used, now, strict=True))  # room was found before
            memory.audit()
            write(memory, context.ubatch)
            for row, seq in enumerate(context.ubatch.seqs):
                expected[seq] += context.ubatch.tokens[context.ubatch.seq_rows == row].tolist()
                check_view(memory, context.ubatch, row, tokens_at(*expected[seq]))
            assert len(context.ubatch.tokens) <= n_ubatch
            if not context.next():
                break
    for seq, tokens in batch.items():
        assert expected[seq] == [*([90, 91] if seq < 2 else []), *tokens]
        check_seq(memory, seq, tokens_at(*expected[seq]))


def test_a_context_that_is_given_up_keeps_what_was_applied(memory: Memory) -> None:
    with memory.init_batch([entry(0, *range(1, 30)), entry(1, 50)], 7) as context:
        context.apply()
        write(memory, context.ubatch)
        assert context.next()
        context.apply()
        write(memory, context.ubatch)
    check_seq(memory, 0, tokens_at(*range(1, 15)))
    assert memory.seqs == [0]
    append(memory, 0, 15)


def test_a_full_memory_can_be_pretended(memory: Memory) -> None:
    context = memory.init_full()
    context.apply()
    assert sorted(context.ubatch.views) == sorted(group.name for group in memory.groups)
    assert context.status is Status.SUCCESS and not context.next() and empty(memory)


# -- sharing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 14])
def test_forks_share_everything_and_never_see_each_other(
    memory: Memory, moved: list[str], n: int
) -> None:
    for token in range(n):
        append(memory, 0, token)
    del moved[:]
    used = [pool.used for pool in memory.pools]
    memory.seq_cp(0, 1)
    memory.seq_cp(1, 2)
    assert not moved and [pool.used for pool in memory.pools] == used
    base = list(range(n))
    expected = {0: [*base], 1: [*base], 2: [*base]}
    for step in range(12):  # far enough for every log to be folded
        for seq in (1, 0, 2):
            append(memory, seq, 100 * seq + 1000 * step)
            expected[seq].append(100 * seq + 1000 * step)
            for other, tokens in expected.items():
                check_seq(memory, other, tokens_at(*tokens))
        memory.audit()


def test_the_start_of_a_sequence_can_be_shared(memory: Memory) -> None:
    for token in range(100, 108):
        append(memory, 0, token)
    memory.checkpoint_save(0, "start")
    for p1 in range(-1, 10):
        was = snapshot(memory)
        memory.seq_cp(0, 0, -1, p1)
        assert snapshot(memory) == was
        try:
            memory.seq_cp(0, 1, -1, p1)
        except RequestError:
            assert snapshot(memory) == was
            assert p1 not in (-1, 0, 8, 9)
            continue
        expected = list(range(100, 108 if p1 < 0 else min(100 + p1, 108)))
        append(memory, 1, 7)
        append(memory, 0, 8)
        check_seq(memory, 1, tokens_at(*expected, 7))
        check_seq(memory, 0, tokens_at(*range(100, 108), 8))
        memory.audit()
        memory.seq_free(1)
        memory.checkpoint_restore(0, "start")


def test_copies_and_removals_that_cannot_be_change_nothing(memory: Memory) -> None:
    append(memory, 0, *range(1, 12))
    append(memory, 1, *range(21, 29))
    was = snapshot(memory)
    for src, dst, p0, p1 in [(3, 4, -1, -1), (0, -1, -1, -1), (0, 1, -1, -1), (0, 2, 5, 3)]:
        with pytest.raises(RequestError):
            memory.seq_cp(src, dst, p0, p1)
    for wrong in (memory.can_rm, memory.seq_rm):
        with pytest.raises(RequestError, match="no range"):
            wrong(0, 5, 3)
    with pytest.raises(RequestError, match=r"no sequence 3; there are \[0, 1\]"):
        memory.seq_keep(3)
    assert snapshot(memory) == was
    for p0, p1 in itertools.product(range(-1, 13), range(-1, 13)):
        if (p1 < 0 or p0 <= p1) and not memory.can_rm(0, p0, p1):
            assert not memory.seq_rm(0, p0, p1) and not memory.seq_rm(-1, p0, p1)
    assert snapshot(memory) == was


def test_ids_are_handed_out_lowest_first(memory: Memory) -> None:
    append(memory, 1, 5)
    assert [memory.seq_new(), memory.seq_new()] == [0, 2]
    assert memory.seq_rm(0, -1, -1) and memory.seq_new() == 3  # emptied, but still somebody's
    memory.seq_free(0)
    assert memory.seq_new() == 0
    with pytest.raises(RequestError, match="start at 0"):
        memory.seq_free(-1)


# -- removing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 5])
def test_the_last_tokens_can_be_taken_back_and_computed_anew(
    kind: str, memory: Memory, n: int
) -> None:
    """As far back as the kind can; of what was appended last, a window may refuse a part, and so
    may a log that was folded on the way.
    """
    may_refuse = "window" in kind or by_position(kind)
    for start in (0, 7):
        if start:
            append(memory, 0, *range(100, 100 + start))
        for _ in range(3):
            append(memory, 0, *range(200, 200 + n))
            whole = tokens_at(*range(100, 100 + start), *range(200, 200 + n))
            for end in range(start + n, start, -1):
                can = memory.can_rm(0, end, -1)
                assert memory.seq_rm(0, end, -1) == can and (can or may_refuse)
                check_seq(memory, 0, whole[: memory.seq_pos_max(0) + 1])
            if not memory.seq_rm(0, start, -1):
                assert memory.seq_rm(0, 0, -1)
                append(memory, 0, *range(100, 100 + start))
            memory.audit()
        memory.seq_rm(0, 0, -1)


def test_a_sequence_can_be_emptied_and_started_again(memory: Memory) -> None:
    for step in range(3):
        append(memory, 0, *range(step, 40 + step))
        append(memory, 1, step)
        assert memory.seq_rm(0, 0, -1)
        assert (memory.seq_pos_min(0), memory.seq_pos_max(0)) == (-1, -1)
        assert memory.seqs == [0, 1]
    memory.seq_keep(0)
    assert memory.seqs == [0, 1] and memory.seq_pos_max(1) == -1
    assert empty(memory)


def test_positions_tell_the_truth(memory: Memory) -> None:
    assert (memory.seq_pos_min(0), memory.seq_pos_max(0)) == (-1, -1)
    for n in range(1, 30):
        append(memory, 0, n)
        low, high = memory.seq_pos_min(0), memory.seq_pos_max(0)
        assert high == n - 1 and 0 <= low <= high
        if low == 0 and n <= LOG_TOKENS:
            assert all(memory.can_rm(0, p, -1) for p in range(n))


def test_everything_gone_is_nothing_held(memory: Memory) -> None:
    for seq in range(4):
        append(memory, seq, *range(1, 30))
        append(memory, seq, 30, 31)
        memory.checkpoint_save(seq, f"at {seq}")
        append(memory, seq, 32)
    memory.seq_cp(0, 9)
    for seq in (0, 1, 2, 3, 9):
        memory.seq_free(seq)
    for seq in (2, 0, 3, 1):
        check_saved(memory, f"at {seq}", tokens_at(*range(1, 32)))
        memory.checkpoint_delete(f"at {seq}")
    assert empty(memory)
    append(memory, 0, *range(1, 9))
    memory.checkpoint_save(0)
    memory.clear(data=True)
    assert empty(memory)
    append(memory, 0, 1)
    memory.close()
    assert {device.budget.used for device in memory.devices} == {0}


# -- moving positions -----------------------------------------------------------------------------


def test_positions_move_or_are_refused(memory: Memory) -> None:
    append(memory, 0, 1, 2, 3)
    was = snapshot(memory)
    if not memory.can_shift:
        for operation in (memory.seq_add, memory.seq_div):
            with pytest.raises(RequestError, match="cannot move"):
                operation(0, 0, -1, 2)
        assert snapshot(memory) == was
        assert memory.init_update().status is Status.NO_UPDATE
        return
    for delta in (-1, 2**31):
        with pytest.raises(RequestError, match="positions would become"):
            memory.seq_add(0, 0, -1, delta)
    with pytest.raises(RequestError, match="by 0"):
        memory.seq_div(0, 0, -1, 0)
    assert snapshot(memory) == was
    memory.seq_add(0, 0, -1, 10)
    with pytest.raises(RequestError, match="init_update"):
        memory.reserve([entry(0, 4)])
    with pytest.raises(RequestError, match="init_update"):
        memory.init_batch([entry(0, 4)], 1)
    context = memory.init_update()
    assert context.status is Status.SUCCESS
    context.apply()
    check_seq(memory, 0, tokens_at(1, 2, 3, start=10))
    append(memory, 0, 4)
    check_seq(memory, 0, tokens_at(1, 2, 3, 4, start=10))
    update = memory.init_update(optimize=True)
    assert update.status is Status.NO_UPDATE
    with pytest.raises(RequestError, match="nothing to apply"):
        update.apply()


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_restore_in_any_order_and_move_no_bytes(
    memory: Memory, moved: list[str]
) -> None:
    names, expected = [], []
    tokens: list[int] = []
    for step in range(6):
        new = range(10 * step, 10 * step + (3, 1, 12, 1, 4, 2)[step])
        append(memory, 0, *new)
        tokens = [*tokens, *new]
        names.append(memory.checkpoint_save(0))
        expected.append(tokens)
    del moved[:]
    for i in (4, 0, 2, 2, 1, 5, 3, 0):
        memory.checkpoint_restore(0, names[i])
        check_seq(memory, 0, tokens_at(*expected[i]))
        memory.audit()
    assert not moved
    for i in (4, 0, 2, 5, 1, 3):  # going on from each of them spoils none
        memory.checkpoint_restore(0, names[i])
        for token in range(900, 900 + LOG_TOKENS + 2):
            append(memory, 0, token)
        for name, saved in zip(names, expected, strict=True):
            check_saved(memory, name, tokens_at(*saved))
    memory.checkpoint_restore(7, names[4])
    memory.checkpoint_delete(names[4])
    memory.seq_free(0)
    memory.checkpoint_restore(0, names[3])
    check_seq(memory, 0, tokens_at(*expected[3]))
    check_seq(memory, 7, tokens_at(*expected[4]))


def test_checkpoints_have_names_and_timings(memory: Memory) -> None:
    append(memory, 0, 1)
    assert memory.checkpoint_supported()
    assert memory.checkpoint_save(0, "mark") == "mark"
    was = snapshot(memory)
    with pytest.raises(RequestError, match="'mark' already"):
        memory.checkpoint_save(0, "mark")
    with pytest.raises(RequestError, match="no sequence 4"):
        memory.checkpoint_save(4)
    with pytest.raises(RequestError, match=r"no checkpoint 'else'.*mark"):
        memory.checkpoint_restore(0, "else")
    with pytest.raises(RequestError, match=r"no checkpoint 'else'.*mark"):
        memory.checkpoint_delete("else")
    with pytest.raises(RequestError, match="start at 0"):
        memory.checkpoint_restore(-1, "mark")
    assert snapshot(memory) == was
    first = memory.checkpoint_save(0)
    assert first not in ("mark", memory.checkpoint_save(0))
    memory.checkpoint_restore(0, first)
    memory.checkpoint_delete(first)
    timings = memory.checkpoints.timings
    assert {what: timing.count for what, timing in timings.items()} == {
        "save": 3, "restore": 1, "delete": 1, "to_bytes": 0, "from_bytes": 0,
    }  # fmt: skip


# -- figures --------------------------------------------------------------------------------------


def test_figures_add_up(memory: Memory) -> None:
    append(memory, 0, *range(1, 11))
    append(memory, 0, 11, 12)
    memory.seq_cp(0, 1)
    append(memory, 1, 50, 51)
    memory.checkpoint_save(1, "mark")
    memory.seq_free(1)
    figures = memory.stats()
    assert list(figures) == [pool.name for pool in memory.pools]
    for pool in memory.pools:
        one = figures[pool.name]
        assert (one["pages_used"], one["bytes_committed"]) == (pool.used, pool.committed)
        assert one["bytes_held"] == pool.used * pool.page_bytes
        assert one["bytes_used"] == one["tokens_used"] * one["bytes_per_token"]
        assert one["bytes_wasted"] == one["bytes_held"] - one["bytes_used"] >= 0
        assert one["bytes_unshared"] >= one["bytes_held"]
    parts = breakdown(memory)
    assert sum(size for use, size in parts.items() if use.endswith("checkpoint mark")) > 0
    with memory.reserve([entry(0, *range(9))]):
        breakdown(memory)


def breakdown(memory: Memory) -> dict[str, int]:
    """Bytes by use, which add up to what each device's budget says."""
    found = memory.memory_breakdown()
    for device in memory.devices:
        assert sum(found[device.name].values()) == device.budget.used
    return {use: size for uses in found.values() for use, size in uses.items()}


def test_audit_sees_what_is_wrong(kind: str) -> None:
    n_pools = len(make_kind(kind).pools)
    for i, how in itertools.product(
        range(n_pools), ["lost", "leaked", "unpaid", "written", "cached", "counted"]
    ):
        memory = make_kind(kind)
        append(memory, 0, *range(1, 8))
        append(memory, 0, 8)
        memory.seq_cp(0, 1)
        memory.audit()
        pool = memory.pools[i]
        if how == "lost":
            pool.refs[pool.live_pages[0]] -= 1
        elif how == "leaked":
            pool.allocate(2)
        elif how == "unpaid":
            pool.budget.release(64, pool.use)
        elif how == "cached":
            pool.cached[pool.live_pages[0]] += 1
        elif how == "counted":
            pool.cached_only += 1
        else:
            pool.frozen[pool.live_pages[-1]] = 0
        with pytest.raises(AuditError):
            memory.audit()


def test_a_micro_batch_whose_computing_fails_is_undone(memory: Memory) -> None:
    append(memory, 0, 1, 2, 3)
    with (
        pytest.raises(ZeroDivisionError),
        memory.init_batch([entry(0, *range(10, 18))], 4) as context,
    ):
        context.apply()
        write(memory, context.ubatch)
        assert context.next()
        context.apply()
        raise ZeroDivisionError
    check_seq(memory, 0, tokens_at(1, 2, 3, *range(10, 14)))
    memory.audit()


def test_saved_state_leaves_out_what_the_prefix_index_keeps(memory: Memory) -> None:
    append(memory, 0, 1, 2, 3)
    memory.checkpoint_save(0, "mine")
    memory.checkpoint_save(0, "cached", cached=True)
    file = BytesIO()
    memory.state_write(file)
    memory.clear(data=False)
    file.seek(0)
    assert list(memory.state_read(file).checkpoints) == ["mine"]
    assert list(memory.checkpoints.by_name) == ["mine"]
