"""What kinds of memory that keep every token in a table must do, page by page.

What all kinds must do, window and recurrent ones included, is in test_memory_kinds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from fake_kernel import (
    append,
    attend,
    entry,
    history,
    make_attention,
    make_layout,
    move,
    rotate,
    snapshot,
    tokens_of,
    write,
)

from quire.errors import BudgetError, OutOfMemory, PagesError, RequestError
from quire.memory import build_memory
from quire.memory.attention import AttentionMemory
from quire.memory.audit import AuditError
from quire.memory.batch import TableRows
from quire.memory.budget import Budget
from quire.memory.interface import PageView, SeqTokens, Status, status_combine
from quire.memory.layout import AttentionLayout, GroupSpec
from quire.memory.pool import PagePool
from quire.memory.table import Table

Make = Callable[..., AttentionMemory]
KINDS: dict[str, Make] = {
    "attention": make_attention,
    "window, all kept": partial(make_attention, window=3, swa_full=True),
    "window that holds all": partial(make_attention, window=1_000_000),
}


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


@pytest.fixture
def memory(make: Make) -> AttentionMemory:
    return make()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every copy of a page that is made."""
    made: list[tuple[int, int]] = []
    real = PagePool.copy_page

    def counted(pool: PagePool, source: int, target: int) -> None:
        made.append((source, target))
        real(pool, source, target)

    monkeypatch.setattr(PagePool, "copy_page", counted)
    return made


def empty(memory: AttentionMemory) -> bool:
    """Whether nothing is held and nothing is paid for."""
    memory.audit()
    return (memory.pool.used, memory.pool.committed, memory.pool.budget.used) == (0, 0, 0)


# -- steps ----------------------------------------------------------------------------------------


def test_a_lease_shows_where_tokens_go_and_keeps_what_is_accepted(memory: AttentionMemory) -> None:
    append(memory, 3, 10, 11, 12)
    with memory.reserve([entry(3, 13, 14, 15), entry(0, 20)]) as lease:
        write(lease.ubatch)
        assert (lease.seqs, lease.tokens.tolist()) == ([3, 0], [13, 14, 15, 20])
        assert lease.positions.tolist() == [3, 4, 5, 0]
        assert lease.seq_rows.tolist() == [0, 0, 0, 1]
        view = lease.views["full"]
        assert isinstance(view, PageView)
        assert view.length.tolist() == [6, 1] and view.first.tolist() == [0, 0]
        assert view.tables.flags.c_contiguous and view.tables.dtype == np.int32
        assert view.slot_positions is None
        assert attend(view, 0) == [(10 + i, i) for i in range(6)]
        lease.commit({3: 2, 0: 1})
    assert tokens_of(memory, 3) == [10, 11, 12, 13, 14]
    assert (memory.seq_pos_max(3), memory.seq_pos_max(0), memory.seq_pos_max(9)) == (4, 0, -1)


def test_an_exception_or_no_commit_gives_everything_back(memory: AttentionMemory) -> None:
    append(memory, 0, *range(1, 7))
    memory.seq_cp(0, 1)
    before = snapshot(memory)
    entries = [entry(0, *range(20, 30)), entry(1, *range(30, 40)), entry(5, 40)]
    with pytest.raises(ZeroDivisionError), memory.reserve(entries):
        raise ZeroDivisionError
    assert snapshot(memory) == before
    with memory.reserve(entries):
        memory.audit()
    assert snapshot(memory) == before
    with pytest.raises(RequestError, match="no sequence 5"):
        memory.table(5)


def test_two_copies_of_one_page_in_one_step_can_both_be_undone(memory: AttentionMemory) -> None:
    append(memory, 0, 1, 2, 3)
    memory.seq_cp(0, 1)
    memory.seq_rm(0, 2, -1)
    memory.seq_rm(1, 2, -1)
    before = snapshot(memory)
    with memory.reserve([entry(0, 8), entry(1, 9)]) as lease:  # nobody is left on the page
        write(lease.ubatch)
        memory.audit()
    assert snapshot(memory) == before
    with memory.reserve([entry(0, 8), entry(1, 9)]) as lease:
        write(lease.ubatch)
        lease.commit({0: 1, 1: 0})
    memory.audit()
    assert (tokens_of(memory, 0), tokens_of(memory, 1)) == ([1, 2, 8], [1, 2])


def test_commit_wants_a_number_for_each_sequence_once(memory: AttentionMemory) -> None:
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


def test_what_is_committed_stays_when_the_block_fails_later(memory: AttentionMemory) -> None:
    with pytest.raises(ZeroDivisionError), memory.reserve([entry(0, 7)]) as lease:
        write(lease.ubatch)
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


def test_a_batch_is_checked(memory: AttentionMemory) -> None:
    for wrong in ([], [entry(0)], [entry(0, 1), entry(0, 2)], [entry(-1, 1)]):
        with pytest.raises(RequestError):
            memory.reserve(wrong)
        with pytest.raises(RequestError):
            memory.init_batch(wrong, 4)
    with pytest.raises(RequestError, match="n_ubatch"):
        memory.init_batch([entry(0, 1)], 0)
    assert empty(memory)


def test_one_thing_at_a_time(memory: AttentionMemory) -> None:
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
        lambda: memory.close(),
    ]
    with memory.reserve([entry(0, 3)]) as lease:
        write(lease.ubatch)
        for operation in refused:
            with pytest.raises(RequestError, match="open lease"):
                operation()
        lease.commit({0: 1})
    assert tokens_of(memory, 0) == [1, 2, 3]


# -- contexts -------------------------------------------------------------------------------------


def test_a_batch_is_computed_in_micro_batches(memory: AttentionMemory) -> None:
    batch = [entry(0, *range(1, 8)), entry(1, 20), entry(2, 30, 31)]
    sizes, seqs = [], []
    with memory.init_batch(batch, 4) as context:
        assert context.status is Status.SUCCESS
        with pytest.raises(RequestError, match="apply"):
            _ = context.ubatch
        while True:
            held = memory.pool.used
            context.apply()
            assert memory.pool.used == held  # room for all was found before
            write(context.ubatch)
            sizes.append(len(context.ubatch.tokens))
            seqs.append(context.ubatch.seqs)
            if not context.next():
                break
    assert (sizes, seqs) == ([4, 4, 2], [[0], [0, 1], [2]])
    assert tokens_of(memory, 0) == list(range(1, 8))
    assert tokens_of(memory, 2) == [30, 31]


def test_a_batch_that_does_not_fit_changes_nothing(make: Make) -> None:
    memory = make(max_tokens=8)
    append(memory, 0, 1, 2)
    before = snapshot(memory)
    context = memory.init_batch([entry(0, 3, 4), entry(1, *range(10, 15))], 2)
    assert context.status is Status.FAILED_PREPARE and isinstance(context.error, OutOfMemory)
    assert context.status.is_fail
    with pytest.raises(RequestError, match="free sequences"):
        context.apply()
    assert snapshot(memory) == before
    append(memory, 0, 3)  # the failed context is in nobody's way


def test_a_context_that_is_given_up_keeps_what_was_applied(memory: AttentionMemory) -> None:
    with memory.init_batch([entry(0, *range(1, 20))], 5) as context:
        context.apply()
        write(context.ubatch)
    assert tokens_of(memory, 0) == [1, 2, 3, 4, 5]
    assert memory.pool.used == 2


def test_a_copy_that_fails_midway_is_undone(
    memory: AttentionMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(memory, 0, 1, 2)
    memory.seq_cp(0, 1)
    before = snapshot(memory)

    def broken(source: int, target: int) -> None:
        raise MemoryError

    monkeypatch.setattr(memory.pool, "copy_page", broken)
    batch = [entry(0, *range(10, 20)), entry(1, *range(20, 30))]
    context = memory.init_batch(batch, 100)
    with pytest.raises(MemoryError):
        context.apply()
    assert context.status is Status.FAILED_COMPUTE and snapshot(memory) == before
    with pytest.raises(MemoryError):
        memory.reserve(batch)
    assert snapshot(memory) == before


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
    memory: AttentionMemory, copies: list[tuple[int, int]]
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
    memory: AttentionMemory, copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, 1, 2)
    memory.seq_cp(0, 1)
    memory.seq_free(0)
    append(memory, 1, 3)
    memory.seq_rm(1, 1, -1)
    append(memory, 1, 4)
    assert tokens_of(memory, 1) == [1, 4] and not copies


def test_rejected_tokens_cost_no_copy_while_a_checkpoint_looks_on(
    memory: AttentionMemory, copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, 1, 2)
    name = memory.checkpoint_save(0)
    for draft in range(5):
        with memory.reserve([entry(0, 10 + draft, 99)]) as lease:
            write(lease.ubatch)
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
def test_part_of_a_sequence_can_be_shared(memory: AttentionMemory, p0: int, p1: int) -> None:
    append(memory, 0, *range(100, 110))
    memory.seq_cp(0, 1, p0, p1)
    expected = [100 + p for p in range(10) if p >= p0 and (p1 < 0 or p < p1)]
    assert tokens_of(memory, 1) == expected
    append(memory, 1, 7)
    append(memory, 0, 8)
    assert tokens_of(memory, 1) == [*expected, 7]
    assert tokens_of(memory, 0) == [*range(100, 110), 8]
    memory.audit()


def test_parts_of_several_sequences_can_be_put_together(memory: AttentionMemory) -> None:
    append(memory, 0, *range(100, 110))
    append(memory, 1, *range(200, 210))
    memory.seq_cp(0, 2, 0, 5)
    memory.seq_cp(1, 2, 5, 8)
    append(memory, 2, 9)
    both = [*((100 + p, p) for p in range(5)), *((200 + p, p) for p in range(5, 8)), (9, 8)]
    assert history(memory, memory.table(2)) == both
    with memory.reserve([entry(2, 10)]) as lease:
        write(lease.ubatch)
        assert attend(lease.views["full"], 0) == [*both, (10, 9)]
    with pytest.raises(RequestError, match=r"sequence 2 holds 2 .* 7 first.*seq_rm"):
        memory.seq_cp(0, 2, 7, 9)
    assert history(memory, memory.table(2)) == both


def test_parts_of_the_same_page_come_together_again(memory: AttentionMemory) -> None:
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


def test_parts_come_together_before_they_are_rotated(memory: AttentionMemory) -> None:
    append(memory, 0, 1, 2, 3, 4)
    memory.seq_cp(0, 1, 0, 2)
    memory.seq_add(0, 2, -1, 5)
    memory.seq_cp(0, 1, 7, -1)
    expected = [(1, 0), (2, 1), (3, 7), (4, 8)]
    assert history(memory, memory.table(1)) == expected
    memory.init_update().apply()
    assert history(memory, memory.table(0)) == history(memory, memory.table(1)) == expected


def test_a_token_cannot_be_in_one_slot_at_two_positions(memory: AttentionMemory) -> None:
    append(memory, 0, 1, 2, 3)
    memory.seq_cp(0, 1)
    memory.seq_add(1, 0, -1, 10)
    with pytest.raises(RequestError, match="init_update"):
        memory.seq_cp(0, 1)
    memory.init_update().apply()
    memory.seq_cp(0, 1)
    both = [(t + 1, p) for t, p in ((0, 10), (1, 11), (2, 12), (0, 0), (1, 1), (2, 2))]
    assert history(memory, memory.table(1)) == both


def test_sequences_that_are_not_there(memory: AttentionMemory) -> None:
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


def test_ids_are_handed_out_lowest_first(memory: AttentionMemory) -> None:
    append(memory, 1, 5)
    assert [memory.seq_new(), memory.seq_new()] == [0, 2]
    memory.seq_rm(0, -1, -1)
    assert memory.seq_new() == 3  # emptied, but still somebody's
    memory.seq_free(0)
    assert memory.seq_new() == 0


# -- removing -------------------------------------------------------------------------------------


def test_a_removed_tail_gives_its_pages_back(memory: AttentionMemory) -> None:
    append(memory, 0, *range(1, 14))
    assert memory.seq_rm(0, 5, -1)
    assert tokens_of(memory, 0) == [1, 2, 3, 4, 5] and memory.pool.used == 2
    append(memory, 0, 9)
    assert history(memory, memory.table(0))[-1] == (9, 5)


def test_a_removed_middle_is_not_seen_and_empty_pages_go(memory: AttentionMemory) -> None:
    append(memory, 0, *range(100, 120))
    assert memory.pool.used == 5
    assert memory.seq_rm(0, 2, 13)
    rest = [(100 + p, p) for p in (0, 1, *range(13, 20))]
    assert history(memory, memory.table(0)) == rest and memory.pool.used == 3
    with memory.reserve([entry(0, 7), entry(1, 8)]) as lease:
        write(lease.ubatch)
        view = lease.views["full"]
        assert isinstance(view, PageView) and view.slot_positions is not None
        assert attend(view, 0) == [*rest, (7, 20)] and attend(view, 1) == [(8, 0)]
        lease.commit({0: 1, 1: 1})
    assert (memory.seq_pos_min(0), memory.seq_pos_max(0)) == (0, 20)
    assert memory.seq_rm(0, 13, -1)  # what is left counts up from 0 again
    assert memory.table(0).positions is None and tokens_of(memory, 0) == [100, 101]


def test_a_removed_head_moves_the_start(memory: AttentionMemory) -> None:
    append(memory, 0, *range(100, 112))
    memory.seq_rm(0, -1, 8)
    assert memory.seq_pos_min(0) == 8 and memory.pool.used == 1
    assert memory.table(0).positions is None  # whole pages went, so positions still count up
    append(memory, 0, 7)
    assert history(memory, memory.table(0)) == [(100 + p, p) for p in range(8, 12)] + [(7, 12)]


def test_removing_leaves_others_alone(memory: AttentionMemory) -> None:
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


def test_everything_gone_is_nothing_held(memory: AttentionMemory) -> None:
    for seq in range(4):
        append(memory, seq, *range(1, 30))
        memory.checkpoint_save(seq, f"at {seq}")
    memory.seq_cp(0, 9)
    for seq in (0, 1, 2, 3, 9):
        memory.seq_free(seq)
    assert memory.pool.used == 4 * 8
    for seq in (2, 0, 3, 1):
        memory.checkpoint_delete(f"at {seq}")
    assert empty(memory)
    append(memory, 0, 1, 2, 3)
    memory.checkpoint_save(0)
    memory.clear(data=True)
    assert empty(memory) and not memory.checkpoints.by_name
    append(memory, 0, 1)
    memory.close()
    assert memory.pool.budget.used == 0


# -- moving positions -----------------------------------------------------------------------------


def test_a_context_shift_rotates_what_moved(
    memory: AttentionMemory, copies: list[tuple[int, int]]
) -> None:
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
        write(lease.ubatch)
        seen = attend(lease.views["full"], 0)
    assert seen == [(token, p) for p, token in enumerate([*rest, 7])]
    assert memory.init_update().status is Status.NO_UPDATE


def test_moving_a_shared_page_moves_a_copy(
    memory: AttentionMemory, copies: list[tuple[int, int]]
) -> None:
    append(memory, 0, 1, 2, 3)
    memory.seq_cp(0, 1)
    memory.seq_add(0, 0, -1, 10)
    memory.init_update().apply()
    assert history(memory, memory.table(0)) == [(1, 10), (2, 11), (3, 12)]
    assert history(memory, memory.table(1)) == [(1, 0), (2, 1), (3, 2)]
    assert len(copies) == 1
    memory.seq_cp(0, 2)
    memory.seq_div(0, 11, -1, 2)
    memory.seq_add(2, 0, -1, -10)
    memory.init_update().apply()  # both holders move: the second finds the page its own
    assert history(memory, memory.table(0)) == [(1, 10), (2, 5), (3, 6)]
    assert history(memory, memory.table(2)) == [(1, 0), (2, 1), (3, 2)]
    assert len(copies) == 2
    memory.audit()


def test_moves_are_refused_where_they_cannot_be(make: Make) -> None:
    memory = make()
    append(memory, 0, 1, 2, 3)
    before = snapshot(memory)
    with pytest.raises(RequestError, match="-1 to 1"):
        memory.seq_add(0, 0, -1, -1)
    with pytest.raises(RequestError, match="positions of sequence 0"):
        memory.seq_add(0, 0, -1, 2**31)
    with pytest.raises(RequestError, match="by 0"):
        memory.seq_div(0, 0, -1, 0)
    assert snapshot(memory) == before and memory.can_shift
    fixed = AttentionMemory(make_layout(), Budget(1 << 20))
    append(fixed, 0, 1)
    assert not fixed.can_shift
    for shift in (fixed.seq_add, fixed.seq_div):
        with pytest.raises(RequestError, match="cannot move"):
            shift(0, 0, -1, 1)
    with pytest.raises(RequestError, match="kernel"):
        fixed.init_update(optimize=True)


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
    assert history(memory, memory.table(0))[0] == (1, 3)


def test_a_rotation_that_fails_can_be_finished(make: Make) -> None:
    """Each page is rotated once, whether or not the ones after it fail."""
    calls = []

    def fragile(page_address: int, layout: AttentionLayout, deltas: np.ndarray) -> None:
        calls.append(page_address)
        if len(calls) == 2:
            raise ZeroDivisionError
        rotate(page_address, layout, deltas)

    memory = AttentionMemory(make_layout(), Budget(1 << 20), rotate=fragile, poison=True)
    append(memory, 0, *range(1, 11))
    memory.seq_add(0, 0, -1, 5)
    context = memory.init_update()
    with pytest.raises(ZeroDivisionError):
        context.apply()
    assert context.status is Status.FAILED_COMPUTE
    memory.audit()
    assert history(memory, memory.table(0)) == [(1 + i, 5 + i) for i in range(10)]
    memory.init_update().apply()
    assert memory.table(0).pending is None and len(calls) == 4


def test_holes_are_closed_on_request(memory: AttentionMemory) -> None:
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
    assert history(memory, table) == rest
    assert (table.length, table.n_pages) == (12, 3)
    assert tokens_of(memory, 1) == list(range(100, 120))
    memory.seq_free(1)
    memory.checkpoint_delete(name)
    assert memory.pool.used == 3
    memory.audit()


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_restore_in_any_order_and_move_no_bytes(
    memory: AttentionMemory, copies: list[tuple[int, int]]
) -> None:
    names, expected = [], []
    for step in range(5):
        append(memory, 0, *range(10 * step + 1, 10 * step + 4))
        names.append(memory.checkpoint_save(0))
        expected.append(tokens_of(memory, 0))
    before = memory.pool.used
    for i in (4, 0, 2, 2, 1, 3, 0):
        memory.checkpoint_restore(0, names[i])
        assert tokens_of(memory, 0) == expected[i]
    assert not copies and memory.pool.used == before
    memory.checkpoint_restore(0, names[1])
    append(memory, 0, 99)
    memory.checkpoint_restore(7, names[4])
    assert tokens_of(memory, 7) == expected[4] and tokens_of(memory, 0) == [*expected[1], 99]
    memory.checkpoint_delete(names[4])
    memory.seq_free(0)
    memory.checkpoint_restore(0, names[3])
    assert tokens_of(memory, 0) == expected[3] and tokens_of(memory, 7) == expected[4]
    counts = {what: timing.count for what, timing in memory.checkpoints.timings.items()}
    assert counts == {"save": 5, "restore": 10, "delete": 1, "to_bytes": 0, "from_bytes": 0}


def test_checkpoints_have_names(memory: AttentionMemory) -> None:
    append(memory, 0, 1)
    assert memory.checkpoint_supported()
    assert memory.checkpoint_save(0, "mark") == "mark"
    with pytest.raises(RequestError, match="'mark' already"):
        memory.checkpoint_save(0, "mark")
    first = memory.checkpoint_save(0)
    assert first not in ("mark", memory.checkpoint_save(0))
    with pytest.raises(RequestError, match=r"no checkpoint 'else'.*mark"):
        memory.checkpoint_restore(0, "else")
    with pytest.raises(RequestError, match=r"no checkpoint 'else'.*mark"):
        memory.checkpoint_delete("else")
    with pytest.raises(RequestError, match="start at 0"):
        memory.checkpoint_restore(-1, "mark")


def test_the_breakdown_counts_what_only_a_checkpoint_keeps_alive(memory: AttentionMemory) -> None:
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


def test_figures_are_separate_and_add_up(memory: AttentionMemory) -> None:
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
def test_audit_sees_what_is_wrong(memory: AttentionMemory, how: str) -> None:
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
    memory = AttentionMemory(layout, Budget(1 << 20), rotate=rotate, move=move)
    assert memory.layers == (0, 1, 2)
    with memory.reserve([SeqTokens(0, np.array([1], np.int32))]) as lease:
        view = lease.views["full"]
        assert isinstance(view, PageView) and view.offsets == layout.offsets
        assert view.layout.k_offset(2) == layout.k_offset(1)


# -- building -------------------------------------------------------------------------------------


class Settings:
    """What a user might have chosen."""

    page_tokens = 16
    type_k = "q8_0"
    type_v = "f16"
    kv_cache_tokens: int | None = 100
    kv_cache_demand_paged = True
    swa_full = False


def test_memory_is_built_from_what_a_model_declares() -> None:
    spec = GroupSpec("full", "attention", (0, 1), 2, 64, 64)
    memory = build_memory([spec], Budget(1 << 24), Settings(), {})
    assert isinstance(memory, AttentionMemory)
    assert memory.pool.max_pages == 7
    assert memory.layout.bytes_per_token == 2 * 2 * (68 + 128)


def test_a_budget_too_small_for_one_page_is_said_at_once() -> None:
    with pytest.raises(BudgetError, match="change memory_budget"):
        AttentionMemory(make_layout(16, 272), Budget(4096))


def test_without_demand_paging_what_is_free_is_taken_at_once() -> None:
    budget = Budget(1 << 20)
    budget.reserve(1 << 19, "weights")
    memory = AttentionMemory(make_layout(16, 272), budget, demand_paged=False)
    assert budget.free < memory.layout.page_bytes
    append(memory, 0, *range(1, 20))
    memory.clear(data=True)
    assert not any(memory.pool.view(page).any() for page in range(2))
    memory.close()
    assert budget.used == 1 << 19
