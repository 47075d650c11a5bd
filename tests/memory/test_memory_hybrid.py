"""Parts in step: one budget, all or nothing, and the memory a model's groups ask for."""

from __future__ import annotations

from dataclasses import dataclass

import fake_kinds
import pytest
from fake_kernel import entry
from fake_kinds import (
    TAIL,
    append,
    check_saved,
    check_seq,
    check_view,
    leaves,
    make_kind,
    pools,
    snapshot,
    tokens_at,
    write,
)

from quire.errors import BudgetError, ModelError, OutOfMemory, RequestError
from quire.memory import build_memory
from quire.memory.attention import AttentionMemory
from quire.memory.audit import AuditError
from quire.memory.budget import Budget
from quire.memory.build import GroupKernels
from quire.memory.hybrid import HybridMemory
from quire.memory.interface import Memory, Status
from quire.memory.layout import GroupSpec
from quire.memory.recurrent import RecurrentMemory
from quire.memory.state_layout import RecurrentSpec
from quire.memory.window import WindowMemory

ALL = "window, attention and recurrent"


@pytest.fixture
def memory() -> Memory:
    return make_kind(ALL)


def test_one_refusal_refuses_for_all(memory: Memory) -> None:
    append(memory, 0, *range(20))
    append(memory, 0, 20, 21)
    attention = leaves(memory)[1]
    was = snapshot(memory)
    for p0, p1 in [(3, 5), (5, -1), (-1, 4)]:
        assert attention.can_rm(0, p0, p1)
        assert not memory.can_rm(0, p0, p1) and not memory.seq_rm(0, p0, p1)
        assert snapshot(memory) == was
    attention.check_cp(0, 1, 0, 5)
    with pytest.raises(RequestError):
        memory.seq_cp(0, 1, 0, 5)
    attention.check_add(0, 0, -1, 3)
    assert not memory.can_shift
    with pytest.raises(RequestError, match="cannot move"):
        memory.seq_add(0, 0, -1, 3)
    assert snapshot(memory) == was
    assert memory.seq_rm(0, 21, -1)
    check_seq(memory, 0, tokens_at(*range(21)))


def test_parts_compete_for_one_budget() -> None:
    """What fits each part alone may not fit all of them."""
    memory = make_kind("attention and recurrent", 16, 64, 32_000, limit=200_000)
    counts = [(seq, 16) for seq in range(3)]
    parts = leaves(memory)
    assert all(part.fits(counts) for part in parts) and not memory.fits(counts)
    was = snapshot(memory)
    with pytest.raises(BudgetError, match="of the budget are free"):
        memory.reserve([entry(seq, *range(16)) for seq in range(3)])
    assert snapshot(memory) == was and pools(memory)[0].budget.used == 0
    most = [seq for seq in range(3) if memory.fits(counts[: seq + 1])]
    with memory.reserve([entry(seq, *range(16)) for seq in most]) as lease:
        write(lease.ubatch)
        lease.commit(dict.fromkeys(most, 16))
    assert most and pools(memory)[0].budget.used > 100_000
    memory.audit()


def test_states_kept_for_later_make_way_for_attention() -> None:
    memory = make_kind("attention and recurrent", 4, 64, 60_000, limit=400_000)
    append(memory, 0, *range(6))
    append(memory, 1, *range(6))
    memory.seq_free(1)
    states = leaves(memory)[1].pools[0]
    assert states.committed > 2 * 120_000  # one in use, one idle
    tokens = 6
    while memory.fits([(0, 5)]):
        append(memory, 0, *range(100 + tokens, 105 + tokens))
        tokens += 5
    assert states.committed < 2 * 120_000
    check_seq(memory, 0, tokens_at(*range(6), *range(106, 100 + tokens)))
    with pytest.raises(OutOfMemory):
        append(memory, 0, *range(5))
    memory.audit()


def test_a_position_is_there_when_all_parts_hold_it(memory: Memory) -> None:
    append(memory, 0, *range(3))
    assert memory.seq_pos_min(0) == 0
    append(memory, 0, *range(3, 30))
    state_at = 29 - TAIL
    assert memory.seq_pos_min(0) == state_at and memory.seq_pos_max(0) == 29
    append(memory, 0, 30)
    assert memory.seq_pos_min(0) == state_at
    assert leaves(memory)[0].seq_pos_min(0) < state_at


def test_checkpoints_go_across_parts(memory: Memory) -> None:
    append(memory, 0, *range(20))
    append(memory, 0, 20)
    memory.checkpoint_save(0, "here")
    for token in range(21, 60):
        append(memory, 0, token)
    check_saved(memory, "here", tokens_at(*range(21)))
    memory.checkpoint_restore(0, "here")
    check_seq(memory, 0, tokens_at(*range(21)))
    with memory.reserve([entry(0, 7)]) as lease:
        write(lease.ubatch)
        check_view(memory, lease.ubatch, 0, tokens_at(*range(21), 7))
        lease.commit({0: 1})
    memory.checkpoint_delete("here")
    assert not any(leaf.checkpoints.by_name for leaf in leaves(memory))
    memory.audit()


def test_an_update_of_parts_is_one_update() -> None:
    memory = make_kind("window and attention")
    append(memory, 0, *range(6))
    memory.seq_add(0, 0, -1, 3)
    context = memory.init_update()
    assert context.status is Status.SUCCESS
    with pytest.raises(RequestError, match="open lease or context"):
        memory.seq_rm(0, 0, -1)
    context.apply()
    assert not context.next() and memory.init_update().status is Status.NO_UPDATE
    check_seq(memory, 0, tokens_at(*range(6), start=3))
    memory.seq_rm(0, 4, 5)
    with memory.init_update() as context:
        assert context.status is Status.NO_UPDATE  # a hole is no work unless asked for
    memory.init_update(optimize=True).apply()
    check_seq(memory, 0, [(0, 3), (2, 5), (3, 6), (4, 7), (5, 8)])


def test_an_update_without_room_in_one_part_changes_nothing() -> None:
    memory = make_kind("window and attention", max_tokens=8)
    append(memory, 0, *range(6))
    memory.seq_cp(0, 1)
    memory.seq_add(0, 0, -1, 3)
    was = snapshot(memory)
    context = memory.init_update()
    assert context.status is Status.FAILED_PREPARE and isinstance(context.error, OutOfMemory)
    with pytest.raises(RequestError, match="more pages"):
        context.apply()
    assert snapshot(memory) == was
    memory.seq_free(1)
    memory.init_update().apply()
    check_seq(memory, 0, tokens_at(*range(6), start=3))


def test_audit_sees_parts_that_are_out_of_step(memory: Memory) -> None:
    append(memory, 0, *range(4))
    memory.audit()
    leaves(memory)[1].seq_rm(0, 3, -1)
    with pytest.raises(AuditError, match="sequence 0 ends at"):
        memory.audit()
    leaves(memory)[1].seq_new()
    with pytest.raises(AuditError, match="hold the sequences"):
        memory.audit()


def test_groups_need_names_of_their_own() -> None:
    parts = [make_kind("attention"), make_kind("attention")]
    with pytest.raises(ModelError, match="names of their own"):
        HybridMemory(parts)


# -- building -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What a user might have chosen."""

    page_tokens: int = 16
    type_k: str = "f16"
    type_v: str = "f16"
    kv_cache_tokens: int | None = None
    kv_cache_demand_paged: bool = True
    swa_full: bool = False


FULL = GroupSpec("full", "attention", (0, 3), 2, 64, 64)
LOCAL = GroupSpec("local", "window", (1,), 2, 64, 64, window=128)
DELTA = RecurrentSpec("delta", (2, 3), 4096, 256)
KERNELS = {"delta": GroupKernels(fold=fake_kinds.fold)}


def test_memory_is_built_from_what_a_model_declares() -> None:
    budget = Budget(1 << 24)
    settings = Settings(kv_cache_tokens=1000, swa_full=True)
    memory = build_memory([FULL, LOCAL, DELTA], budget, settings, KERNELS)
    assert isinstance(memory, HybridMemory)
    full, local, delta = memory.parts
    assert type(full) is AttentionMemory and full.pool.max_pages == 63
    assert type(local) is WindowMemory and local.swa_full and local.window == 128
    assert type(delta) is RecurrentMemory and delta.layout.log_tokens == 16
    assert memory.layers == (0, 3, 1, 2)  # layer 3 has attention and a state
    assert {id(pool.budget) for pool in pools(memory)} == {id(budget)}
    groups: list[GroupSpec | RecurrentSpec] = [FULL, LOCAL, DELTA]
    for group, kind in zip(groups, (AttentionMemory, WindowMemory, RecurrentMemory), strict=True):
        alone = build_memory([group], Budget(1 << 24), Settings(), KERNELS)
        assert type(alone) is kind
        assert not isinstance(alone, WindowMemory) or not alone.swa_full


def test_what_cannot_be_built_is_said() -> None:
    with pytest.raises(ModelError, match="no groups"):
        build_memory([], Budget(1 << 24), Settings(), {})
    with pytest.raises(ModelError, match=r"'delta' is recurrent.*fold"):
        build_memory([FULL, DELTA], Budget(1 << 24), Settings(), {})
    up_front = Settings(kv_cache_demand_paged=False)
    with pytest.raises(RequestError, match=r"'full', 'local'.*set kv_cache_tokens"):
        build_memory([FULL, LOCAL], Budget(1 << 24), up_front, {})
    with pytest.raises(RequestError, match="how many states group 'delta'"):
        build_memory([DELTA], Budget(1 << 24), up_front, KERNELS)


def test_several_pools_can_be_taken_up_front() -> None:
    budget = Budget(1 << 24)
    settings = Settings(kv_cache_tokens=320, kv_cache_demand_paged=False)
    memory = build_memory([FULL, LOCAL], budget, settings, {})
    assert budget.used == sum(20 * pool.page_bytes for pool in pools(memory))
