"""Attention over pages: parity with the reference, and work on pages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from quire.ops import Heads, Refused
from quire.ops.cuda import attention
from tests.cuda.pages_rig import Rig, Work, full_rope
from tests.cuda.sides import GPU, close, same_bits

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")
ROUNDING = {"f32": 2e-5, "f16": 2e-3, "bf16": 1e-2, "q8_0": 4e-3, "q4_0": 4e-3}
"""What queries and weights lose in the type that tensor cores multiply."""
MIXED: list[Work] = [
    [(0, 1)], [(0, 14), (1, 15)], [(0, 1), (2, 17), (1, 1)], [(3, 127), (0, 1)],
    [(3, 1), (2, 112), (1, 1)], [(3, 1), (0, 283), (2, 1)], [(0, 1), (3, 40)],
]  # fmt: skip
"""Lengths 1, 15, 16, 17, 127 to 130, 300; prompts and single tokens in one step."""
FEW: list[Work] = [[(0, 1)], [(0, 5), (1, 20)], [(0, 1), (1, 30)], [(1, 1), (0, 1)]]
STEPS = MIXED if GPU else FEW


def limit_of(rig: Rig) -> float:
    # A key or value that rounds the other way after rotation or norm moves one step of its type.
    coarse = {"q8_0": 1e-2, "q4_0": 8e-2} if rig.rope else {}
    kinds = (rig.type_k, rig.type_v)
    return max(max(ROUNDING[kind], coarse.get(kind, 0.0)) for kind in kinds)


def check(rig: Rig, steps: list[Work]) -> None:
    for i, work in enumerate(steps):
        step = rig.tables.add(work)
        qkv = rig.values(len(step[1]), i)
        close(rig.got.run(step, qkv), rig.want.run(step, qkv), limit_of(rig))


SHAPES = [((9, 3), (64, 64)), ((1, 1), (40, 64)), ((5, 1), (34, 18)), ((8, 1), (80, 96)),
          ((16, 16), (60, 60)), ((4, 2), (128, 40)), ((2, 1), (256, 128)), ((3, 1), (96, 256)),
          ((32, 8), (128, 128)), ((40, 1), (64, 64))]  # fmt: skip


@pytest.mark.parametrize(("heads", "dims"), SHAPES if GPU else SHAPES[:3])
def test_shapes(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    shape = Heads(*heads, *dims, scale=dims[0] ** -0.5)
    check(Rig(shape, page_tokens=32, rope=full_rope(dims[0])), STEPS)


PAIRS = [(k, v) for k in KINDS for v in KINDS]


@pytest.mark.parametrize(("type_k", "type_v"), PAIRS[::3] if GPU else PAIRS[::6])
def test_types(type_k: str, type_v: str) -> None:
    shape = Heads(6, 2, 64, 96, scale=0.125)
    check(Rig(shape, type_k, type_v, 64), [[(0, 20), (1, 1)], [(0, 1), (1, 70)]])


@pytest.mark.parametrize("neox", [True, False])
def test_norms_and_partial_rope(neox: bool) -> None:
    q_norm, k_norm = np.random.default_rng(3).uniform(0.5, 2, (2, 80)).astype(np.float32)
    rope = full_rope(80, neox, 48, 1.25)
    rig = Rig(Heads(4, 2, 80, 80, scale=0.1), "f32", "f32", rope=rope, norms=(q_norm, k_norm))
    rig.tables.first = {0: 100_000}
    check(rig, [[(0, 30), (1, 5)], [(1, 1), (0, 1)]])


@pytest.mark.parametrize("window", [1, 5, 16] if GPU else [5])
def test_windows(window: int) -> None:
    check(Rig(Heads(4, 2, 64, 64, scale=0.3, window=window)), STEPS)


def test_softcap() -> None:
    check(Rig(Heads(4, 2, 64, 64, scale=2.0, softcap=30.0), "f32", "f32"), STEPS)


@pytest.mark.parametrize("window", [0, 300] if GPU else [0])
def test_waves_of_spans_change_no_bit(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many spans there is room for at once: what waves merged before is one of them."""
    rig = Rig(Heads(2, 1, 32, 32, scale=0.2, window=window))
    length = 700 if GPU else 300
    rig.got.run(rig.tables.add([(0, length)]), rig.values(length, 0))
    step = rig.tables.add([(0, 21), (1, 3)])
    qkv = rig.values(24, 1)
    want = rig.got.run(step, qkv)
    for spans in (0, 2, 3):
        monkeypatch.setattr(attention, "spans_at_once", lambda *_, spans=spans: spans)
        same_bits(rig.got.run(step, qkv), want)


def test_spans_at_once_are_bounded() -> None:
    """Memory for them is that of the programs that a GPU runs at a time, however long a context."""
    for programs in (1, 8, 100, 263):
        most = [attention.spans_at_once(programs, spans) for spans in (2, 17, 321, 10_000)]
        assert most == sorted(most) and most[-1] * programs <= 4 * 264 + programs
    assert attention.spans_at_once(264, 321) == 0


@pytest.mark.parametrize("window", [0, 20])
def test_holes(window: int) -> None:
    """Holes anywhere, whole pages of them missing, and positions that repeat or run backwards."""
    rig = Rig(Heads(6, 2, 64, 48, scale=0.3, window=window), "f32", "f32")
    check(rig, [[(0, 120), (1, 60), (2, 90)]])
    at = rig.tables.slot_positions = {s: list(range(260)) for s in range(3)}
    at[1] = [*(i // 2 for i in range(60)), *range(30, 230)]
    rng = np.random.default_rng(0)
    for s, upto in ((0, 120), (1, 60), (2, 90)):
        for slot in rng.choice(upto, upto // 3, replace=False):
            at[s][slot] = -1
    at[0][64:96] = [-1] * 32  # two whole pages: their ids are gone
    rig.tables.tables[0][4:6] = [-1] * 2
    at[2][10:20] = range(95, 105)  # out of order: for some tokens still in the future
    check(rig, [[(0, 1), (1, 1), (2, 30)], [(0, 20), (2, 1)]])


def test_a_row_that_sees_nothing_is_zero() -> None:
    rig = Rig(Heads(2, 1, 64, 64, scale=1.0))
    rig.tables.slot_positions = {0: [7, 8, 9]}
    view, positions, rows = rig.tables.add([(0, 1)])
    view.slot_positions = np.array([[-1]], np.int32)
    out = rig.got.run((view, positions, rows), rig.values(1))
    assert np.array_equal(out, np.zeros((1, 128)))


# ---- work on pages ----------------------------------------------------------------------------


def test_only_the_layers_own_bytes_are_written() -> None:
    rig = Rig(Heads(4, 2, 64, 32, scale=1.0), "q8_0", "q4_0")
    rig.got.run(rig.tables.add([(0, 33)]), rig.values(33))
    touched = (rig.got.bytes.read() != 0xFF).any(0)
    k, v = rig.offsets
    k_bytes, v_bytes = 2 * 16 * 68, 2 * 16 * 18
    assert not touched[:k].any() and not touched[k + k_bytes : v].any()
    assert not touched[v + v_bytes :].any() and touched[k : k + k_bytes].mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("neox", [True, False])
def test_turned_keys_attend_as_if_stored_there(kind: str, neox: bool) -> None:
    rig = Rig(Heads(2, 1, 64, 32, scale=0.2), kind, "f32", rope=full_rope(64, neox, 32))
    qkv = rig.values(20)
    rig.got.run(rig.tables.add([(0, 20)]), qkv)
    pages = np.array(rig.tables.tables[0], np.int32)
    deltas = np.where(np.arange(32) < 20, 900, 0).astype(np.int32).reshape(2, 16)
    assert rig.got.rope is not None
    rig.got.ops.rotate_pages(
        rig.got.heads, rig.got.rope, rig.got.bytes.base, rig.page_bytes, 16, pages, deltas,
        np.array([rig.offsets[0]]),
    )  # fmt: skip
    rig.tables.first[0] = 900
    turned = rig.got.run(rig.tables.add([(0, 1)]), rig.values(1, 3))
    other = Rig(rig.heads, kind, "f32", rope=rig.rope)
    other.tables.first[0] = 900
    other.got.run(other.tables.add([(0, 20)]), qkv)
    stored = other.got.run(other.tables.add([(0, 1)]), rig.values(1, 3))
    close(turned, stored, {"q4_0": 0.2, "q8_0": 2e-2}.get(kind, ROUNDING[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_moved_tokens_are_the_same_tokens_elsewhere(kind: str) -> None:
    rig = Rig(Heads(2, 2, 64, 32, scale=0.2), kind, kind)
    rig.got.run(rig.tables.add([(0, 20), (1, 20)]), rig.values(40))
    step = rig.tables.add([(0, 1)])
    want = rig.got.run(step, rig.values(1, 9))
    old, new = rig.tables.tables[0], [rig.tables.free.pop() for _ in range(2)]
    slots = np.arange(21, dtype=np.int32)
    rig.got.ops.move_tokens(
        rig.got.heads, rig.got.bytes.base, rig.page_bytes, 16, np.array(old, np.int32)[slots // 16],
        slots % 16, np.array(new, np.int32)[slots // 16], slots % 16,
        np.array([rig.offsets[0]]), np.array([rig.offsets[1]]),
    )  # fmt: skip
    rig.tables.tables[0] = new
    view = rig.tables.view([0], [new[1] * 16 + 4])
    same_bits(rig.got.run((view, step[1], step[2]), rig.values(1, 9)), want)


def test_moves_that_follow_each_other() -> None:
    """One token onto the next one's place, after that has moved on."""
    rig = Rig(Heads(1, 1, 64, 64, scale=0.2), "f32", "f32")
    rig.got.run(rig.tables.add([(0, 3)]), rig.values(3))
    page = np.full(2, rig.tables.tables[0][0], np.int32)
    before = rig.got.bytes.read()[page[0], 64 : 64 + 16 * 256].reshape(16, 256)
    source, target = np.array([1, 0], np.int32), np.array([2, 1], np.int32)
    rig.got.ops.move_tokens(
        rig.got.heads, rig.got.bytes.base, rig.page_bytes, 16, page, source, page, target,
        np.array([rig.offsets[0]]), np.array([rig.offsets[1]]),
    )  # fmt: skip
    after = rig.got.bytes.read()[page[0], 64 : 64 + 16 * 256].reshape(16, 256)
    np.testing.assert_array_equal(after[:3], before[[0, 0, 1]])


def test_mistakes_are_refused() -> None:
    rig = Rig(Heads(2, 1, 64, 64, scale=1.0))
    view, positions, rows = rig.tables.add([(0, 3)])
    with pytest.raises(Refused, match="not the one of its position"):
        wrong = SimpleNamespace(**vars(view) | {"slots": view.slots[::-1].copy()})
        rig.got.ops.pages(wrong, 0, positions, rows)
    with pytest.raises(Refused, match="where"):
        rig.got.run((view, positions, rows), rig.values(3)[:, 1:].copy())
    with pytest.raises(Refused, match="outside a page"):
        side = rig.got
        side.offsets = rig.page_bytes, 64
        side.run((view, positions, rows), rig.values(3))
    shape = replace(rig.heads, n_kv_heads=3)
    with pytest.raises(Refused, match="do not divide"):
        rig.got.ops.heads(shape, "f16", "f16", None, None, 0.0)
    with pytest.raises(Refused, match="15 of V as f16 must be a multiple of 2"):
        rig.got.ops.heads(replace(rig.heads, head_dim_v=15), "f16", "f16", None, None, 0.0)
