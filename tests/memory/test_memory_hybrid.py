"""Groups in step: budgets, all or nothing, and the memory a model's groups ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import fake_kinds
import pytest
from fake_kernel import KERNELS as PAGE_KERNELS
from fake_kernel import entry, make_device, make_layout
from fake_kinds import (
    TAIL,
    append,
    check_saved,
    check_seq,
    check_view,
    make_kind,
    snapshot,
    table,
    tokens_at,
    write,
)

from quire.devices.budget import Budget
from quire.devices.device import GroupKernels
from quire.errors import BudgetError, ModelError, OutOfMemory, RequestError
from quire.memory.audit import AuditError
from quire.memory.build import build_memory
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import RecurrentSpec
from quire.memory.groups.window import WindowGroup
from quire.memory.memory import Memory
from quire.memory.pages.demand import fit_together
from quire.memory.status import Status

ALL = "window, attention and recurrent"


@pytest.fixture
def memory() -> Memory:
    return make_kind(ALL)


def test_one_refusal_refuses_for_all(memory: Memory) -> None:
    append(memory, 0, *range(20))
    append(memory, 0, 20, 21)
    attention = memory.groups[1]
    held = table(memory, attention, 0)
    was = snapshot(memory)
    for p0, p1 in [(3, 5), (5, -1), (-1, 4)]:
        assert attention.can_remove(held, p0, p1)
        assert not memory.can_rm(0, p0, p1) and not memory.seq_rm(0, p0, p1)
        assert snapshot(memory) == was
    assert attention.part(held, attention.empty(), 0, 5).length == 5
    with pytest.raises(RequestError):
        memory.seq_cp(0, 1, 0, 5)
    attention.shifted(held, 0, -1, lambda positions: positions + 3)
    assert attention.can_shift and not memory.can_shift
    with pytest.raises(RequestError, match="cannot move"):
        memory.seq_add(0, 0, -1, 3)
    assert snapshot(memory) == was
    assert memory.seq_rm(0, 21, -1)
    check_seq(memory, 0, tokens_at(*range(21)))


def test_groups_compete_for_one_budget() -> None:
    """What fits each group alone may not fit all of them."""
    memory = make_kind("attention and recurrent", 16, 64, 32_000, limit=200_000)
    counts = [(seq, 16) for seq in range(3)]
    alone = [group.demand([(s, group.empty(), n) for s, n in counts]) for group in memory.groups]
    assert all(fit_together(demand) for demand in alone) and not memory.fits(counts)
    was = snapshot(memory)
    with pytest.raises(BudgetError, match="of the budget are free"):
        memory.reserve([entry(seq, *range(16)) for seq in range(3)])
    assert snapshot(memory) == was and memory.pools[0].budget.used == 0
    most = [seq for seq in range(3) if memory.fits(counts[: seq + 1])]
    with memory.reserve([entry(seq, *range(16)) for seq in most]) as lease:
        write(memory, lease.ubatch)
        lease.commit(dict.fromkeys(most, 16))
    assert most and memory.pools[0].budget.used > 100_000
    memory.audit()


def test_states_kept_for_later_make_way_for_attention() -> None:
    memory = make_kind("attention and recurrent", 4, 64, 60_000, limit=400_000)
    append(memory, 0, *range(6))
    append(memory, 1, *range(6))
    memory.seq_free(1)
    states = memory.groups[1].pools[0]
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


def test_a_position_is_there_when_all_groups_hold_it(memory: Memory) -> None:
    append(memory, 0, *range(3))
    assert memory.seq_pos_min(0) == 0
    append(memory, 0, *range(3, 30))
    state_at = 29 - TAIL
    assert memory.seq_pos_min(0) == state_at and memory.seq_pos_max(0) == 29
    append(memory, 0, 30)
    assert memory.seq_pos_min(0) == state_at
    local = memory.groups[0]
    assert local.first_position(table(memory, local, 0)) < state_at


def test_checkpoints_go_across_groups(memory: Memory) -> None:
    append(memory, 0, *range(20))
    append(memory, 0, 20)
    memory.checkpoint_save(0, "here")
    for token in range(21, 60):
        append(memory, 0, token)
    check_saved(memory, "here", tokens_at(*range(21)))
    memory.checkpoint_restore(0, "here")
    check_seq(memory, 0, tokens_at(*range(21)))
    with memory.reserve([entry(0, 7)]) as lease:
        write(memory, lease.ubatch)
        check_view(memory, lease.ubatch, 0, tokens_at(*range(21), 7))
        lease.commit({0: 1})
    memory.checkpoint_delete("here")
    assert not memory.checkpoints.by_name
    memory.audit()


def test_an_update_of_groups_is_one_update() -> None:
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


def test_an_update_without_room_in_one_group_changes_nothing() -> None:
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


def test_audit_sees_groups_that_are_out_of_step(memory: Memory) -> None:
    append(memory, 0, *range(4))
    memory.audit()
    attention = memory.groups[1]
    attention.remove(table(memory, attention, 0), 3, -1)
    with pytest.raises(AuditError, match=r"ends at \[3, 4\] in its groups"):
        memory.audit()


def test_groups_need_names_of_their_own() -> None:
    groups = [make_kind("attention").groups[0] for _ in range(2)]
    with pytest.raises(ModelError, match="names of their own"):
        Memory(groups)
    with pytest.raises(ModelError, match="names of their own"):
        Memory([])


# -- several devices ------------------------------------------------------------------------------


def on_devices(first: Budget, second: Budget) -> Memory:
    """Two groups with attention of the same size, each on a device with a budget."""
    groups = []
    for i, budget in enumerate((first, second)):
        layout = make_layout(page_tokens=4, head_dim=64)  # 4 KiB to a page
        spec = replace(layout.spec, name=f"group {i}", layers=(2 * i, 2 * i + 1))
        layout = AttentionLayout(spec, KVType.F32, KVType.F32, 4)
        assert layout.page_bytes == 4096
        device = make_device(budget)
        device.name = f"device {i}"
        groups.append(AttentionGroup(layout, device, PAGE_KERNELS, poison=True))
    return Memory(groups)


@pytest.mark.parametrize(("pages", "most"), [((8, 8), 8), ((8, 3), 3), ((2, 8), 2)])
def test_each_budget_decides_for_its_own_device(pages: tuple[int, int], most: int) -> None:
    budgets = [Budget(4096 * n) for n in pages]
    memory = on_devices(*budgets)
    assert [memory.fits([(0, 4 * n)]) for n in range(1, 10)] == [n <= most for n in range(1, 10)]
    was = snapshot(memory)
    with pytest.raises(OutOfMemory):
        memory.reserve([entry(0, *range(4 * most + 1))])
    assert snapshot(memory) == was and not any(budget.used for budget in budgets)
    append(memory, 0, *range(4 * most))
    check_seq(memory, 0, tokens_at(*range(4 * most)))
    assert [budget.used for budget in budgets] == [4096 * most] * 2
    parts = memory.memory_breakdown()
    assert {name: sum(uses.values()) for name, uses in parts.items()} == {
        "device 0": 4096 * most, "device 1": 4096 * most,
    }  # fmt: skip
    assert not memory.fits([(0, 1)])
    memory.audit()
    memory.close()
    assert not any(budget.used for budget in budgets)


def test_devices_that_share_a_budget_are_counted_together() -> None:
    budget = Budget(4096 * 9)
    memory = on_devices(budget, budget)
    assert [memory.fits([(0, 4 * n)]) for n in range(1, 6)] == [True] * 4 + [False]
    append(memory, 0, *range(16))
    assert not memory.fits([(0, 1)]) and not memory.fits([(1, 1)])
    was = snapshot(memory)
    with pytest.raises(BudgetError):
        memory.reserve([entry(0, 1)])  # the first group has room for a page
    assert snapshot(memory) == was and budget.used == 4096 * 8
    memory.audit()


def test_work_goes_to_the_device_that_has_the_pages() -> None:
    memory = on_devices(Budget(1 << 20), Budget(1 << 20))
    append(memory, 0, *range(6))
    memory.seq_cp(0, 1)
    append(memory, 1, 50)  # a copy on each device
    memory.seq_rm(0, 1, 3)
    memory.seq_add(0, 3, -1, 4)
    memory.init_update(optimize=True).apply()  # and moves and rotations
    check_seq(memory, 1, tokens_at(*range(6), 50))
    check_seq(memory, 0, [(0, 0), (3, 7), (4, 8), (5, 9)])
    memory.audit()


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
    device = make_device(Budget(1 << 24))
    settings = Settings(type_k="q8_0", kv_cache_tokens=1000, swa_full=True)
    memory = build_memory([FULL, LOCAL, DELTA], device, settings, KERNELS)
    full, local, delta = memory.groups
    assert type(full) is AttentionGroup and full.pool.max_pages == 63
    assert full.layout.bytes_per_token == 2 * 2 * (68 + 128)
    assert type(local) is WindowGroup and local.swa_full and local.window == 128
    assert type(delta) is RecurrentGroup and delta.layout.log_tokens == 16
    assert memory.layers == (0, 3, 1, 2)  # layer 3 has attention and a state
    assert memory.devices == (device,)
    assert {id(pool.budget) for pool in memory.pools} == {id(device.budget)}
    groups: list[GroupSpec | RecurrentSpec] = [FULL, LOCAL, DELTA]
    for group, kind in zip(groups, (AttentionGroup, WindowGroup, RecurrentGroup), strict=True):
        alone = build_memory([group], make_device(Budget(1 << 24)), Settings(), KERNELS).groups[0]
        assert type(alone) is kind
        assert not isinstance(alone, WindowGroup) or not alone.swa_full


def test_what_cannot_be_built_is_said() -> None:
    with pytest.raises(ModelError, match="no groups"):
        build_memory([], make_device(Budget(1 << 24)), Settings(), {})
    with pytest.raises(ModelError, match=r"'delta' is recurrent.*fold"):
        build_memory([FULL, DELTA], make_device(Budget(1 << 24)), Settings(), {})
    up_front = Settings(kv_cache_demand_paged=False)
    with pytest.raises(RequestError, match=r"'full', 'local'.*set kv_cache_tokens"):
        build_memory([FULL, LOCAL], make_device(Budget(1 << 24)), up_front, {})
    with pytest.raises(RequestError, match="how many states group 'delta'"):
        build_memory([DELTA], make_device(Budget(1 << 24)), up_front, KERNELS)


def test_several_pools_can_be_taken_up_front() -> None:
    budget = Budget(1 << 24)
    settings = Settings(kv_cache_tokens=320, kv_cache_demand_paged=False)
    memory = build_memory([FULL, LOCAL], make_device(budget), settings, {})
    assert budget.used == sum(20 * pool.page_bytes for pool in memory.pools)
