"""Every kind of memory with stand-ins for its kernels, and what each must remember.

Attention slots hold a token's id and position. A recurrent state is a count and a hash of all
tokens in exact integers, and a log entry is a token's id and position: a token that is lost,
repeated, out of order or of another sequence makes a wrong number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from fake_kernel import (
    KERNELS,
    Token,
    attend,
    entry,
    history,
    make_device,
    page_address,
    page_bytes,
    write_pages,
)
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.device import GroupKernels
from quire.memory.batch import MicroBatch
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.table import Table
from quire.memory.groups.views import StateView
from quire.memory.groups.window import WindowGroup
from quire.memory.memory import Memory
from quire.memory.pages.pool import PagePool

WINDOW = 6
LOG_TOKENS = 5
TAIL = LOG_TOKENS // 2
"""Tokens of a scan that stay in the log."""
KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("full",),
    "window": ("local",),
    "window, all kept": ("kept",),
    "recurrent": ("delta",),
    "attention and recurrent": ("full", "delta"),
    "window and attention": ("local", "full"),
    "window, attention and recurrent": ("local", "full", "delta"),
    "recurrent, by position": ("delta",),
    "attention and recurrent, by position": ("full", "delta"),
    "attention on two devices": ("full", "far"),
    "attention and recurrent on two devices": ("full", "delta"),
}
"""The groups of each kind, in order."""

_PRIME = 2**61 - 1


def make_kind(
    kind: str, page_tokens: int = 4, head_dim: int = 2, state_bytes: int = 16,
    limit: int = 1 << 20, max_tokens: int | None = None, budget: Budget | None = None,
) -> Memory:  # fmt: skip
    """A memory of this kind with fake kernels and poisoned pages."""
    first = make_device(budget or Budget(limit))
    second = make_device(Budget(limit), "cpu:1")
    for each in (first, second):
        each.ops.folds_at_positions = by_position(kind)  # type: ignore[misc]
    groups: list[AnyGroup] = []
    for i, name in enumerate(KINDS[kind]):
        device = second if i and kind.endswith("on two devices") else first
        layers = (i, i + 10)
        if name == "delta":
            spec = RecurrentSpec(name, layers, state_bytes, 12, LOG_TOKENS)
            groups.append(
                RecurrentGroup(StateLayout(spec), device, GroupKernels(fold=fold), poison=True)
            )
            continue
        window = None if name in ("full", "far") else WINDOW
        heads = GroupSpec(
            name, "window" if window else "attention", layers, 1, head_dim, head_dim, window
        )
        layout = AttentionLayout(heads, KVType.F32, KVType.F32, page_tokens)
        common = (layout, device, KERNELS, max_tokens, True, True)
        if window:
            groups.append(WindowGroup(*common, swa_full=name == "kept"))
        else:
            groups.append(AttentionGroup(*common))
    return Memory(groups)


def by_position(kind: str) -> bool:
    """Whether logs of this kind are folded at multiples of their length."""
    return kind.endswith("by position")


def window_of(group: AnyGroup) -> int | None:
    """How far back tokens see, where that is not to the start."""
    if isinstance(group, WindowGroup) and not group.swa_full:
        return max(group.window, 2)  # the last token stays in any case
    return None


def table(memory: Memory, group: AnyGroup, seq: int) -> Table | StateTable:
    """What a sequence holds in a group."""
    found: Table | StateTable = memory.tables(seq)[memory.groups.index(group)]
    return found


def tables_of(memory: Memory, group: AnyGroup) -> dict[str, Table | StateTable]:
    """All tables of a group whose pages are here, by what they are of."""
    at = memory.groups.index(group)
    found = {f"sequence {seq}": tables[at] for seq, tables in memory._tables.items()}
    saved = [one for one in memory.checkpoints.by_name.values() if one.parked is None]
    return found | {f"checkpoint {one.name}": one.tables[at] for one in saved}


def kept_pages(memory: Memory, pool: PagePool) -> set[int]:
    """Pages of a pool that parked checkpoints share with others."""
    parked = [one.parked for one in memory.checkpoints.by_name.values() if one.parked]
    return {int(p) for one in parked for part in one.parts if part.pool is pool
            for p in part.kept[0]}  # fmt: skip


# -- a recurrence in exact integers ---------------------------------------------------------------


def _entry(log: int, layout: StateLayout, row: int, index: int) -> NDArray[np.int32]:
    address = log + layout.offsets[row][1] + index * layout.log_stride
    return np.ctypeslib.as_array((ctypes.c_int32 * 3).from_address(address))


def _state(page: int, layout: StateLayout, row: int) -> NDArray[np.int64]:
    return np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(page + layout.offsets[row][0]))


def advance(state: tuple[int, int], token: int, position: int, layer: int) -> tuple[int, int]:
    """One token more: position is checked, order and identity go into the hash."""
    count, value = state
    assert position == count, f"token {token} is at {position}, the state has seen {count}"
    return count + 1, (value * 1_000_003 + token * 31 + layer + 7) % _PRIME


def _run(
    state: tuple[int, int], log: int, layout: StateLayout, row: int, n: int
) -> tuple[int, int]:
    layer = layout.layers[row]
    for index in range(n):
        token, position, of_layer = _entry(log, layout, row, index).tolist()
        assert of_layer == layer, f"entry {index} is of layer {of_layer}, not {layer}"
        state = advance(state, token, position, layer)
    return state


def _start(page: int, layout: StateLayout, row: int) -> tuple[int, int]:
    if page == 0:
        return 0, 0
    count, value = _state(page, layout, row).tolist()
    return count, value


def fold(
    state_base: int, log_base: int, layout: StateLayout, state_in: NDArray[np.int32],
    log: NDArray[np.int32], n_entries: NDArray[np.int32], state_out: NDArray[np.int32],
) -> None:  # fmt: skip
    """Replays logs on states."""
    for start, entries, n, out in zip(
        state_in.tolist(), log.tolist(), n_entries.tolist(), state_out.tolist(), strict=True
    ):
        assert n > 0 and out != start
        source = _page(state_base, layout.state_page_bytes, start)
        raw = _page(log_base, layout.log_page_bytes, entries)
        target = _page(state_base, layout.state_page_bytes, out)
        for row in range(len(layout.layers)):
            result = _run(_start(source, layout, row), raw, layout, row, n)
            _state(target, layout, row)[:] = result


def state_after(tokens: Sequence[Token], layer: int) -> tuple[int, int]:
    """What a state must be after these tokens."""
    state = (0, 0)
    for token, position in tokens:
        state = advance(state, token, position, layer)
    return state


# -- kernels --------------------------------------------------------------------------------------


def write(memory: Memory, ubatch: MicroBatch) -> None:
    """Does the work on pages, then puts the new tokens into every group."""
    memory.run(ubatch.work)
    for group in memory.groups:
        view = ubatch.views[group.name]
        if isinstance(view, StateView):
            assert isinstance(group, RecurrentGroup)
            write_states(group, ubatch, view)
        else:
            write_pages(group.pools[0], ubatch, view)


def _page(address: int, page_bytes: int, page: int) -> int:
    return address + page * page_bytes if page >= 0 else 0


def write_states(group: RecurrentGroup, ubatch: MicroBatch, view: StateView) -> None:
    """Appends to logs or scans into new states, as the view says."""
    layout = view.layout
    states, logs = group.states.bytes.base, group.logs.bytes.base
    for row in range(len(ubatch.seqs)):
        mine = ubatch.seq_rows == row
        pairs = zip(ubatch.tokens[mine].tolist(), ubatch.positions[mine].tolist(), strict=True)
        tokens = list(pairs)
        length = int(view.log_length[row])
        log_out = _page(logs, view.log_page_bytes, int(view.log_out[row]))
        log_kept = _page(logs, view.log_page_bytes, int(view.log_kept[row]))
        state_out = _page(states, view.state_page_bytes, int(view.state_out[row]))
        tail = int(view.tail[row])
        first = len(tokens) - tail if state_out else 0  # the first token that goes into the log
        assert log_out or state_out, "either an append or a scan"
        assert not state_out or (log_out != 0) == (tail > 0), "a tail goes into a log"
        for at, layer in enumerate(layout.layers):
            state = remembered(group, view, row, at)
            for i, (token, position) in enumerate(tokens):
                if state_out and i == first:
                    _state(state_out, layout, at)[:] = state
                state = advance(state, token, position, layer)
                if i >= first and log_out:
                    entry = i - first if state_out else length + i
                    _entry(log_out, layout, at, entry)[:] = token, position, layer
                elif i < first and log_kept:
                    _entry(log_kept, layout, at, length + i)[:] = token, position, layer
            if state_out and tail == 0:
                _state(state_out, layout, at)[:] = state


def remembered(group: RecurrentGroup, view: StateView, row: int, layer_row: int) -> tuple[int, int]:
    """The state before the new tokens, from what the view shows."""
    state_in = _page(group.states.bytes.base, view.state_page_bytes, int(view.state_in[row]))
    log_in = _page(group.logs.bytes.base, view.log_page_bytes, int(view.log_in[row]))
    length = int(view.log_length[row])
    assert (log_in == 0) == (length == 0)
    start = _start(state_in, view.layout, layer_row)
    return _run(start, log_in, view.layout, layer_row, length)


def check_view(memory: Memory, ubatch: MicroBatch, row: int, expected: list[Token]) -> None:
    """What the kernels see of a sequence, its new tokens included, is what they should."""
    new = int((ubatch.seq_rows == row).sum())
    assert list(ubatch.positions[ubatch.seq_rows == row]) == [p for _, p in expected[-new:]]
    for group in memory.groups:
        view = ubatch.views[group.name]
        if isinstance(view, StateView):
            assert isinstance(group, RecurrentGroup)
            for at, layer in enumerate(view.layout.layers):
                assert remembered(group, view, row, at) == state_after(expected[:-new], layer)
            continue
        window = window_of(group)
        first = 0 if window is None else expected[-new][1] - window + 1
        check_seen(attend(group.pools[0], view, row), expected, first)


def check_seen(seen: list[Token], expected: list[Token], first: int) -> None:
    """All expected tokens from position `first` on are there, and nothing that is not expected."""
    must = [token for token in expected if token[1] >= first]
    assert sorted(set(must) - set(seen)) == [] and sorted(set(seen) - set(expected)) == []
    assert len(seen) == len(set(seen))


# -- what is held ---------------------------------------------------------------------------------


def check_table(group: AnyGroup, table: Table | StateTable, expected: list[Token]) -> None:
    """A table of a sequence or checkpoint holds what it should."""
    assert table.next_position == max((p for _, p in expected), default=-1) + 1
    if isinstance(group, RecurrentGroup):
        assert isinstance(table, StateTable)
        state = page_address(group.states, table.state) if table.state >= 0 else 0
        log = page_address(group.logs, table.log) if table.log >= 0 else 0
        for row, layer in enumerate(group.layout.layers):
            start = _start(state, group.layout, row)
            assert start == state_after(expected[: table.position], layer)
            end = _run(start, log, group.layout, row, table.log_length)
            assert end == state_after(expected, layer)
        return
    assert isinstance(table, Table) and isinstance(group, AttentionGroup)
    window = window_of(group)
    first = 0 if window is None else table.next_position - window + 1
    check_seen(history(group, table), expected, first)


def check_seq(memory: Memory, seq: int, expected: list[Token]) -> None:
    """A sequence holds what it should in every group."""
    for group, table in zip(memory.groups, memory.tables(seq), strict=True):
        check_table(group, table, expected)


def check_saved(memory: Memory, name: str, expected: list[Token]) -> None:
    """A checkpoint holds what it should in every group."""
    for group, table in zip(memory.groups, memory.checkpoints.get(name).tables, strict=True):
        check_table(group, table, expected)


def tokens_at(*tokens: int, start: int = 0) -> list[Token]:
    """Tokens with positions that count up."""
    return [(token, start + i) for i, token in enumerate(tokens)]


def append(memory: Memory, seq: int, *tokens: int, keep: int | None = None) -> None:
    """Computes tokens of one sequence and keeps the first of them."""
    with memory.reserve([entry(seq, *tokens)]) as lease:
        write(memory, lease.ubatch)
        lease.commit({seq: len(tokens) if keep is None else keep})


def snapshot(memory: Memory, bytes_too: bool = True) -> list[object]:
    """All that must be as before when an operation was refused or undone.

    Idle pages are left out: recurrent pools keep some for later, and reusing them is no change.
    """
    return [part for group in memory.groups for part in group_snapshot(memory, group, bytes_too)]


def group_snapshot(memory: Memory, group: AnyGroup, bytes_too: bool = True) -> list[object]:
    """The same of one group."""
    tables = tables_of(memory, group)
    parts: list[object] = [sorted((label, _fields(table)) for label, table in tables.items())]
    for pool in group.pools:
        live = pool.live_pages
        parts.append((live.tolist(), pool.refs[live].tolist(), pool.frozen[live].tolist()))
        parts.append((pool.cached[live].tolist(), pool.cached_pages, pool.cached_only))
        if bytes_too:
            parts.append([page_bytes(pool, int(page)).tobytes() for page in live])
    return parts


def _fields(table: Table | StateTable) -> tuple[object, ...]:
    if isinstance(table, StateTable):
        return table.state, table.position, table.log, table.log_length
    pending = None if table.pending is None else table.pending.tolist()
    positions = table.position_array().tolist()
    return table.pages.tolist(), positions, table.next_position, pending, table.lost


def empty(memory: Memory) -> bool:
    """Whether nothing is held and nothing is paid for."""
    memory.audit()
    found = [(pool.used, pool.committed) for pool in memory.pools]
    return not any(map(any, found)) and memory.pools[0].budget.used == 0
