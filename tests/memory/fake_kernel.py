"""A stand-in for the kernels: stores each token's id and position in the bytes of its slot.

It sees memory the way kernels do, through addresses, page views and layouts. So a token that was
put in the wrong slot, overwritten, lost or read from a freed page shows up as a wrong number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.device import GroupKernels
from quire.devices.host import HostDevice
from quire.memory.batch import MicroBatch, SeqTokens
from quire.memory.groups.attention import AttentionGroup
from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.groups.table import Table
from quire.memory.groups.views import PageView, View
from quire.memory.groups.window import WindowGroup
from quire.memory.memory import Memory
from quire.memory.pages.pool import PagePool

GROUP = "full"
Token = tuple[int, int]
"""A token's id and its position."""


class FakeOps:
    """The operations that a device needs for work on pages."""

    page_layout = "plain"
    folds_at_positions = False

    def copy_pages(
        self, base: int, page_bytes: int, sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> None:
        """Copies whole pages."""
        for a, b in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(base + b * page_bytes, base + a * page_bytes, page_bytes)


class NowCopier:
    """Copies at once, from and to the addresses it is told."""

    def __init__(self) -> None:
        self.rooms: list[NDArray[np.uint8]] = []

    def room(self, size: int) -> NDArray[np.uint8]:
        """Memory that nobody has written yet."""
        self.rooms.append(np.full(size, 0xEE, np.uint8))
        return self.rooms[-1]

    def free(self, room: NDArray[np.uint8]) -> None:
        """One room less."""
        self.rooms = [each for each in self.rooms if each is not room]

    def out(self, rooms: Sequence[NDArray[np.uint8]], pages: Sequence[int]) -> NowCopier:
        """From pages."""
        for room, page in zip(rooms, pages, strict=True):
            ctypes.memmove(room.ctypes.data, page, room.nbytes)
        return self

    def back(self, rooms: Sequence[NDArray[np.uint8]], pages: Sequence[int]) -> NowCopier:
        """To pages."""
        for room, page in zip(rooms, pages, strict=True):
            ctypes.memmove(page, room.ctypes.data, room.nbytes)
        return self

    def wait(self) -> None:
        """It is done."""

    def seconds(self) -> float:
        """What it took."""
        return 1e-3


def make_device(budget: Budget, name: str = "cpu") -> HostDevice:
    """The host's memory without any real kernel."""
    return HostDevice(budget, FakeOps(), name)  # type: ignore[arg-type]


class Single(Memory):
    """A memory of one attention group, whose things are reached without naming the group."""

    def __init__(self, group: AttentionGroup) -> None:
        super().__init__([group])
        self.group = group
        self.pool = group.pool
        self.layout = group.layout

    def table(self, seq: int) -> Table:
        """The table of a sequence."""
        table = self.tables(seq)[0]
        assert isinstance(table, Table)
        return table

    def saved_table(self, name: str) -> Table:
        """The table of a checkpoint."""
        table = self.checkpoints.get(name).tables[0]
        assert isinstance(table, Table)
        return table


def page_address(pool: PagePool, page: int) -> int:
    """Where a page lies."""
    return pool.bytes.base + page * pool.page_bytes


def page_bytes(pool: PagePool, page: int) -> NDArray[np.uint8]:
    """The bytes of a page, to read and to write."""
    return pool.bytes.read([page])[0]


def make_layout(
    page_tokens: int = 4, head_dim: int = 2, n_layers: int = 2, window: int | None = None
) -> AttentionLayout:
    """Rows of f32 of at least two values: room for an id and a position."""
    kind: Literal["attention", "window"] = "window" if window else "attention"
    layers = tuple(range(0, 2 * n_layers, 2))
    spec = GroupSpec(GROUP, kind, layers, 1, head_dim, head_dim, window)
    return AttentionLayout(spec, KVType.F32, KVType.F32, page_tokens)


def make_attention(
    page_tokens: int = 4, head_dim: int = 2, limit: int = 1 << 20, max_tokens: int | None = None,
    budget: Budget | None = None, n_layers: int = 2, window: int | None = None,
    swa_full: bool = False, kernels: GroupKernels | None = None,
) -> Single:  # fmt: skip
    """An attention memory, or one with a window, with the fake kernels and poisoned pages."""
    layout = make_layout(page_tokens, head_dim, n_layers, window)
    device = make_device(budget or Budget(limit))
    common = (layout, device, kernels or KERNELS, max_tokens, True, True)
    if window:
        return Single(WindowGroup(*common, swa_full=swa_full))
    return Single(AttentionGroup(*common))


_Row = ctypes.c_int32 * 2
"""The first two values of a row, in place: quicker to read than an array of NumPy's."""


def _row(address: int, part: int, row_bytes: int, slot: int) -> ctypes.Array[ctypes.c_int32]:
    return _Row.from_address(address + part + slot * row_bytes)


def _rows(
    address: int, layout: AttentionLayout, slot: int
) -> list[tuple[int, ctypes.Array[ctypes.c_int32], ctypes.Array[ctypes.c_int32]]]:
    k_row = layout.type_k.row_bytes(layout.spec.head_dim_k)
    v_row = layout.type_v.row_bytes(layout.spec.head_dim_v)
    return [
        (
            layer,
            _row(address, layout.k_offset(layer), k_row, slot),
            _row(address, layout.v_offset(layer), v_row, slot),
        )
        for layer in layout.spec.layers
    ]


def write(memory: Single, ubatch: MicroBatch) -> None:
    """Does the work on pages, then stores the new tokens where the view says."""
    memory.run(ubatch.work)
    view = ubatch.views[GROUP]
    assert isinstance(view, PageView)
    write_pages(memory.pool, ubatch, view)


def write_pages(pool: PagePool, ubatch: MicroBatch, view: PageView) -> None:
    """Stores the new tokens in one group."""
    for token, position, where in zip(ubatch.tokens, ubatch.positions, view.slots, strict=True):
        assert where >= 0
        page, slot = divmod(int(where), view.page_tokens)
        for layer, k, v in _rows(page_address(pool, page), view.layout, slot):
            k[:] = token, position
            v[:] = token, layer


def _read(address: int, layout: AttentionLayout, slot: int) -> Token:
    found = set()
    for layer, k, v in _rows(address, layout, slot):
        assert k[0] == v[0] and v[1] == layer, f"slot {slot}, layer {layer}: {[*k]}, {[*v]}"
        found.add((k[0], k[1]))
    assert len(found) == 1, f"layers disagree: {found}"
    return found.pop()


def attend(pool: PagePool, view: View, row: int) -> list[Token]:
    """What the attention of one sequence sees, slot by slot."""
    assert isinstance(view, PageView)
    seen = []
    for i in range(int(view.length[row])):
        position = int(view.first[row]) + i
        if view.slot_positions is not None:
            position = int(view.slot_positions[row, i])
        if position >= 0:
            page = int(view.tables[row, i // view.page_tokens])
            assert page >= 0
            address = page_address(pool, page)
            token, stored = _read(address, view.layout, i % view.page_tokens)
            assert stored == position, f"K of token {token} is of {stored}, not {position}"
            seen.append((token, position))
    return seen


def history(group: AttentionGroup, table: Table) -> list[Token]:
    """The tokens a table holds, in the order of its slots, with their present positions."""
    tokens = []
    pending = np.zeros(table.length, np.int32) if table.pending is None else table.pending
    for i, position in enumerate(table.position_array().tolist()):
        if position >= 0:
            address = page_address(group.pool, int(table.pages[i // table.page_tokens]))
            token, stored = _read(address, group.layout, i % table.page_tokens)
            assert stored + pending[i] == position
            tokens.append((token, position))
    return tokens


def rotate(
    base: int, layout: AttentionLayout, pages: NDArray[np.int32], deltas: NDArray[np.int32]
) -> None:
    """Moves the stored positions."""
    assert deltas.shape == (len(pages), layout.page_tokens)
    for page, row in zip(pages.tolist(), deltas, strict=True):
        for slot in np.flatnonzero(row):
            for _, k, _ in _rows(base + page * layout.page_bytes, layout, int(slot)):
                k[1] += row[slot]


def move(
    base: int, layout: AttentionLayout, from_pages: NDArray[np.int32],
    from_slots: NDArray[np.int32], to_pages: NDArray[np.int32], to_slots: NDArray[np.int32],
) -> None:  # fmt: skip
    """Copies tokens from page to page."""
    size = layout.page_bytes
    rows = zip(from_pages, from_slots, to_pages, to_slots, strict=True)
    for source, a, target, b in [[int(n) for n in row] for row in rows]:
        old, new = _rows(base + source * size, layout, a), _rows(base + target * size, layout, b)
        for (_, k, v), (_, new_k, new_v) in zip(old, new, strict=True):
            new_k[:], new_v[:] = k, v


KERNELS = GroupKernels(rotate=rotate, move=move)


def entry(seq: int, *tokens: int) -> SeqTokens:
    """New tokens of a sequence."""
    return SeqTokens(seq, np.array(tokens, np.int32))


def append(memory: Single, seq: int, *tokens: int) -> None:
    """Computes and keeps tokens of one sequence."""
    with memory.reserve([entry(seq, *tokens)]) as lease:
        write(memory, lease.ubatch)
        lease.commit({seq: len(tokens)})


def tokens_of(memory: Single, seq: int) -> list[int]:
    """The ids of a sequence's tokens."""
    return [token for token, _ in history(memory.group, memory.table(seq))]


def snapshot(memory: Single) -> dict[str, object]:
    """All that must be as before when an operation was refused or undone."""
    pool = memory.pool
    live = pool.live_pages
    tables = {
        f"sequence {seq}": (t.pages.tolist(), t.position_array().tolist(), t.next_position)
        for seq, (t,) in memory._tables.items()
    }
    return {
        "tables": tables,
        "live": live.tolist(),
        "refs": pool.refs.tolist(),
        "frozen": pool.frozen[live].tolist(),
        "committed": pool.committed,
        "budget": (pool.budget.used, pool.budget.breakdown),
        "bytes": {int(p): page_bytes(pool, int(p)).tobytes() for p in live},
    }
