"""Attention over pages: parity with the reference, and one result whatever the batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Heads, Rope, _cpu
from quire.ops.reference import attention as reference
from quire.ops.reference import kv
from tests.ops.devices import ISAS

Floats = NDArray[np.float32]
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")


@cache
def cpu(isa: str = "auto", threads: int = 2) -> _cpu.Cpu:
    return _cpu.Cpu(threads, isa)


def full_rope(dims: int, neox: bool = True, n_rot: int = 0, mscale: float = 1.0) -> Rope:
    n = n_rot or dims
    return Rope(n, 10000.0 ** (-np.arange(0, n, 2) / n), neox, mscale)


@dataclass
class Rig:
    """Sequences in poisoned pages, for the kernels and the reference alike."""

    heads: Heads
    type_k: str = "f16"
    type_v: str = "f16"
    page_tokens: int = 16
    rope: Rope | None = None
    norms: tuple[Floats, Floats] | None = None
    n_pages: int = 96
    first: dict[int, int] = field(default_factory=dict)
    slot_positions: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        h = self.heads
        tokens = h.n_kv_heads * self.page_tokens
        k = self.k_bytes = tokens * kv.kv_row_bytes(self.type_k, h.head_dim_k)
        v = self.v_bytes = tokens * kv.kv_row_bytes(self.type_v, h.head_dim_v)
        # The layer in the middle of a page: what lies around it must not change.
        q_norm, k_norm = self.norms or (None, None)
        self.layer = reference.Layer(
            h, self.type_k, self.type_v, 64, 64 + k + 32, q_norm, k_norm, 1e-6
        )
        self.memory = np.full((self.n_pages, 64 + k + 32 + v + 64), 0xFF, np.uint8)
        self.tables: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        order = np.random.default_rng(5).permutation(self.n_pages)
        self.free = [int(p) for p in order]

    @property
    def cols(self) -> int:
        h = self.heads
        return (h.n_heads + h.n_kv_heads) * h.head_dim_k + h.n_kv_heads * h.head_dim_v

    def pages(self, work: list[tuple[int, int]]) -> reference.Paged:
        """Room for `count` more tokens of each sequence in work, in one step."""
        slots, positions, rows = [], [], []
        for row, (seq, count) in enumerate(work):
            table = self.tables.setdefault(seq, [])
            for slot in range(self.length.get(seq, 0), self.length.get(seq, 0) + count):
                if slot // self.page_tokens >= len(table):
                    table.append(self.free.pop())
                slots.append(table[slot // self.page_tokens] * self.page_tokens)
                slots[-1] += slot % self.page_tokens
                at = self.slot_positions.get(seq)
                positions.append(at[slot] if at else self.first.get(seq, 0) + slot)
                rows.append(row)
            self.length[seq] = self.length.get(seq, 0) + count
        seqs = [seq for seq, _ in work]
        tables = np.full((len(seqs), max(len(self.tables[s]) for s in seqs)), -1, np.int32)
        for i, s in enumerate(seqs):
            tables[i, : len(self.tables[s])] = self.tables[s]
        int32 = {
            "first": [self.first.get(s, 0) for s in seqs],
            "length": [self.length[s] for s in seqs],
            "slots": slots,
            "positions": positions,
            "seq_rows": rows,
        }
        holes = None
        if self.slot_positions:
            holes = np.full((len(seqs), max(self.length[s] for s in seqs)), -1, np.int32)
            for i, s in enumerate(seqs):
                holes[i, : self.length[s]] = self.slot_positions[s][: self.length[s]]
        arrays = {name: np.array(values, np.int32) for name, values in int32.items()}
        return reference.Paged(
            self.memory, self.page_tokens, tables, **arrays, slot_positions=holes
        )

    def spec(self, device: _cpu.Cpu) -> _cpu.AttentionSpec:
        h = self.heads
        norms = [device.array(n[None]) for n in self.norms] if self.norms else [None, None]
        return _cpu.AttentionSpec(
            h.n_heads, h.n_kv_heads, h.head_dim_k, h.head_dim_v, self.type_k, self.type_v,
            h.scale, h.window, h.softcap, *norms, 1e-6,
        )  # fmt: skip

    def run(self, device: _cpu.Cpu, pages: reference.Paged, qkv: Floats) -> Floats:
        """One step by the kernels."""
        table = None
        if self.rope is not None:
            r = self.rope
            table = device.rope_table(
                _cpu.Rope(r.n_rot, r.freqs, r.neox, r.mscale), pages.positions
            )
        args = (self.spec(device), handle(pages), table, self.layer.k_offset, self.layer.v_offset)
        return np.array(device.attention(device.array(qkv), *args).numpy())

    def expect(self, pages: reference.Paged, qkv: Floats) -> Floats:
        """The same step by the reference, on pages of its own."""
        own = replace(pages, memory=pages.memory.copy())
        turn = reference.Turn(self.rope, pages.positions) if self.rope else None
        return reference.attention(qkv, self.layer, own, turn)


def handle(p: reference.Paged) -> _cpu.Pages:
    return _cpu.Pages(
        p.memory.ctypes.data, p.memory.shape[1], p.page_tokens, p.tables, p.first, p.length,
        p.slots, p.positions, p.seq_rows, p.slot_positions,
    )  # fmt: skip


def values(rig: Rig, n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, rig.cols)).astype(np.float32)


def check(rig: Rig, steps: list[list[tuple[int, int]]]) -> None:
    """Runs steps, each by the reference and then by the kernels of every instruction set."""
    kinds = (rig.type_k, rig.type_v)
    # A key that rounds the other way after rotation moves one step of its type.
    coarse = max({"f32": 2e-5, "f16": 1e-3, "bf16": 8e-3}.get(k, 2e-2) for k in kinds)
    limit = 2e-5 if rig.rope is None and rig.norms is None else coarse
    for i, work in enumerate(steps):
        pages = rig.pages(work)
        qkv = values(rig, len(pages.slots), i)
        want = rig.expect(pages, qkv)
        before = rig.memory.copy()
        for isa in ISAS:
            rig.memory[:] = before
            got = rig.run(cpu(isa), pages, qkv)
            np.testing.assert_allclose(got, want, atol=limit, rtol=limit, err_msg=isa)


def poison(rig: Rig, page: int, slot: int) -> None:
    h, layer = rig.heads, rig.layer
    part = rig.memory[page, layer.k_offset : layer.k_offset + rig.k_bytes]
    nan = np.full((h.n_kv_heads, max(h.head_dim_k, h.head_dim_v)), np.nan, np.float32)
    kv.store_keys(part, rig.type_k, slot, nan[:, : h.head_dim_k])
    part = rig.memory[page, layer.v_offset : layer.v_offset + rig.v_bytes]
    kv.store_values(part, rig.type_v, slot, nan[:, : h.head_dim_v])


MIXED = [
    [(0, 1)], [(0, 14), (1, 15)], [(0, 1), (2, 17), (1, 1)], [(3, 127), (0, 1)],
    [(3, 1), (2, 112), (1, 1)], [(3, 1), (0, 283), (2, 1)], [(0, 1), (3, 40)],
]  # fmt: skip
"""Lengths 1, 15, 16, 17, 127 to 130, 300; prompts and single tokens in one step."""


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 1), (40, 64)), ((9, 3), (64, 64)), ((8, 1), (80, 96)), ((16, 16), (60, 60)),
     ((4, 2), (128, 40)), ((2, 1), (256, 128)), ((3, 1), (96, 256)), ((5, 1), (34, 18))],
)  # fmt: skip
def test_shapes(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    shape = Heads(*heads, *dims, scale=dims[0] ** -0.5)
    check(Rig(shape, page_tokens=32, rope=full_rope(dims[0])), MIXED)


@pytest.mark.parametrize("type_k", KINDS)
@pytest.mark.parametrize("type_v", KINDS)
def test_types(type_k: str, type_v: str) -> None:
    shape = Heads(6, 2, 64, 96, scale=0.125)
    check(Rig(shape, type_k, type_v, 64), [[(0, 20), (1, 1)], [(0, 1), (1, 130)]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_stored_bytes_are_the_references(kind: str, page_tokens: int) -> None:
    rig = Rig(Heads(4, 2, 64, 32, scale=1.0), kind, kind, page_tokens)
    pages = rig.pages([(0, 70), (1, 3)])
    qkv = values(rig, 73) * np.float32(3)
    qkv[5] = 0  # groups without any scale
    own = replace(pages, memory=pages.memory.copy())
    reference.attention(qkv, rig.layer, own, None)
    for isa in ISAS:
        rig.memory[:] = 0xFF
        rig.run(cpu(isa), pages, qkv)
        np.testing.assert_array_equal(rig.memory, own.memory)


def test_quantised_rows_are_ggmls() -> None:
    gguf = pytest.importorskip("gguf")
    x = np.random.default_rng(1).standard_normal((50, 64)).astype(np.float32)
    q, scales = kv.quantize("q8_0", x)
    blocks = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0).reshape(50, 2, 34)
    np.testing.assert_array_equal(blocks[..., :2].copy().view(np.float16)[..., 0], scales)
    np.testing.assert_array_equal(blocks[..., 2:].reshape(50, 64), q)
    q, scales = kv.quantize("q4_0", x)
    blocks = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_0).reshape(50, 2, 18)
    np.testing.assert_array_equal(blocks[..., :2].copy().view(np.float16)[..., 0], scales)
    np.testing.assert_array_equal(blocks[..., 2:].reshape(50, 32), q)


@pytest.mark.parametrize("neox", [True, False])
def test_norms_and_partial_rope(neox: bool) -> None:
    rng = np.random.default_rng(3)
    q_norm, k_norm = rng.uniform(0.5, 2, (2, 80)).astype(np.float32)
    rig = Rig(Heads(4, 2, 80, 80, scale=0.1), "f32", "f32", rope=full_rope(80, neox, 48, 1.25),
              norms=(q_norm, k_norm), first={0: 100_000})  # fmt: skip
    check(rig, [[(0, 30), (1, 5)], [(1, 1), (0, 1)]])


@pytest.mark.parametrize("window", [1, 5, 16, 100, 1000])
def test_windows(window: int) -> None:
    check(Rig(Heads(4, 2, 64, 64, scale=0.3, window=window)), MIXED)


def test_softcap() -> None:
    check(Rig(Heads(4, 2, 64, 64, scale=2.0, softcap=30.0), "f32", "f32"), MIXED)


@pytest.mark.parametrize("window", [0, 20])
def test_holes(window: int) -> None:
    """Holes anywhere, whole pages of them missing, and positions that repeat or run backwards."""
    rig = Rig(Heads(6, 2, 64, 48, scale=0.3, window=window))
    check(rig, [[(0, 200), (1, 60), (2, 90)]])
    at = rig.slot_positions = {s: list(range(260)) for s in range(3)}
    at[1] = [*(i // 2 for i in range(60)), *range(30, 230)]  # as after seq_div
    rng = np.random.default_rng(0)
    for s, upto in ((0, 200), (1, 60), (2, 90)):
        for slot in rng.choice(upto, upto // 3, replace=False):
            at[s][slot] = -1
    at[0][64:112] = [-1] * 48  # three whole pages: their ids are gone
    rig.tables[0][4:7] = [-1] * 3
    at[2][10:20] = range(95, 105)  # out of order: for some tokens still in the future
    at[2][32:48] = [-1] * 16
    for s, slots in at.items():  # what lies in a hole must not matter
        for slot in np.flatnonzero(np.array(slots[: rig.length[s]]) < 0):
            page, inside = rig.tables[s][slot // 16], int(slot) % 16
            if page >= 0:
                poison(rig, page, inside)
    check(rig, [[(0, 1), (1, 1), (2, 30)], [(0, 40), (2, 1)]])


def test_a_row_that_sees_nothing_is_zero(isa: str) -> None:
    rig = Rig(Heads(2, 1, 64, 64, scale=1.0))
    rig.slot_positions = {0: [7, 8, 9]}
    pages = rig.pages([(0, 1)])
    hidden = replace(pages, slot_positions=np.array([[-1]], np.int32))
    assert np.array_equal(rig.run(cpu(isa), hidden, values(rig, 1)), np.zeros((1, 128)))


def test_what_is_not_finite_shows(isa: str) -> None:
    """A NaN in a token's own key or query makes its output NaN, and nobody else's."""
    rig = Rig(Heads(2, 1, 64, 64, scale=1.0))
    qkv = values(rig, 40)
    qkv[20, 3] = np.nan  # query of token 20, head 0
    qkv[30, 128] = np.inf  # key of token 30
    qkv[35, 192 + 5] = np.inf  # value of token 35
    got = rig.run(cpu(isa), rig.pages([(0, 40)]), qkv)
    finite = np.array([np.isfinite(row).all() for row in got])
    assert not finite[20] and np.isfinite(got[20, 64:]).all()
    assert finite[:20].all() and finite[21:30].all() and not finite[30:].any()


# ---- one result whatever the batch ----------------------------------------------------------


def in_chunks(rig: Rig, device: _cpu.Cpu, qkv: Floats, chunk: int) -> Floats:
    out = [
        rig.run(device, rig.pages([(0, len(part))]), part)
        for part in (qkv[i : i + chunk] for i in range(0, len(qkv), chunk))
    ]
    return np.concatenate(out)


SAME = [
    Rig(Heads(9, 3, 64, 64, scale=0.125)),
    Rig(Heads(9, 3, 64, 64, scale=0.125, window=50, softcap=20.0), page_tokens=32),
    Rig(Heads(4, 4, 40, 60, scale=0.2), "bf16", "f32"),
    Rig(Heads(5, 1, 96, 32, scale=0.2), "q4_0", "q8_0", page_tokens=64),
]


@pytest.mark.parametrize("rig", SAME)
def test_chunks_and_threads_change_no_bit(isa: str, rig: Rig) -> None:
    qkv = values(rig, 290)
    rope = full_rope(rig.heads.head_dim_k)
    want = in_chunks(replace(rig, rope=rope), cpu(isa, 1), qkv, 290)
    for chunk, threads in ((1, 2), (7, 1), (16, 3), (64, 2), (290, 3)):
        got = in_chunks(replace(rig, rope=rope), cpu(isa, threads), qkv, chunk)
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("rig", SAME)
def test_company_changes_no_bit(isa: str, rig: Rig) -> None:
    qkv = values(rig, 200)
    want = in_chunks(replace(rig), cpu(isa, 1), qkv, 200)
    own = replace(rig)
    done = 0
    for step, count in enumerate((150, 1, 1, 20, 1, 27)):
        others = [(1 + s, 30 if step == s else 1) for s in range(step + 1)]
        pages = own.pages([*others[:1], (0, count), *others[1:]])
        batch = values(own, len(pages.slots), 77 + step)
        mine = pages.seq_rows == 1
        batch[mine] = qkv[done : done + count]
        got = own.run(cpu(isa, 3), pages, batch)[mine]
        np.testing.assert_array_equal(got.view(np.int32), want[done : done + count].view(np.int32))
        done += count


@pytest.mark.parametrize("rig", SAME)
def test_who_else_reads_the_same_pages_changes_no_bit(isa: str, rig: Rig) -> None:
    """Forks side by side that share all of a beginning or parts, and others among them."""
    trunk = values(rig, 400)
    own = replace(rig, n_pages=512)
    own.run(cpu(isa), own.pages([(0, 400)]), trunk)
    shared = {1: 400, 2: 384, 3: 384, 4: 130, 5: 160, 6: 127, 7: 257, 8: 272}
    for seq, slots in shared.items():
        whole = slots // rig.page_tokens
        own.tables[seq], own.length[seq] = own.tables[0][:whole], whole * rig.page_tokens
    work = [(1, 1), (2, 1), (3, 40), (9, 5), (0, 3), (4, 1), (5, 7), (6, 1), (8, 2), (7, 1)]
    for counts in (work, work[::-1], [(seq, 1) for seq, _ in work]):
        pages = own.pages(counts)
        batch = values(own, len(pages.slots), 7)
        for threads in (1, 2, 3):
            got = own.run(cpu(isa, threads), pages, batch)
            for row, (_, count) in enumerate(counts):
                mine = pages.seq_rows == row
                one = replace(
                    pages, tables=pages.tables[row : row + 1], first=pages.first[row : row + 1],
                    length=pages.length[row : row + 1], slots=pages.slots[mine],
                    positions=pages.positions[mine], seq_rows=np.zeros(count, np.int32),
                )  # fmt: skip
                alone = own.run(cpu(isa, 1), one, batch[mine])
                np.testing.assert_array_equal(got[mine].view(np.int32), alone.view(np.int32))


def test_splitting_a_long_context_changes_no_bit(isa: str) -> None:
    rig = Rig(Heads(8, 2, 64, 64, scale=0.2), "q8_0", n_pages=128)
    qkv = values(rig, 1901)
    rig.run(cpu(isa, 2), rig.pages([(0, 1900)]), qkv[:1900])
    last = rig.pages([(0, 1)])
    want = rig.run(cpu(isa, 1), last, qkv[1900:])
    for threads in (2, 3):
        got = rig.run(cpu(isa, threads), last, qkv[1900:])
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def test_dropping_pages_before_the_window_changes_no_bit() -> None:
    rig = Rig(Heads(4, 2, 64, 64, scale=0.3, window=50))
    qkv = values(rig, 300)
    want = in_chunks(replace(rig), cpu(), qkv, 300)
    got = [rig.run(cpu(), rig.pages([(0, 240)]), qkv[:240])]
    for i in range(240, 300):
        gone = (i - 50) // 16 - rig.first.get(0, 0) // 16
        rig.first[0] = rig.first.get(0, 0) + gone * 16
        for page in rig.tables[0][:gone]:
            rig.memory[page] = 0xFF
        del rig.tables[0][:gone]
        rig.length[0] -= gone * 16
        got.append(rig.run(cpu(), rig.pages([(0, 1)]), qkv[i : i + 1]))
    np.testing.assert_array_equal(np.concatenate(got).view(np.int32), want.view(np.int32))


# ---- reading another layer's pages, turning keys, mistakes -----------------------------------


def test_attention_without_storing_reads_what_was_stored(isa: str) -> None:
    rig = Rig(Heads(6, 2, 64, 64, scale=0.125), rope=full_rope(64))
    pages = rig.pages([(0, 50), (1, 20)])
    qkv = values(rig, 70)
    want = rig.run(cpu(isa), pages, qkv)
    before = rig.memory.copy()
    assert rig.rope is not None
    table = cpu(isa).rope_table(_cpu.Rope(64, rig.rope.freqs, True, 1.0), pages.positions)
    q = cpu(isa).array(np.ascontiguousarray(qkv[:, : 6 * 64]))
    layer = rig.layer
    got = cpu(isa).attention(
        q, rig.spec(cpu(isa)), handle(pages), table, layer.k_offset, layer.v_offset, store=False
    )
    np.testing.assert_array_equal(got.numpy(), want)
    np.testing.assert_array_equal(rig.memory, before)


def test_turned_keys_attend_as_if_stored_there() -> None:
    rope = full_rope(64)
    there = Rig(Heads(2, 1, 64, 64, scale=0.2), "f32", "f32", rope=rope, first={0: 16})
    here = Rig(Heads(2, 1, 64, 64, scale=0.2), "f32", "f32", rope=rope)
    qkv = values(there, 33)
    want = np.concatenate([there.run(cpu(), there.pages([(0, n)]), part)
                           for n, part in ((32, qkv[:32]), (1, qkv[32:]))])  # fmt: skip
    here.run(cpu(), here.pages([(0, 32)]), qkv[:32])
    cpu().rotate_pages(
        here.spec(cpu()), _cpu.Rope(64, rope.freqs, True, 1.0), here.memory.ctypes.data,
        here.memory.shape[1], 16, np.array(here.tables[0], np.int32),
        np.full((2, 16), 16, np.int32), np.array([here.layer.k_offset]),
    )  # fmt: skip
    here.first[0] = 16
    got = here.run(cpu(), here.pages([(0, 1)]), qkv[32:])
    np.testing.assert_allclose(got, want[32:], atol=1e-5)


def test_rope_table_of_far_positions() -> None:
    rope = full_rope(64, mscale=1.5)
    positions = np.array([0, 1, 131071, 10_000_000], np.int32)
    got = cpu().rope_table(_cpu.Rope(64, rope.freqs, True, 1.5), positions).numpy()
    angles = positions[:, None] * rope.freqs
    want = np.concatenate([np.cos(angles), np.sin(angles)], 1) * 1.5
    np.testing.assert_allclose(got, want, atol=1e-7)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="5 heads do not divide into 2"):
        _cpu.AttentionSpec(5, 2, 64, 64, "f16", "f16", 1.0)
    with pytest.raises(ValueError, match="48 of K as q8_0 must be a multiple of 32"):
        _cpu.AttentionSpec(4, 2, 48, 64, "q8_0", "f16", 1.0)
    with pytest.raises(ValueError, match="unknown K/V type q5_0"):
        _cpu.AttentionSpec(4, 2, 64, 64, "q5_0", "f16", 1.0)
    rig = Rig(Heads(2, 1, 64, 64, scale=1.0))
    pages = rig.pages([(0, 20)])
    with pytest.raises(ValueError, match="token 3 has slot 0, not the one of its position"):
        slots = pages.slots.copy()
        slots[3] = 0
        handle(replace(pages, slots=slots))
    with pytest.raises(ValueError, match="sequence 0 has no page 1"):
        handle(replace(pages, tables=np.array([[pages.tables[0, 0], -1]], np.int32)))
    with pytest.raises(ValueError, match=r"qkv is \[2, 256\], the .* need \[20, 256\]"):
        rig.run(cpu(), pages, values(rig, 2))
