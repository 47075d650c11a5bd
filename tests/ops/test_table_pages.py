"""Work on pages by id: copies, moves and folds, many in one call."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Heads, Ops, Refused, Rope
from quire.ops.reference import kv
from tests.ops.state_book import column as ids
from tests.ops.state_book import pages_of

SIZE = 300_032  # bytes of a page: more than one piece, and not a whole number of them


def random_pages(n: int, size: int, seed: int = 0) -> NDArray[np.uint8]:
    """Pages of random bytes."""
    memory = pages_of(n, size)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, np.uint8)
    return memory


@pytest.mark.parametrize("size", [SIZE, 64, 3])
def test_copied_pages_are_the_same_and_others_untouched(ops: Ops, size: int) -> None:
    memory = random_pages(9, size)
    before = memory.copy()
    ops.copy_pages(memory.ctypes.data, size, ids(3, 0, 3), ids(8, 1, 2))
    np.testing.assert_array_equal(memory, before[[0, 0, 3, 3, 4, 5, 6, 7, 3]])
    ops.copy_pages(memory.ctypes.data, size, ids(), ids())


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        (ids(0, 1), ids(2)),
        (ids(-1), ids(2)),
        (ids(0), ids(-2)),
        (ids(0, 1), ids(2, 2)),
        (ids(0, 1), ids(1, 2)),
        (ids(1), ids(1)),
    ],
)
def test_copies_that_depend_on_their_order_are_refused(
    ops: Ops, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> None:
    memory = random_pages(3, 64)
    before = memory.copy()
    with pytest.raises(Refused):
        ops.copy_pages(memory.ctypes.data, 64, sources, targets)
    np.testing.assert_array_equal(memory, before)


# ---- tokens in pages ------------------------------------------------------------------------

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")
TOKENS = 32
HEADS = Heads(4, 2, 64, 32, scale=1.0)
PARTS = ((kv.load_keys, 64), (kv.load_values, 32))


class Stored:
    """Pages of two layers, each with keys and values of some kind in every slot."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        sizes = [2 * TOKENS * kv.kv_row_bytes(kind, dims) for _, dims in PARTS]
        self.k = np.array([16, 48 + sum(sizes)])
        self.v = self.k + sizes[0]
        self.memory = pages_of(4, int(self.v[-1]) + sizes[1] + 16)
        rng = np.random.default_rng(4)
        stores = ((kv.store_keys, self.k, sizes[0], 64), (kv.store_values, self.v, sizes[1], 32))
        for page in self.memory:
            for store, offsets, size, dims in stores:
                for at in offsets:
                    for slot in range(TOKENS):
                        x = rng.standard_normal((2, dims)).astype(np.float32)
                        store(page[at : at + size], kind, slot, x)

    def tokens(self, layer: int, memory: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """Keys and values of a layer, [page, slot, head, dim] each."""
        found = []
        for (load, dims), offsets in zip(PARTS, (self.k, self.v), strict=True):
            end = offsets[layer] + 2 * TOKENS * kv.kv_row_bytes(self.kind, dims)
            parts = [page[offsets[layer] : end] for page in memory]
            found.append(np.stack([load(part, self.kind, 2, dims) for part in parts]))
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_moved_tokens_are_the_same_tokens_elsewhere(ops: Ops, kind: str) -> None:
    rig = Stored(kind)
    before = rig.memory.copy()
    # The last two follow each other: what went to page 0, slot 3 goes on to page 3, slot 31.
    moves = ids(2, 2, 1, 0), ids(0, 17, 5, 3), ids(1, 3, 0, 3), ids(31, 0, 3, 31)
    heads = ops.heads(HEADS, kind, kind, None, None, 0.0)
    place = rig.memory.ctypes.data, rig.memory.shape[1], TOKENS
    ops.move_tokens(heads, *place, *moves, rig.k, rig.v)
    for layer in range(2):
        for old, new in zip(rig.tokens(layer, before), rig.tokens(layer, rig.memory), strict=True):
            wanted = old.copy()
            for from_page, from_slot, to_page, to_slot in zip(*moves, strict=True):
                wanted[to_page, to_slot] = wanted[from_page, from_slot]
            np.testing.assert_array_equal(new, wanted)
    np.testing.assert_array_equal(rig.memory[:, :16], before[:, :16])
    np.testing.assert_array_equal(rig.memory[2], before[2])
    untouched = rig.memory.copy()
    for column, value in ((0, -1), (1, TOKENS), (2, -1), (3, -1)):
        wrong = [each.copy() for each in moves]
        wrong[column][3] = value
        with pytest.raises(Refused):
            ops.move_tokens(heads, *place, *wrong, rig.k, rig.v)
    with pytest.raises(Refused):
        ops.move_tokens(heads, *place, *moves, rig.k + rig.memory.shape[1], rig.v)
    with pytest.raises(Refused):
        ops.move_tokens(heads, *place, *moves, rig.k, rig.v[:1])
    np.testing.assert_array_equal(rig.memory, untouched)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rotated_keys_are_those_of_other_positions(ops: Ops, kind: str, neox: bool) -> None:
    rig = Stored(kind)
    before = rig.memory.copy()
    rope = Rope(16, 10000.0 ** (-np.arange(8) / 8), neox, 1.5)
    deltas = np.zeros((2, TOKENS), np.int32)
    deltas[0, 3:], deltas[1, :20] = -7, 12
    args = (
        ops.heads(HEADS, kind, kind, None, None, 0.0), ops.rope(rope), rig.memory.ctypes.data,
        rig.memory.shape[1], TOKENS,
    )  # fmt: skip
    ops.rotate_pages(*args, ids(3, 1), deltas, rig.k)
    step = {"f32": 1e-6, "f16": 2e-3, "bf16": 2e-2, "q8_0": 0.05, "q4_0": 0.8}[kind]
    for layer in range(2):
        (old, values), (new, same) = rig.tokens(layer, before), rig.tokens(layer, rig.memory)
        wanted = old.astype(np.float64)
        for page, delta in zip((3, 1), deltas, strict=True):
            angles = delta[:, None, None] * rope.freqs
            first, second = (
                (slice(0, 8), slice(8, 16)) if neox else (slice(0, 16, 2), slice(1, 16, 2))
            )
            a, b = wanted[page][..., first].copy(), wanted[page][..., second].copy()
            wanted[page][..., first] = a * np.cos(angles) - b * np.sin(angles)
            wanted[page][..., second] = a * np.sin(angles) + b * np.cos(angles)
        assert np.abs(new - wanted).max() < step
        np.testing.assert_array_equal(same, values)
        np.testing.assert_array_equal(new[3, :3], old[3, :3])
    np.testing.assert_array_equal(rig.memory[[0, 2]], before[[0, 2]])
    untouched = rig.memory.copy()
    for pages, turns, offsets in (
        (ids(-1, 1), deltas, rig.k), (ids(3), deltas, rig.k), (ids(3, 1), deltas[:, :16], rig.k),
        (ids(3, 1), deltas, rig.k + rig.memory.shape[1]),
    ):  # fmt: skip
        with pytest.raises(Refused):
            ops.rotate_pages(*args, pages, np.ascontiguousarray(turns), offsets)
    np.testing.assert_array_equal(rig.memory, untouched)


# ---- folds ----------------------------------------------------------------------------------


class Folds:
    """Two Mamba-2 layers, their states and their logs."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        rng = np.random.default_rng(1)
        one = (rng.standard_normal(n).astype(np.float32) for n in (5, 5, 5))
        conv = rng.standard_normal((5 * 19 + 2 * 11, 4)).astype(np.float32)
        a, dt, d = one
        self.layer = ops.ssd(5, 1, 19, 11, conv, None, -np.exp(a), dt, d)
        self.offsets = [(0, 0), (-(-self.layer.state_bytes // 64) * 64, 4 * self.layer.log_bytes)]
        state_bytes = 2 * self.offsets[1][0]
        self.states = pages_of(8, state_bytes)
        floats = rng.standard_normal((8, state_bytes // 4)).astype(np.float32)
        self.states[:] = floats.view(np.uint8)
        logs = rng.standard_normal((4, 8 * self.layer.log_bytes // 4)).astype(np.float32)
        self.logs = logs.view(np.uint8)

    def fold(self, *columns: NDArray[np.int32], layers: int = 2) -> None:
        self.ops.fold(
            [self.layer] * layers, self.offsets, self.states.ctypes.data, self.states.shape[1],
            self.logs.ctypes.data, self.logs.shape[1], self.layer.log_bytes, *columns,
        )  # fmt: skip


COLUMNS = ids(0, -1, 0, 2), ids(3, 0, 0, 1), ids(1, 4, 2, 3), ids(4, 5, 6, 7)
"""state_in, log, n_entries, state_out of four folds; two of them start from one state."""


def test_many_folds_have_the_bits_of_one_at_a_time(ops: Ops) -> None:
    together, alone = Folds(ops), Folds(ops)
    before = together.states.copy()
    together.fold(*COLUMNS)
    for i in range(4):
        alone.fold(*(column[i : i + 1].copy() for column in COLUMNS))
    np.testing.assert_array_equal(together.states, alone.states)
    np.testing.assert_array_equal(together.states[:4], before[:4])
    assert all((together.states[i] != before[i]).any() for i in range(4, 8))
    together.fold(ids(), ids(), ids(), ids())


@pytest.mark.parametrize(
    ("column", "value"), [(0, -2), (1, -1), (2, 0), (2, 5), (3, -1), (3, 0), (3, 7)]
)
def test_folds_that_cannot_be_done_are_refused_before_any(
    ops: Ops, column: int, value: int
) -> None:
    rig = Folds(ops)
    before = rig.states.copy()
    columns = [each.copy() for each in COLUMNS]
    columns[column][0] = value
    with pytest.raises(Refused):
        rig.fold(*columns)
    with pytest.raises(Refused):
        rig.fold(ids(0), ids(0), ids(1), ids(4, 5))
    with pytest.raises(Refused):
        rig.fold(*COLUMNS, layers=1)
    np.testing.assert_array_equal(rig.states, before)
