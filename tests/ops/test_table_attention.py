"""Attention through the table, beside a plain softmax over each sequence's history."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Heads, Ops, Refused, Rope
from quire.ops.reference import kv
from tests.ops.devices import TABLES, table
from tests.ops.state_book import pages_of

Floats = NDArray[np.float32]
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")
EPS = 1e-6


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def turned(x: NDArray[Any], positions: list[int], rope: Rope) -> NDArray[np.float64]:
    """x [n, heads, dims] as complex numbers, turned by angles."""
    half = rope.n_rot // 2
    pairs = (
        np.arange(rope.n_rot).reshape(2, half)
        if rope.neox
        else np.arange(rope.n_rot).reshape(half, 2).T
    )
    out = x.astype(np.float64)
    angles = np.array(positions)[:, None, None] * rope.freqs
    z = (out[..., pairs[0]] + 1j * out[..., pairs[1]]) * np.exp(1j * angles) * rope.mscale
    out[..., pairs[0]], out[..., pairs[1]] = z.real, z.imag
    return out


def normed(x: NDArray[Any], weight: Floats | None) -> NDArray[np.float64]:
    y = x.astype(np.float64)
    if weight is None:
        return y
    return np.asarray(y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * weight)


def rounded(kind: str, x: NDArray[Any]) -> NDArray[np.float64]:
    """What is left of keys or values [tokens, heads, dims] after storing them."""
    part = np.zeros(x.shape[1] * 16 * kv.kv_row_bytes(kind, x.shape[2]), np.uint8)
    out = np.empty(x.shape)
    for i, token in enumerate(x.astype(np.float32)):
        kv.store_values(part, kind, 0, token)
        out[i] = kv.load_values(part, kind, *token.shape)[0]
    return out


@dataclass
class Case:
    """A layer, the sequences it has seen, and the pages they lie in."""

    heads: Heads
    kinds: tuple[str, str] = ("f32", "f32")
    page_tokens: int = 16
    rope: Rope | None = None
    norms: bool = False
    first: int = 0
    """Position of every sequence's first token."""
    tables: dict[int, list[int]] = field(default_factory=dict)
    seen: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        h = self.heads
        sizes = [
            h.n_kv_heads * self.page_tokens * kv.kv_row_bytes(kind, dims)
            for kind, dims in zip(self.kinds, (h.head_dim_k, h.head_dim_v), strict=True)
        ]
        self.k, self.v = 32, 32 + sizes[0] + 16
        self.memory = pages_of(24, self.v + sizes[1] + 48)
        self.free = [int(i) for i in np.random.default_rng(1).permutation(24)]
        self.q_norm, self.k_norm = (normal(7, 2, h.head_dim_k) + 1) if self.norms else (None, None)

    def view(self, work: dict[int, int]) -> tuple[Any, list[int], NDArray[np.int32]]:
        """Room for new tokens: memory's view, their positions and their rows."""
        slots, positions = [], []
        for seq, count in work.items():
            pages, start = self.tables.setdefault(seq, []), len(self.seen.setdefault(seq, []))
            for at in range(start, start + count):
                if at // self.page_tokens == len(pages):
                    pages.append(self.free.pop())
                slots.append(
                    pages[at // self.page_tokens] * self.page_tokens + at % self.page_tokens
                )
                positions.append(self.first + at)
        most = max(len(self.tables[seq]) for seq in work)
        tables = [[*self.tables[seq], *[-1] * (most - len(self.tables[seq]))] for seq in work]
        rows = np.repeat(np.arange(len(work), dtype=np.int32), list(work.values()))
        view = SimpleNamespace(
            page_bytes=self.memory.shape[1], page_tokens=self.page_tokens, slot_positions=None,
            tables=np.array(tables, np.int32), first=np.full(len(work), self.first, np.int32),
            length=np.array([len(self.seen[s]) + n for s, n in work.items()], np.int32),
            slots=np.array(slots, np.int32),
        )  # fmt: skip
        return view, positions, rows

    def handle(self, ops: Ops) -> Any:
        norms = [None if n is None else ops.vector(n) for n in (self.q_norm, self.k_norm)]
        return ops.heads(self.heads, *self.kinds, norms[0], norms[1], EPS)

    def run(self, ops: Ops, work: dict[int, int], qkv: Floats, store: bool = True) -> Floats:
        view, positions, rows = self.view(work)
        at = np.array(positions, np.int32)
        rope = None if self.rope is None else ops.rope_table(ops.rope(self.rope), at)
        pages = ops.pages(view, self.memory.ctypes.data, at, rows)
        x = ops.array(qkv if store else qkv[:, : self.heads.n_heads * self.heads.head_dim_k])
        return np.array(ops.numpy(
            ops.attention(x, self.handle(ops), pages, rope, self.k, self.v, store=store)
        ))  # fmt: skip

    def expect(self, work: dict[int, int], qkv: Floats) -> NDArray[np.float64]:
        """The plain meaning; remembers the tokens."""
        h = self.heads
        n, a = len(qkv), h.n_heads * h.head_dim_k
        b = a + h.n_kv_heads * h.head_dim_k
        q = normed(qkv[:, :a].reshape(n, h.n_heads, -1), self.q_norm)
        k = normed(qkv[:, a:b].reshape(n, h.n_kv_heads, -1), self.k_norm)
        _, positions, _ = self.view(work)
        if self.rope is not None:
            q, k = turned(q, positions, self.rope), turned(k, positions, self.rope)
        k = rounded(self.kinds[0], k)
        v = rounded(self.kinds[1], qkv[:, b:].reshape(n, h.n_kv_heads, -1))
        outs, row = [], 0
        for seq, count in work.items():
            for _ in range(count):
                self.seen[seq].append((k[row], v[row]))
                outs.append(self._attend(q[row], self.seen[seq]))
                row += 1
        return np.stack(outs)

    def _attend(self, q: NDArray[np.float64], seen: list[tuple[Any, Any]]) -> NDArray[np.float64]:
        h = self.heads
        visible = seen[-h.window :] if h.window else seen
        out = []
        for head in range(h.n_heads):
            mine = head // (h.n_heads // h.n_kv_heads)
            scores = np.array([q[head] @ k[mine] for k, _ in visible]) * h.scale
            if h.softcap:
                scores = h.softcap * np.tanh(scores / h.softcap)
            weights = np.exp(scores - scores.max())
            out.append((weights / weights.sum()) @ np.stack([v[mine] for _, v in visible]))
        return np.concatenate(out)


def rope_of(n_rot: int, neox: bool) -> Rope:
    return Rope(n_rot, 10000.0 ** (-np.arange(0, n_rot, 2) / n_rot), neox, 1.2)


STEPS = [{0: 21, 1: 1}, {1: 33, 2: 2}, {0: 1, 2: 1, 1: 1}]
CASES = {
    "one head": Case(Heads(1, 1, 16, 16, scale=0.25)),
    "odd sizes": Case(Heads(6, 2, 60, 22, scale=0.1)),
    "rope of pairs": Case(Heads(4, 4, 40, 40, scale=0.2), rope=rope_of(24, neox=False)),
    "rope of halves, normed": Case(
        Heads(8, 2, 32, 64, scale=0.2), page_tokens=32, rope=rope_of(32, neox=True), norms=True
    ),
    "window": Case(Heads(4, 2, 32, 32, scale=0.2, window=9), rope=rope_of(32, neox=True)),
    "softcap": Case(Heads(4, 2, 32, 32, scale=1.0, softcap=3.0)),
    "from a later position": Case(Heads(2, 1, 32, 32, scale=0.2), rope=rope_of(8, True), first=48),
} | {f"{k}, {v}": Case(Heads(4, 2, 64, 32, scale=0.2), (k, v)) for k, v in
     zip(KINDS, (*KINDS[1:], "f32"), strict=True)}  # fmt: skip


def fresh(name: str) -> Case:
    return replace(CASES[name], tables={}, seen={})


@pytest.mark.parametrize("name", CASES)
def test_attention_is_softmax_over_history(ops: Ops, name: str) -> None:
    case = fresh(name)
    h = case.heads
    cols = (h.n_heads + h.n_kv_heads) * h.head_dim_k + h.n_kv_heads * h.head_dim_v
    quantised = any(kind[0] == "q" for kind in case.kinds)
    for number, work in enumerate(STEPS):
        qkv = normal(number, sum(work.values()), cols)
        found = case.run(ops, work, qkv)
        before = case.memory.copy()
        again = case.run(ops, work, qkv, store=False)
        np.testing.assert_array_equal(case.memory, before)
        np.testing.assert_array_equal(again.view(np.int32), found.view(np.int32))
        wanted = case.expect(work, qkv)
        # A value between two steps of a quantised type may go either way.
        assert np.abs(found - wanted).max() < (2e-2 if quantised else 2e-5) * np.abs(wanted).max()
    used = {page for pages in case.tables.values() for page in pages}
    rest = [page for page in range(24) if page not in used]
    assert (case.memory[rest] == 0xFF).all()
    assert (case.memory[:, :32] == 0xFF).all() and (case.memory[:, -48:] == 0xFF).all()


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_one_layout_hold_the_same_bytes(kind: str) -> None:
    """A page that one device wrote is what another would have written."""
    assert len({table(name).page_layout for name in TABLES}) == 1
    found = []
    for name in TABLES:
        case = Case(Heads(4, 2, 64, 32, scale=0.2), (kind, kind), 32)
        case.run(table(name), {0: 40, 1: 7}, 3 * normal(1, 47, 4 * 64 + 2 * 96))
        found.append(case.memory)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_holes_are_not_seen(ops: Ops) -> None:
    """Slots without a position hide what lies there, be it no number."""
    case = Case(Heads(2, 1, 32, 32, scale=0.3))
    qkv = normal(3, 24, 4 * 32)
    case.run(ops, {0: 20}, qkv[:20])
    gone = [0, 5, 6, 19]
    kept = [i for i in range(20) if i not in gone]
    case.seen[0] = [None] * 20  # type: ignore[list-item]
    view, _, rows = case.view({0: 4})
    positions = np.full((1, 24), -1, np.int32)
    positions[0, kept], positions[0, 20:] = np.arange(16), np.arange(16, 20)
    view.slot_positions, at = positions, np.arange(16, 20, dtype=np.int32)
    pages = ops.pages(view, case.memory.ctypes.data, at, rows)
    x = ops.array(qkv[20:])
    found = ops.numpy(ops.attention(x, case.handle(ops), pages, None, case.k, case.v))
    plain = Case(case.heads)
    plain.expect({0: 16}, qkv[kept])
    np.testing.assert_allclose(found, plain.expect({0: 4}, qkv[20:]), atol=1e-5)


def test_rope_tables(ops: Ops) -> None:
    rope = rope_of(16, neox=True)
    positions = np.array([0, 1, 131071, 10_000_000], np.int32)
    angles = positions[:, None] * rope.freqs
    found = ops.numpy(ops.rope_table(ops.rope(rope), positions))
    wanted = 1.2 * np.concatenate([np.cos(angles), np.sin(angles)], 1)
    np.testing.assert_allclose(found, wanted, atol=1e-7)
    with pytest.raises(Refused):
        ops.rope(Rope(16, rope.freqs[:3], True))


@pytest.mark.parametrize(
    ("heads", "kinds", "told"),
    [
        (Heads(5, 2, 64, 64, scale=1.0), ("f16", "f16"), None),
        (
            Heads(4, 2, 48, 64, scale=1.0),
            ("q8_0", "f16"),
            "48 of K as q8_0 must be a multiple of 32",
        ),
        (Heads(4, 2, 64, 15, scale=1.0), ("f16", "f16"), "15 of V as f16 must be a multiple of 2"),
        (Heads(4, 2, 64, 64, scale=1.0), ("q5_0", "f16"), None),
    ],
)
def test_heads_that_cannot_be_are_refused(
    ops: Ops, heads: Heads, kinds: tuple[str, str], told: str | None
) -> None:
    with pytest.raises(Refused, match=told):
        ops.heads(heads, *kinds, None, None, 0.0)
    with pytest.raises(Refused):
        ops.heads(Heads(2, 1, 64, 64, scale=1.0), "f32", "f32", ops.vector(normal(0, 63)), None, 0)


def test_pages_that_do_not_fit_together_are_refused(ops: Ops) -> None:
    case = Case(Heads(2, 1, 32, 32, scale=0.3))
    view, positions, rows = case.view({0: 20})
    at, base = np.array(positions, np.int32), case.memory.ctypes.data
    wrong = view.slots.copy()
    wrong[3] = 0 if wrong[3] else 1
    for change in (
        {"slots": wrong}, {"tables": np.array([[view.tables[0, 0], -1]], np.int32)},
        {"length": np.array([40], np.int32)}, {"length": np.array([19], np.int32)},
        {"page_tokens": 20}, {"first": np.zeros(2, np.int32)},
    ):  # fmt: skip
        with pytest.raises(Refused):
            ops.pages(SimpleNamespace(**{**vars(view), **change}), base, at, rows)
    for positions_, rows_ in ((at[:5], rows), (at, rows + 1), (at[::-1].copy(), rows)):
        with pytest.raises(Refused):
            ops.pages(view, base, positions_, rows_)
    pages = ops.pages(view, base, at, rows)
    heads, right = case.handle(ops), ops.array(normal(1, 20, 128))
    end = case.memory.shape[1]
    for qkv, k, v, store in (
        (ops.array(normal(1, 2, 128)), 32, case.v, True), (right, end, case.v, True),
        (right, 32, end, True), (right, -16, case.v, True), (right, 32, case.v, False),
    ):  # fmt: skip
        with pytest.raises(Refused):
            ops.attention(qkv, heads, pages, None, k, v, store=store)
    assert (case.memory == 0xFF).all()
