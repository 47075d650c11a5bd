"""What kinds of memory that keep every token in a table must do, page by page.

What all kinds must do, window and recurrent ones included, is in test_memory_kinds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import fake_kinds
import numpy as np
import pytest
from fake_kernel import (
    KERNELS,
    FakeOps,
    Single,
    append,
    attend,
    entry,
    history,
    make_attention,
    make_device,
    make_layout,
    move,
    page_bytes,
    rotate,
    snapshot,
    tokens_of,
    write,
)
from fake_kinds import make_kind

from quire.devices.budget import Budget
from quire.devices.device import GroupKernels
from quire.errors import BudgetError, PagesError, RequestError
from quire.memory.audit import AuditError
from quire.memory.batch import SeqTokens
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.layout import AttentionLayout, GroupSpec
from quire.memory.groups.table import Table
from quire.memory.groups.table_append import TableRows
from quire.memory.groups.views import PageView
from quire.memory.memory import Memory
from quire.memory.status import Status, status_combine

Make = Callable[..., Single]
KINDS: dict[str, Make] = {
    "attention": make_attention,
    "window, all kept": partial(make_attention, window=3, swa_full=True),
    "window that holds all": partial(make_attention, window=1_000_000),
}


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


@pytest.fixture
def memory(make: Make) -> Single:
    return make()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every copy of a page that is made."""
    made: list[tuple[int, int]] = []
    real = FakeOps.copy_pages

    def counted(ops: FakeOps, base: int, size: int, sources: Any, targets: Any) -> None:
        made.extend(zip(sources.tolist(), targets.tolist(), strict=True))
        real(ops, base, size, sources, targets)

    monkeypatch.setattr(FakeOps, "copy_pages", counted)
    return made


def empty(memory: Single) -> bool:
    """Whether nothing is held and nothing is paid for."""
    memory.audit()
    return (memory.pool.used, memory.pool.committed, memory.pool.budget.used) == (0, 0, 0)


# -- steps ----------------------------------------------------------------------------------------


def test_a_view_says_where_tokens_lie(memory: Single) -> None:
    append(memory, 3, 10, 11, 12)
    with memory.reserve([entry(3, 13, 14, 15), entry(0, 20)]) as lease:
        write(memory, lease.ubatch)
        view = lease.views["full"]
        assert isinstance(view, PageView)
        assert view.length.tolist() == [6, 1] and view.first.tolist() == [0, 0]
        assert view.tables.flags.c_contiguous and view.tables.dtype == np.int32
        assert view.slots.dtype == np.int32 and view.slot_positions is None
        assert attend(memory.pool, view, 0) == [(10 + i, i) for i in range(6)]
        assert attend(memory.pool, view, 1) == [(20, 0)]


def test_two_copies_of_one_page_in_one_step_can_both_be_undone(memory: Single) -> None:
    append(memory, 0, 1, 2, 3)
    memory.seq_cp(0, 1)
    memory.seq_rm(0, 2, -1)
    memory.seq_rm(1, 2, -1)
    before = snapshot(memory)
    with memory.reserve([entry(0, 8), entry(1, 9)]) as lease:  # nobody is left on the page
        write(memory, lease.ubatch)
        memory.audit()
    assert snapshot(memory) == before
    with memory.reserve([entry(0, 8), entry(1, 9)]) as lease:
        write(memory, lease.ubatch)
        lease.commit({0: 1, 1: 0})
    memory.audit()
    assert (tokens_of(memory, 0), tokens_of(memory, 1)) == ([1, 2, 8], [1, 2])


def test_what_is_committed_stays_when_the_block_fails_later(memory: Single) -> None:
    with pytest.raises(ZeroDivisionError), memory.reserve([entry(0, 7)]) as lease:
        write(memory, lease.ubatch)
        lease.commit({0: 1})
        raise ZeroDivisionError
    assert tokens_of(memory, 0) == [7]


def test_no_room_is_said_before_anything_changes(make: Make) -> None:
    budget = Budget(8192)
    budget.reserve(4096, "weights")
    for how, error in (({"max_tokens": 12}, PagesError), ({"budget": budget}, BudgetError)):
        memory = make(**how)
        most = 12 if error is PagesError else 4 * (4096 // memory.layout.page_bytes)
        append(memory, 0, *range(1, most - 2))  # three slots are left
        memory.seq_cp(0, 1)
        before = snapshot(memory)
        assert memory.fits([(0, 3)]) and not memory.fits([(0, 4)])
        assert not memory.fits([(1, 1)])  # would have to copy the last page
        for entries in ([entry(0, *range(1, 5))], [entry(0, 1), entry(1, 1)], [entry(7, 1)]):
            with pytest.raises(error, match=r"free sequences.*raise"):
                memory.reserve(entries)
            assert snapshot(memory) == before
        append(memory, 0, 50, 51, 52)
        memory.audit()


def test_a_batch_is_checked(memory: Single) -> None:
    for wrong in ([], [entry(0)], [entry(0, 1), entry(0, 2)], [entry(-1, 1)]):
        with pytest.raises(RequestError):
            memory.reserve(wrong)
        with pytest.raises(RequestError):
            memory.init_batch(wrong, 4)
    with pytest.raises(RequestError, match="n_ubatch"):
        memory.init_batch([entry(0, 1)], 0)
    assert empty(memory)


# -- contexts -------------------------------------------------------------------------------------


def test_a_batch_is_cut_wherever_a_micro_batch_is_full(memory: Single) -> None:
    batch = [entry(0, *range(1, 8)), entry(1, 20), entry(2, 30, 31)]
    sizes, seqs = [], []
    with memory.init_batch(batch, 4) as context:
        while True:
            context.apply()
            write(memory, context.ubatch)
            sizes.append(len(context.ubatch.tokens))
            seqs.append(context.ubatch.seqs)
            if not context.next():
                break
    assert (sizes, seqs) == ([4, 4, 2], [[0], [0, 1], [2]])
    assert tokens_of(memory, 0) == list(range(1, 8))
    assert tokens_of(memory, 2) == [30, 31]


def test_a_full_memory_can_be_pretended(make: Make) -> None:
    memory = make(max_tokens=40)
    context = memory.init_full()
    context.apply()
    view = context.ubatch.views["full"]
    assert isinstance(view, PageView)
    assert view.tables.shape == (1, 10) and view.length.tolist() == [40]
    assert context.status is Status.SUCCESS and not context.next() and empty(memory)


def test_statuses_combine() -> None:
    done, none = Status.SUCCESS, Status.NO_UPDATE
    prepare, compute = Status.FAILED_PREPARE, Status.FAILED_COMPUTE
    assert status_combine(done, none) is status_combine(none, done) is done
    assert status_combine(none, none) is none
    assert status_combine(done, prepare) is status_combine(prepare, compute) is prepare
    assert [s.is_fail for s in Status] == [False, False, True, True]


# -- sharing --------------------------------------------------------------------------------------


def test_forks_share_pages_and_never_see_each_other(
    memory: Single, copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, *range(1, 11))
    used = memory.pool.used
    memory.seq_cp(0, 1)
    memory.seq_cp(1, 2)
    assert memory.pool.used == used and not copies
    append(memory, 0, 50)  # in place: nobody else sees that slot
    assert not copies
    append(memory, 1, 60)
    append(memory, 2, 70, 71)
    append(memory, 1, 61, 62)
    assert len(copies) == 2  # one page for each fork
    base = list(range(1, 11))
    assert tokens_of(memory, 0) == [*base, 50]
    assert tokens_of(memory, 1) == [*base, 60, 61, 62]
    assert tokens_of(memory, 2) == [*base, 70, 71]


def test_the_last_holder_of_a_page_writes_in_place(
    memory: Single, copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, 1, 2)
    memory.seq_cp(0, 1)
    memory.seq_free(0)
    append(memory, 1, 3)
    memory.seq_rm(1, 1, -1)
    append(memory, 1, 4)
    assert tokens_of(memory, 1) == [1, 4] and not copies


def test_rejected_tokens_cost_no_copy_while_a_checkpoint_looks_on(
    memory: Single, copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, 1, 2)
    name = memory.checkpoint_save(0)
    for draft in range(5):
        with memory.reserve([entry(0, 10 + draft, 99)]) as lease:
            write(memory, lease.ubatch)
            lease.commit({0: 0})
    append(memory, 0, 3)
    memory.checkpoint_restore(0, name)
    append(memory, 0, 4)
    assert tokens_of(memory, 0) == [1, 2, 4] and not copies
    memory.seq_free(0)
    memory.checkpoint_restore(3, name)  # a checkpoint never writes, so 3 may
    append(memory, 3, 5)
    assert tokens_of(memory, 3) == [1, 2, 5] and not copies


@pytest.mark.parametrize(("p0", "p1"), [(0, 5), (3, -1), (3, 9), (4, 8), (-1, 0), (20, 30)])
def test_part_of_a_sequence_can_be_shared(memory: Single, p0: int, p1: int) -> None:
    append(memory, 0, *range(100, 110))
    memory.seq_cp(0, 1, p0, p1)
    expected = [100 + p for p in range(10) if p >= p0 and (p1 < 0 or p < p1)]
    assert tokens_of(memory, 1) == expected
    append(memory, 1, 7)
    append(memory, 0, 8)
    assert tokens_of(memory, 1) == [*expected, 7]
    assert tokens_of(memory, 0) == [*range(100, 110), 8]
    memory.audit()


def test_parts_of_several_sequences_can_be_put_together(memory: Single) -> None:
    append(memory, 0, *range(100, 110))
    append(memory, 1, *range(200, 210))
    memory.seq_cp(0, 2, 0, 5)
    memory.seq_cp(1, 2, 5, 8)
    append(memory, 2, 9)
    both = [*((100 + p, p) for p in range(5)), *((200 + p, p) for p in range(5, 8)), (9, 8)]
    assert history(memory.group, memory.table(2)) == both
    with memory.reserve([entry(2, 10)]) as lease:
        write(memory, lease.ubatch)
        assert attend(memory.pool, lease.views["full"], 0) == [*both, (10, 9)]
    with pytest.raises(RequestError, match=r"holds 2 .* 7 first.*seq_rm"):
        memory.seq_cp(0, 2, 7, 9)
    assert history(memory.group, memory.table(2)) == both


def test_parts_of_the_same_page_come_together_again(memory: Single) -> None:
    append(memory, 0, *range(100, 110))
    for p0, p1 in ((1, 3), (6, 7), (3, 6), (0, 1), (7, 9)):
        memory.seq_cp(0, 1, p0, p1)
        memory.audit()
    assert memory.table(1).n_pages == 3 and memory.table(1).positions is None
    append(memory, 0, 8)
    append(memory, 1, 9)
    assert tokens_of(memory, 1) == [*range(100, 109), 9]
    assert tokens_of(memory, 0) == [*range(100, 110), 8]
    memory.seq_free(1)
    memory.seq_free(0)
    assert empty(memory)


def test_parts_come_together_before_they_are_rotated(memory: Single) -> None:
    append(memory, 0, 1, 2, 3, 4)
    memory.seq_cp(0, 1, 0, 2)
    memory.seq_add(0, 2, -1, 5)
    memory.seq_cp(0, 1, 7, -1)
    expected = [(1, 0), (2, 1), (3, 7), (4, 8)]
    assert history(memory.group, memory.table(1)) == expected
    memory.init_update().apply()
    assert (
        history(memory.group, memory.table(0)) == history(memory.group, memory.table(1)) == expected
    )


def test_a_token_cannot_be_in_one_slot_at_two_positions(memory: Single) -> None:
    append(memory, 0, 1, 2, 3)
    memory.seq_cp(0, 1)
    memory.seq_add(1, 0, -1, 10)
    with pytest.raises(RequestError, match="init_update"):
        memory.seq_cp(0, 1)
    memory.init_update().apply()
    memory.seq_cp(0, 1)
    both = [(t + 1, p) for t, p in ((0, 10), (1, 11), (2, 12), (0, 0), (1, 1), (2, 2))]
    assert history(memory.group, memory.table(1)) == both


def test_sequences_that_are_not_there(memory: Single) -> None:
    append(memory, 4, 1)
    operations: list[Callable[[], object]] = [
        lambda: memory.seq_cp(3, 5),
        lambda: memory.seq_keep(3),
        lambda: memory.seq_add(3, 0, -1, 1),
        lambda: memory.checkpoint_save(3),
    ]
    for operation in operations:
        with pytest.raises(RequestError, match=r"no sequence 3; there are \[4\]"):
            operation()
    with pytest.raises(RequestError, match="start at 0"):
        memory.seq_cp(4, -1)
    with pytest.raises(RequestError, match="start at 0"):
        memory.seq_free(-1)  # seq_rm would take it for "all"
    assert memory.seq_rm(3, -1, -1)  # nothing to remove is nothing wrong
    memory.seq_free(3)
    assert tokens_of(memory, 4) == [1]


# -- removing -------------------------------------------------------------------------------------


def test_a_removed_tail_gives_its_pages_back(memory: Single) -> None:
    append(memory, 0, *range(1, 14))
    assert memory.seq_rm(0, 5, -1)
    assert tokens_of(memory, 0) == [1, 2, 3, 4, 5] and memory.pool.used == 2
    append(memory, 0, 9)
    assert history(memory.group, memory.table(0))[-1] == (9, 5)


def test_a_removed_middle_is_not_seen_and_empty_pages_go(memory: Single) -> None:
    append(memory, 0, *range(100, 120))
    assert memory.pool.used == 5
    assert memory.seq_rm(0, 2, 13)
    rest = [(100 + p, p) for p in (0, 1, *range(13, 20))]
    assert history(memory.group, memory.table(0)) == rest and memory.pool.used == 3
    with memory.reserve([entry(0, 7), entry(1, 8)]) as lease:
        write(memory, lease.ubatch)
        view = lease.views["full"]
        assert isinstance(view, PageView) and view.slot_positions is not None
        assert attend(memory.pool, view, 0) == [*rest, (7, 20)] and attend(
            memory.pool, view, 1
        ) == [(8, 0)]
        lease.commit({0: 1, 1: 1})
    assert (memory.seq_pos_min(0), memory.seq_pos_max(0)) == (0, 20)
    assert memory.seq_rm(0, 13, -1)  # what is left counts up from 0 again
    assert memory.table(0).positions is None and tokens_of(memory, 0) == [100, 101]


def test_a_removed_head_moves_the_start(memory: Single) -> None:
    append(memory, 0, *range(100, 112))
    memory.seq_rm(0, -1, 8)
    assert memory.seq_pos_min(0) == 8 and memory.pool.used == 1
    assert memory.table(0).positions is None  # whole pages went, so positions still count up
    append(memory, 0, 7)
    assert history(memory.group, memory.table(0)) == [(100 + p, p) for p in range(8, 12)] + [
        (7, 12)
    ]


def test_removing_leaves_others_alone(memory: Single) -> None:
    append(memory, 0, *range(1, 10))
    memory.seq_cp(0, 1)
    name = memory.checkpoint_save(0)
    memory.seq_rm(0, 2, 7)
    assert tokens_of(memory, 1) == list(range(1, 10))
    memory.seq_rm(-1, 1, -1)
    assert (tokens_of(memory, 0), tokens_of(memory, 1)) == ([1], [1])
    memory.checkpoint_restore(1, name)
    assert tokens_of(memory, 1) == list(range(1, 10))
    memory.seq_keep(1)
    assert tokens_of(memory, 0) == [] and tokens_of(memory, 1) == list(range(1, 10))
    with pytest.raises(RequestError, match="no range"):
        memory.seq_rm(0, 5, 3)


# -- moving positions -----------------------------------------------------------------------------


def test_a_context_shift_rotates_what_moved(memory: Single, copies: list[tuple[int, int]]) -> None:
    append(memory, 0, *range(100, 116))
    memory.seq_rm(0, 2, 9)
    memory.seq_add(0, 9, -1, -7)
    assert memory.seq_pos_max(0) == 8
    with pytest.raises(RequestError, match="init_update"):
        memory.reserve([entry(0, 1)])
    context = memory.init_update()
    assert context.status is Status.SUCCESS
    context.apply()
    assert not copies
    rest = [100, 101, *range(109, 116)]
    with memory.reserve([entry(0, 7)]) as lease:
        write(memory, lease.ubatch)
        seen = attend(memory.pool, lease.views["full"], 0)
    assert seen == [(token, p) for p, token in enumerate([*rest, 7])]
    assert memory.init_update().status is Status.NO_UPDATE


def test_moving_a_shared_page_moves_a_copy(memory: Single, copies: list[tuple[int, int]]) -> None:
    append(memory, 0, 1, 2, 3)
    memory.seq_cp(0, 1)
    memory.seq_add(0, 0, -1, 10)
    memory.init_update().apply()
    assert history(memory.group, memory.table(0)) == [(1, 10), (2, 11), (3, 12)]
    assert history(memory.group, memory.table(1)) == [(1, 0), (2, 1), (3, 2)]
    assert len(copies) == 1
    memory.seq_cp(0, 2)
    memory.seq_div(0, 11, -1, 2)
    memory.seq_add(2, 0, -1, -10)
    memory.init_update().apply()  # both holders move: the second finds the page its own
    assert history(memory.group, memory.table(0)) == [(1, 10), (2, 5), (3, 6)]
    assert history(memory.group, memory.table(2)) == [(1, 0), (2, 1), (3, 2)]
    assert len(copies) == 2
    memory.audit()


def test_moves_need_kernels(memory: Single) -> None:
    append(memory, 0, 1, 2, 3)
    before = snapshot(memory)
    with pytest.raises(RequestError, match="-1 to 1"):
        memory.seq_add(0, 0, -1, -1)
    assert snapshot(memory) == before and memory.can_shift
    fixed = make_attention(kernels=GroupKernels())
    append(fixed, 0, 1)
    assert not fixed.can_shift
    for shift in (fixed.seq_add, fixed.seq_div):
        with pytest.raises(RequestError, match="cannot move"):
            shift(0, 0, -1, 1)
    with pytest.raises(RequestError, match="kernel"):
        fixed.init_update(optimize=True)
    fixed.check_idle()  # the refusal left no context open


def test_no_room_to_move_is_said_before_anything_changes(make: Make) -> None:
    memory = make(max_tokens=8)
    append(memory, 0, *range(1, 9))
    memory.seq_cp(0, 1)
    memory.seq_add(0, 0, -1, 3)
    before = snapshot(memory)
    context = memory.init_update()
    assert context.status is Status.FAILED_PREPARE and isinstance(context.error, PagesError)
    with pytest.raises(RequestError, match="more pages"):
        context.apply()
    assert snapshot(memory) == before
    memory.seq_free(1)
    memory.init_update().apply()
    assert history(memory.group, memory.table(0))[0] == (1, 3)


@pytest.mark.parametrize("fails", ["rotate", "move", "copy"])
def test_an_update_whose_kernel_fails_loses_nothing_and_can_be_done_again(
    make: Make, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = False

    def fragile(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def kernel(*args: Any) -> None:
            if broken and name == fails:
                raise ZeroDivisionError
            real(*args)

        return kernel

    memory = make(kernels=GroupKernels(fragile("rotate", rotate), fragile("move", move)))
    ops = memory.devices[0].ops
    monkeypatch.setattr(ops, "copy_pages", fragile("copy", ops.copy_pages))
    append(memory, 0, *range(1, 21))
    memory.seq_cp(0, 1)
    memory.checkpoint_save(0, "here")
    memory.seq_rm(0, 9, 14)  # to be closed
    memory.seq_add(0, 2, -1, 5)  # to be rotated, on copies where pages are shared
    memory.seq_add(1, 17, -1, 1)
    rest = [(t + 1, t + 5 * (t >= 2)) for t in range(20) if not 9 <= t < 14]
    before, broken = snapshot(memory), True

    def nothing_is_lost() -> None:
        memory.audit()
        assert history(memory.group, memory.table(0)) == rest
        assert history(memory.group, memory.table(1)) == [(t + 1, t + (t >= 17)) for t in range(20)]
        assert history(memory.group, memory.saved_table("here")) == [(t + 1, t) for t in range(20)]

    for _ in range(3):
        context = memory.init_update(optimize=True)
        assert context.status is Status.SUCCESS
        with pytest.raises(ZeroDivisionError):
            context.apply()
        assert context.status is Status.FAILED_COMPUTE
        with pytest.raises(RequestError, match="nothing to apply"):
            context.apply()
        nothing_is_lost()
        if fails == "move":  # else holes were closed before keys could not be turned
            assert snapshot(memory) == before
    broken = False
    memory.init_update(optimize=True).apply()
    nothing_is_lost()
    assert memory.init_update(optimize=True).status is Status.NO_UPDATE


def test_a_rotation_that_fails_in_one_group_is_finished_later() -> None:
    memory = make_kind("window and attention")
    fake_kinds.append(memory, 0, *range(4))
    memory.seq_add(0, 0, -1, 3)
    device = memory.devices[0]
    bound = device._groups["full"]

    def fails(*args: object) -> None:
        raise ZeroDivisionError

    device._groups["full"] = replace(bound, kernels=GroupKernels(fails, move))
    with pytest.raises(ZeroDivisionError):
        memory.init_update().apply()
    device._groups["full"] = bound
    memory.audit()
    assert [table.pending is None for table in memory.tables(0)] == [True, False]
    memory.init_update().apply()
    fake_kinds.check_seq(memory, 0, fake_kinds.tokens_at(*range(4), start=3))


def test_holes_are_closed_on_request(memory: Single) -> None:
    append(memory, 0, *range(100, 120))
    name = memory.checkpoint_save(0)
    memory.seq_cp(0, 1)
    memory.seq_rm(0, 5, 7)
    memory.seq_rm(0, 9, 11)
    memory.seq_rm(0, 14, 18)
    rest = [(100 + p, p) for p in (*range(5), 7, 8, *range(11, 14), 18, 19)]
    assert memory.init_update().status is Status.NO_UPDATE
    memory.init_update(optimize=True).apply()
    table = memory.table(0)
    assert history(memory.group, table) == rest
    assert (table.length, table.n_pages) == (12, 3)
    assert tokens_of(memory, 1) == list(range(100, 120))
    memory.seq_free(1)
    memory.checkpoint_delete(name)
    assert memory.pool.used == 3
    memory.audit()


# -- checkpoints ----------------------------------------------------------------------------------


def test_the_breakdown_counts_what_only_a_checkpoint_keeps_alive(memory: Single) -> None:
    append(memory, 0, *range(1, 9))
    a = memory.checkpoint_save(0, "a")
    append(memory, 0, 9, 10)
    memory.checkpoint_save(0, "b")
    memory.checkpoint_save(0, "c")
    size = memory.layout.page_bytes
    parts = memory.memory_breakdown()["cpu"]
    assert (parts["full: sequences"], parts["full: checkpoint a"]) == (3 * size, 0)
    memory.seq_rm(0, 4, -1)
    append(memory, 0, 50)
    parts = memory.memory_breakdown()["cpu"]
    assert parts["full: sequences"] == 2 * size
    assert parts["full: several checkpoints"] == 2 * size  # page 2 of a, b and c; page 3 of b, c
    memory.checkpoint_delete(a)
    memory.checkpoint_delete("b")
    parts = memory.memory_breakdown()["cpu"]
    assert parts["full: checkpoint c"] == 2 * size and parts["full: several checkpoints"] == 0
    assert sum(parts.values()) == memory.pool.committed


# -- figures --------------------------------------------------------------------------------------


def test_figures_are_separate_and_add_up(memory: Single) -> None:
    append(memory, 0, *range(1, 11))
    memory.seq_cp(0, 1)
    append(memory, 1, 50, 51, 52)
    memory.seq_rm(0, 1, 3)
    memory.seq_cp(0, 2)
    figures = memory.stats()["full"]
    size, per_token = memory.layout.page_bytes, memory.layout.bytes_per_token
    # Pages 0 and 1 are shared by three; 0 and 2 share page 2; 1 has its own two pages.
    assert (figures["pages_used"], figures["pages_shared"]) == (5, 3)
    assert figures["tokens_held"] == 20 and figures["tokens_used"] == 8 + 2 + 5
    assert figures["bytes_used"] == 15 * per_token
    assert figures["bytes_held"] == 5 * size
    assert figures["bytes_wasted"] == 5 * size - 15 * per_token
    assert figures["bytes_unshared"] == (3 + 4 + 3) * size
    assert figures["bytes_committed"] == memory.pool.committed == memory.pool.budget.used
    while memory.fits([(9, 4)]):
        append(memory, 9, 1, 2, 3, 4)
    assert memory.stats()["full"]["pages_free"] == 0


def test_waste_is_at_most_one_page_per_sequence(make: Make) -> None:
    memory = make(page_tokens=16, head_dim=32)
    for seq, n in enumerate((1, 15, 16, 17, 200)):
        append(memory, seq, *range(1, n + 1))
    figures = memory.stats()["full"]
    assert figures["bytes_wasted"] <= 5 * memory.layout.page_bytes
    assert figures["tokens_used"] == 249


@pytest.mark.parametrize("how", ["lost", "leaked", "written", "free", "unpaid", "table", "hole"])
def test_audit_sees_what_is_wrong(memory: Single, how: str) -> None:
    append(memory, 0, *range(1, 7))
    memory.seq_cp(0, 1)
    memory.seq_rm(1, 1, 3)
    memory.audit()
    pool, table = memory.pool, memory.table(0)
    if how == "lost":
        pool.refs[table.pages[0]] -= 1
    elif how == "leaked":
        pool.allocate(2)
    elif how == "written":
        pool.frozen[table.pages[1]] = 1
    elif how == "free":
        pool._live[int(table.pages[0])] = 0
    elif how == "unpaid":
        pool.budget.release(64, pool.use)
    elif how == "table":
        table.length += 4
    else:
        positions = memory.table(1).positions
        assert positions is not None
        positions[-1] = -1
    with pytest.raises(AuditError) as wrong:
        memory.audit()
    assert isinstance(wrong.value, AssertionError)


# -- tables ---------------------------------------------------------------------------------------


def test_only_tables_that_changed_are_copied_for_the_kernels() -> None:
    tables = []
    for i in range(6):
        table = Table(4)
        table.add_pages(np.arange(10 * i, 10 * i + 8, dtype=np.int32))
        table.extend(30)
        tables.append(table)
    rows = TableRows()
    first = rows.show(tables)
    first[:] = -7  # whatever is copied again, shows
    tables[2].add_pages(np.array([99], np.int32))
    tables[4].extend(1)  # no new page
    second = rows.show(tables)
    assert np.shares_memory(first, second)
    assert (second[[0, 1, 3, 4, 5]] == -7).all()
    assert second[2, :9].tolist() == [*range(20, 28), 99] and (second[2, 9:] == -1).all()
    third = rows.show([tables[5], tables[2]])
    assert third[0, :8].tolist() == list(range(50, 58)) and third.flags.c_contiguous
    wide = Table(4)
    wide.add_pages(np.arange(500, dtype=np.int32))
    fourth = rows.show([wide, *tables])
    assert fourth[0, :500].tolist() == list(range(500)) and fourth[3, 8] == 99


def test_one_layer_can_read_anothers_memory() -> None:
    spec = GroupSpec("full", "attention", (0, 1), 1, 32, 32, reuse={2: 1})
    layout = AttentionLayout(spec, make_layout().type_k, make_layout().type_v, 16)
    memory = Memory([AttentionGroup(layout, make_device(Budget(1 << 20)), KERNELS)])
    assert memory.layers == (0, 1, 2)
    with memory.reserve([SeqTokens(0, np.array([1], np.int32))]) as lease:
        view = lease.views["full"]
        assert isinstance(view, PageView) and view.layout is layout
        assert view.layout.by_layer[2] == layout.offsets[1]


# -- building -------------------------------------------------------------------------------------


def test_a_budget_too_small_for_one_page_is_said_at_once() -> None:
    with pytest.raises(BudgetError, match="change memory_budget"):
        make_attention(16, 272, limit=4096)


def test_without_demand_paging_what_is_free_is_taken_at_once() -> None:
    budget = Budget(1 << 20)
    budget.reserve(1 << 19, "weights")
    group = AttentionGroup(make_layout(16, 272), make_device(budget), demand_paged=False)
    memory = Single(group)
    assert budget.free < memory.layout.page_bytes
    append(memory, 0, *range(1, 20))
    memory.clear(data=True)
    assert not any(page_bytes(memory.pool, page).any() for page in range(2))
    memory.close()
    assert budget.used == 1 << 19


def test_holes_are_closed_in_place_where_nobody_else_holds_the_pages() -> None:
    memory = make_attention(max_tokens=20)
    append(memory, 0, *range(100, 120))  # all pages there are
    memory.seq_rm(0, 2, 4)
    memory.seq_rm(0, 9, 10)
    assert memory.update_fits(optimize=True)
    memory.init_update(optimize=True).apply()
    rest = [p for p in range(20) if p not in (2, 3, 9)]
    assert history(memory.group, memory.table(0)) == [(100 + p, p) for p in rest]
    assert memory.table(0).length == 17
    memory.seq_cp(0, 1)
    memory.seq_rm(0, 5, 6)
    assert not memory.update_fits(optimize=True)
    name = memory.checkpoint_save(1)
    memory.seq_free(1)
    assert not memory.update_fits(optimize=True)
    assert memory.update_fits(optimize=True, without=name)
    memory.checkpoint_delete(name)
    memory.init_update(optimize=True).apply()
    assert [t for t, _ in history(memory.group, memory.table(0))] == [
        100 + p for p in rest if p != 5
    ]
    memory.audit()
