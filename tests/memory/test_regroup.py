"""Saved state under another plan: layers in other groups, on other devices, and forged files."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_kernel import KERNELS, make_device
from fake_kinds import LOG_TOKENS, WINDOW, append, empty, fold
from test_session_file import change_state, check_family, family, forged, read, snapshot, written

from quire.devices.budget import Budget
from quire.devices.device import GroupKernels
from quire.errors import SessionFileError
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.memory.groups.window import WindowGroup
from quire.memory.memory import Memory
from quire.memory.saved.types import StateFlags

LAYERS = {"full": (0, 3, 6), "local": (1, 4, 7), "delta": (2, 5, 8)}
PLANS = [(9,), (0, 9), (4, 9), (7, 9), (2, 6, 9)]
"""Where each device's layers end; the first three devices are told apart by name."""


def spread(ends: tuple[int, ...], limit: int = 1 << 20) -> Memory:
    """All kinds of memory, layers spread over devices."""
    groups: list[AnyGroup] = []
    start = 0
    for at, end in enumerate(ends):
        device = make_device(Budget(limit), f"cpu:{at}")
        for kind, every in LAYERS.items():
            if layers := tuple(layer for layer in every if start <= layer < end):
                groups.append(group(kind if len(ends) == 1 else f"{kind} on {device.name}", layers,
                                    device))  # fmt: skip
        start = end
    return Memory(groups)


def group(name: str, layers: tuple[int, ...], device: Any) -> AnyGroup:
    """One group on one device."""
    kind = name.partition(" ")[0]
    if kind == "delta":
        layout = StateLayout(RecurrentSpec(name, layers, 16, 12, LOG_TOKENS))
        return RecurrentGroup(layout, device, GroupKernels(fold=fold), poison=True)
    window = WINDOW if kind == "local" else None
    spec = GroupSpec(name, "window" if window else "attention", layers, 1, 2, 2, window)
    common = AttentionLayout(spec, KVType.F32, KVType.F32, 4), device, KERNELS, None, True, True
    return WindowGroup(*common) if window else AttentionGroup(*common)


@pytest.mark.parametrize("before", PLANS)
@pytest.mark.parametrize("after", PLANS)
def test_every_plan_reads_every_other(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Sequences, checkpoints, windows, states and logs, what is shared still shared."""
    memory, other = spread(before), spread(after)
    expected = family(memory)
    data = written(memory)
    read(other, data)
    check_family(other, expected)
    for mine in other.groups:  # as many pages as before, whatever is together now
        kind = mine.name.partition(" ")[0]
        theirs = next(g for g in memory.groups if g.name.partition(" ")[0] == kind)
        assert [pool.used for pool in mine.pools] == [pool.used for pool in theirs.pools]
    append(other, 7, *range(40, 60))
    check_family(other, {key: value for key, value in expected.items() if key != 7})
    saved = other.checkpoint_from_bytes(memory.checkpoint_to_bytes("late"), "again")
    assert saved == "again"
    check_family(other, {"again": expected["late"]})
    with pytest.raises(SessionFileError):
        read(spread(after), data, model="other")


def test_partial_states_go_with_what_is_there() -> None:
    memory, other = spread((4, 9)), spread((7, 9))
    expected = family(memory)
    whole, part = written(memory, 0), written(memory, 0, flags=StateFlags.PARTIAL)
    read(other, whole, 0)
    read(other, part, 0, flags=StateFlags.PARTIAL)
    check_family(other, {0: expected[0]})


def test_other_layers_are_refused() -> None:
    memory = spread((4, 9))
    family(memory)
    fewer = Memory([g for g in spread((4, 9)).groups if g.name != "full on cpu:1"])
    for other in (fewer, Memory([group("full", (0, 3), make_device(Budget(1 << 20)))])):
        with pytest.raises(SessionFileError, match=r"groups|layers"):
            read(other, written(memory))
        assert empty(other)


def numbers(state: Any) -> list[tuple[Any, Any]]:
    """Every number of a state, as where it stands."""
    found: list[tuple[Any, Any]] = []
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        if isinstance(value, (dict, list)):
            found += numbers(value)
        else:
            found.append((state, key))
    return found


def test_forged_numbers_are_refused_or_harmless() -> None:
    """Whatever a file says, memory is sound afterwards, and as it was if that is refused."""
    memory = spread((4, 9))
    family(memory)
    data, refused = written(memory), 0
    for seed in range(300):
        rng = random.Random(seed)

        def change(state: Any, rng: random.Random = rng) -> None:
            for _ in range(rng.choice([1, 1, 2, 5])):
                where, key = rng.choice(numbers(state))
                where[key] = rng.choice([-2, -1, 0, 1, 3, 7, 99, 2**31, 2**70, None, "x", [], {}])

        other = spread((7, 9))
        before = snapshot(other)
        try:
            read(other, forged(data, change_state(change)))
        except SessionFileError:
            refused += 1
            assert snapshot(other) == before
        except AssertionError as error:  # the stand-in for a kernel, which looks at what it folds
            assert "entry" in str(error) or "token" in str(error)
            assert snapshot(other) == before
        other.audit()
    assert refused > 200
