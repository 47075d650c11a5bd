"""Every kind of memory with stand-ins for its kernels, and what each must remember.

Attention slots hold a token's id and position. A recurrent state is a count and a hash of all
tokens in exact integers, and a log entry is a token's id and position: a token that is lost,
repeated, out of order or of another sequence makes a wrong number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from fake_kernel import Token, attend, entry, history, move, rotate, write_pages
from numpy.typing import NDArray

from quire.memory.attention import AttentionMemory
from quire.memory.budget import Budget
from quire.memory.hybrid import HybridMemory
from quire.memory.interface import Memory, MicroBatch, PageView
from quire.memory.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.pool import PagePool
from quire.memory.recurrent import RecurrentMemory
from quire.memory.state_layout import RecurrentSpec, StateLayout, StateView
from quire.memory.state_table import StateTable
from quire.memory.table import Table
from quire.memory.window import WindowMemory

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
}
"""The groups of each kind, in the order of the parts."""

Leaf = AttentionMemory | RecurrentMemory
_PRIME = 2**61 - 1


def make_kind(
    kind: str, page_tokens: int = 4, head_dim: int = 2, state_bytes: int = 16,
    limit: int = 1 << 20, max_tokens: int | None = None, budget: Budget | None = None,
) -> Memory:  # fmt: skip
    """A memory of this kind with fake kernels and poisoned pages."""
    budget = budget or Budget(limit)
    parts: list[Memory] = []
    for i, name in enumerate(KINDS[kind]):
        layers = (i, i + 10)
        if name == "delta":
            spec = RecurrentSpec(name, layers, state_bytes, 12, LOG_TOKENS)
            parts.append(RecurrentMemory(StateLayout(spec), budget, fold, poison=True))
            continue
        window = None if name == "full" else WINDOW
        group = GroupSpec(
            name, "window" if window else "attention", layers, 1, head_dim, head_dim, window
        )
        layout = AttentionLayout(group, KVType.F32, KVType.F32, page_tokens)
        common = (layout, budget, max_tokens, True, rotate, move, True)
        if window:
            parts.append(WindowMemory(*common, swa_full=name == "kept"))
        else:
            parts.append(AttentionMemory(*common))
    return parts[0] if len(parts) == 1 else HybridMemory(parts)


def leaves(memory: Memory) -> list[Leaf]:
    """The memories that have pages of their own."""
    parts = memory.parts if isinstance(memory, HybridMemory) else (memory,)
    assert all(isinstance(part, AttentionMemory | RecurrentMemory) for part in parts)
    return list(parts)  # type: ignore[arg-type]


def window_of(memory: Memory) -> int | None:
    """How far back tokens see, where that is not to the start."""
    if isinstance(memory, WindowMemory) and not memory.swa_full:
        return max(memory.window, 2)  # the last token stays in any case
    return None


def pools(memory: Memory) -> list[PagePool]:
    return [pool for leaf in leaves(memory) for pool in leaf.pools]


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


def fold(state_in: int, log: int, n_entries: int, state_out: int, layout: StateLayout) -> None:
    """Replays the log on the state."""
    assert n_entries > 0 and state_out not in (state_in, log)
    for row in range(len(layout.layers)):
        result = _run(_start(state_in, layout, row), log, layout, row, n_entries)
        _state(state_out, layout, row)[:] = result


def state_after(tokens: Sequence[Token], layer: int) -> tuple[int, int]:
    """What a state must be after these tokens."""
    state = (0, 0)
    for token, position in tokens:
        state = advance(state, token, position, layer)
    return state


# -- kernels --------------------------------------------------------------------------------------


def write(ubatch: MicroBatch) -> None:
    """Puts the new tokens into every group."""
    for view in ubatch.views.values():
        if isinstance(view, PageView):
            write_pages(ubatch, view)
        else:
            write_states(ubatch, view)


def _page(address: int, page_bytes: int, page: int) -> int:
    return address + page * page_bytes if page >= 0 else 0


def write_states(ubatch: MicroBatch, view: StateView) -> None:
    """Appends to logs or scans into new states, as the view says."""
    layout = view.layout
    for row in range(len(ubatch.seqs)):
        mine = ubatch.seq_rows == row
        pairs = zip(ubatch.tokens[mine].tolist(), ubatch.positions[mine].tolist(), strict=True)
        tokens = list(pairs)
        length = int(view.log_length[row])
        log_out = _page(view.log_address, view.log_page_bytes, int(view.log_out[row]))
        state_out = _page(view.state_address, view.state_page_bytes, int(view.state_out[row]))
        tail = int(view.tail[row])
        first = len(tokens) - tail if state_out else 0  # the first token that goes into the log
        assert log_out or state_out, "either an append or a scan"
        assert not state_out or (log_out != 0) == (tail > 0), "a tail goes into a log"
        for at, layer in enumerate(layout.layers):
            state = remembered(view, row, at)
            for i, (token, position) in enumerate(tokens):
                if state_out and i == first:
                    _state(state_out, layout, at)[:] = state
                state = advance(state, token, position, layer)
                if i >= first and log_out:
                    entry = i - first if state_out else length + i
                    _entry(log_out, layout, at, entry)[:] = token, position, layer
            if state_out and tail == 0:
                _state(state_out, layout, at)[:] = state


def remembered(view: StateView, row: int, layer_row: int) -> tuple[int, int]:
    """The state before the new tokens, from what the view shows."""
    state_in = _page(view.state_address, view.state_page_bytes, int(view.state_in[row]))
    log_in = _page(view.log_address, view.log_page_bytes, int(view.log_in[row]))
    length = int(view.log_length[row])
    assert (log_in == 0) == (length == 0)
    start = _start(state_in, view.layout, layer_row)
    return _run(start, log_in, view.layout, layer_row, length)


def check_view(memory: Memory, ubatch: MicroBatch, row: int, expected: list[Token]) -> None:
    """What the kernels see of a sequence, its new tokens included, is what they should."""
    new = int((ubatch.seq_rows == row).sum())
    assert list(ubatch.positions[ubatch.seq_rows == row]) == [p for _, p in expected[-new:]]
    for leaf in leaves(memory):
        view = ubatch.views[leaf.layout.spec.name]
        if isinstance(view, StateView):
            for at, layer in enumerate(view.layout.layers):
                assert remembered(view, row, at) == state_after(expected[:-new], layer)
            continue
        window = window_of(leaf)
        first = 0 if window is None else expected[-new][1] - window + 1
        check_seen(attend(view, row), expected, first)


def check_seen(seen: list[Token], expected: list[Token], first: int) -> None:
    """All expected tokens from position `first` on are there, and nothing that is not expected."""
    must = [token for token in expected if token[1] >= first]
    assert sorted(set(must) - set(seen)) == [] and sorted(set(seen) - set(expected)) == []
    assert len(seen) == len(set(seen))


# -- what is held ---------------------------------------------------------------------------------


def check_table(leaf: Leaf, table: Table | StateTable, expected: list[Token]) -> None:
    """A table of a sequence or checkpoint holds what it should."""
    assert table.next_position == max((p for _, p in expected), default=-1) + 1
    if isinstance(leaf, RecurrentMemory):
        assert isinstance(table, StateTable)
        state = leaf.states.page_address(table.state) if table.state >= 0 else 0
        log = leaf.logs.page_address(table.log) if table.log >= 0 else 0
        for row, layer in enumerate(leaf.layers):
            start = _start(state, leaf.layout, row)
            assert start == state_after(expected[: table.position], layer)
            end = _run(start, log, leaf.layout, row, table.log_length)
            assert end == state_after(expected, layer)
        return
    assert isinstance(table, Table)
    window = window_of(leaf)
    first = 0 if window is None else table.next_position - window + 1
    check_seen(history(leaf, table), expected, first)


def check_seq(memory: Memory, seq: int, expected: list[Token]) -> None:
    """A sequence holds what it should in every part."""
    for leaf in leaves(memory):
        check_table(leaf, leaf.table(seq), expected)


def check_saved(memory: Memory, name: str, expected: list[Token]) -> None:
    """A checkpoint holds what it should in every part."""
    for leaf in leaves(memory):
        check_table(leaf, leaf.checkpoints.get(name).table, expected)


def tokens_at(*tokens: int, start: int = 0) -> list[Token]:
    """Tokens with positions that count up."""
    return [(token, start + i) for i, token in enumerate(tokens)]


def append(memory: Memory, seq: int, *tokens: int, keep: int | None = None) -> None:
    """Computes tokens of one sequence and keeps the first of them."""
    with memory.reserve([entry(seq, *tokens)]) as lease:
        write(lease.ubatch)
        lease.commit({seq: len(tokens) if keep is None else keep})


def snapshot(memory: Memory, bytes_too: bool = True) -> list[object]:
    """All that must be as before when an operation was refused or undone.

    Idle pages are left out: recurrent pools keep some for later, and reusing them is no change.
    """
    parts: list[object] = []
    for leaf in leaves(memory):
        tables = [*leaf._tables.items()]
        tables += [(c.name, c.table) for c in leaf.checkpoints.by_name.values()]
        parts.append(sorted((str(label), _fields(table)) for label, table in tables))
        for pool in leaf.pools:
            live = pool.live_pages
            parts.append((live.tolist(), pool.refs[live].tolist(), pool.frozen[live].tolist()))
            if bytes_too:
                parts.append([pool.view(int(page)).tobytes() for page in live])
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
    found = [(pool.used, pool.committed) for pool in pools(memory)]
    return not any(map(any, found)) and pools(memory)[0].budget.used == 0
