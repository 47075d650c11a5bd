"""Recurrent layers: parity with the reference over appends, scans and folds, and equal bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Ops, Refused
from tests.cuda.sides import GPU, Bytes, close, cuda, reference, same_bits

Floats = NDArray[np.float32]
LOG = 5
PAGES = 8


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def delta(n_k: int, n_v: int, dk: int, dv: int, tiled: bool = False) -> Callable[[Ops], Any]:
    channels = 2 * n_k * dk + n_v * dv
    a, dt = -np.exp(normal(n_v, seed=1)), normal(n_v, seed=2)
    conv = normal(channels, 4) * np.float32(0.5)
    return lambda ops: ops.delta_net(n_k, n_v, dk, dv, conv, None, a, dt, tiled)


def ssd(heads: int, groups: int, head_dim: int, state_dim: int) -> Callable[[Ops], Any]:
    channels = heads * head_dim + 2 * groups * state_dim
    a, dt, d = -np.exp(normal(heads, seed=1)), normal(heads, seed=2), normal(heads, seed=3)
    conv, bias = normal(channels, 4) * np.float32(0.5), normal(channels)
    limits = (0.01, 5.0)
    return lambda ops: ops.ssd(heads, groups, head_dim, state_dim, conv, bias, a, dt, d, limits)


def short(channels: int, width: int) -> Callable[[Ops], Any]:
    conv, bias = normal(channels, width), normal(channels)
    return lambda ops: ops.short_conv(conv, bias)


CASES = {
    "delta": delta(2, 4, 32, 32),
    "odd delta": delta(3, 3, 20, 11),
    "tiled": delta(2, 6, 16, 24, True),
    "ssd": ssd(4, 2, 32, 16),
    "odd ssd": ssd(5, 1, 19, 11),
    "conv": short(70, 3),
    "wide": short(33, 4),
}
if GPU:
    CASES |= {"large delta": delta(4, 8, 128, 128), "large ssd": ssd(8, 1, 64, 128)}


class Side:
    """A layer with state and log pages of its own, in the second half of them."""

    def __init__(self, ops: Ops, make: Callable[[Ops], Any]) -> None:
        self.ops, self.layer = ops, make(ops)
        self.state_at = -(-self.layer.state_bytes // 64) * 64
        self.stride = -(-self.layer.log_bytes // 64) * 64
        self.log_at = LOG * self.stride
        self.states = Bytes(ops, PAGES, 2 * self.state_at)
        self.logs = Bytes(ops, PAGES, 2 * self.log_at)

    def view(self, rows: list[tuple[int, ...]]) -> Any:
        columns = np.array(rows, np.int32).T.copy()
        names = ("state_in", "state_out", "log_in", "log_length", "log_out", "tail")
        return SimpleNamespace(
            state_page_bytes=2 * self.state_at, log_page_bytes=2 * self.log_at,
            log_stride=self.stride, layout=SimpleNamespace(log_tokens=LOG),
            **dict(zip(names, columns, strict=True)),
        )  # fmt: skip

    def run(self, rows: list[tuple[int, ...]], counts: list[int], x: Floats) -> Floats:
        seq_rows = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        bases = self.states.base, self.logs.base
        states = self.ops.states(self.view(rows), *bases, seq_rows)
        out = self.ops.recur(self.ops.array(x), self.layer, states, self.state_at, self.log_at)
        return self.ops.numpy(out)

    def fold(self, state_in: int, log: int, n: int, state_out: int) -> None:
        columns = [np.array([each], np.int32) for each in (state_in, log, n, state_out)]
        self.ops.fold(
            [self.layer], [(self.state_at, self.log_at)], self.states.base, 2 * self.state_at,
            self.logs.base, 2 * self.log_at, self.stride, *columns,
        )  # fmt: skip


def inputs(n: int, cols: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, cols)).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case: str) -> None:
    """Two sequences: a scan with a tail, appends, a fold; an append from nothing, then a scan."""
    sides = [Side(ops, CASES[case]) for ops in (cuda(), reference())]
    cols = sides[0].layer.in_cols
    steps = [
        ([(-1, 0, -1, 0, 0, 2), (-1, -1, -1, 0, 1, 0)], [9, 2]),  # scan of 7 + 2; append of 2
        ([(0, -1, 0, 2, 0, 0), (-1, -1, 1, 2, 1, 0)], [1, 3]),  # appends
        ([(-1, 1, 1, 5, 2, 1)], [8]),  # scan on a full log, one token in the new log
        ([(0, -1, 0, 3, 0, 0), (1, 2, 2, 1, -1, 0)], [2, 6]),  # a full log; a scan without a tail
    ]
    for i, (rows, counts) in enumerate(steps):
        x = inputs(sum(counts), cols, i)
        got, want = (side.run(rows, counts, x) for side in sides)
        close(got, want, 2e-5)
    for side in sides:
        side.fold(0, 0, 5, 3)
    got, want = (side.run([(3, -1, -1, 0, 3, 0)], [2], inputs(2, cols, 9)) for side in sides)
    close(got, want, 2e-5)


def in_pieces(case: str, x: Floats, pieces: list[int], company: bool = False) -> Floats:
    """One sequence in pieces: longer ones as scans, others into the log, folded when full."""
    side = Side(cuda(), CASES[case])
    state, log, length, out = -1, -1, 0, []
    at = 0
    for n in pieces:
        mine = x[at : at + n]
        at += n
        free_state, free_log = (state + 1) % 2, (log + 1) % 2
        if n > LOG:
            tail = 2
            row = (state, free_state, log if length else -1, length, free_log, tail)
            state, log, length = free_state, free_log, tail
        else:
            if length + n > LOG:
                side.fold(state, log, length, free_state)
                state, log, length = free_state, free_log, 0
            log = max(log, 0)
            row = (state, -1, log if length else -1, length, log, 0)
            length += n
        rows, counts, values = [row], [n], mine
        if company:
            rows, counts = [(-1, -1, -1, 0, 7, 0), row, (-1, 6, -1, 0, -1, 0)], [2, n, 7]
            more = inputs(9, x.shape[1], at)
            values = np.concatenate([more[:2], mine, more[2:]])
            out.append(side.run(rows, counts, values)[2 : 2 + n])
            continue
        out.append(side.run(rows, counts, values))
    return np.concatenate(out)


@pytest.mark.parametrize("case", CASES if GPU else ["odd delta", "wide"])
def test_pieces_and_company_change_no_bit(case: str) -> None:
    x = inputs(24, CASES[case](cuda()).in_cols)
    want = in_pieces(case, x, [24])
    for pieces in ([1] * 24, [3] * 8, [7, 1, 1, 1, 6, 5, 3], [2, 22]) if GPU else ([2, 22],):
        same_bits(in_pieces(case, x, pieces), want)
    same_bits(in_pieces(case, x, [7, 1, 1, 1, 6, 5, 3], company=True), want)


def test_many_folds_have_the_bits_of_one_at_a_time() -> None:
    columns = [
        np.array(c, np.int32) for c in ([0, -1, 0, 2], [3, 0, 0, 1], [1, 4, 2, 3], [4, 5, 6, 7])
    ]
    found = []
    for together in (True, False):
        side = Side(cuda(), CASES["odd ssd"])
        sizes = side.states.shape, side.logs.shape
        for bytes, shape in zip((side.states, side.logs), sizes, strict=True):
            bytes.write(normal(shape[0], shape[1] // 4).view(np.uint8))
        before = side.states.read()
        places = [(side.state_at, side.log_at), (0, 0)]
        for part in [slice(0, 4)] if together else [slice(i, i + 1) for i in range(4)]:
            side.ops.fold(
                [side.layer] * 2, places, side.states.base, 2 * side.state_at, side.logs.base,
                2 * side.log_at, side.stride, *(column[part] for column in columns),
            )  # fmt: skip
        found.append(side.states.read())
        np.testing.assert_array_equal(found[-1][:4], before[:4])
        assert all((found[-1][i] != before[i]).any() for i in range(4, 8))
    np.testing.assert_array_equal(*found)


def test_an_append_writes_its_entries_and_nothing_else() -> None:
    side = Side(cuda(), CASES["delta"])
    before = side.states.read(), side.logs.read()
    side.run([(-1, -1, -1, 0, 1, 0)], [2], inputs(2, side.layer.in_cols))
    np.testing.assert_array_equal(side.states.read(), before[0])
    changed = (side.logs.read() != before[1]).any(0).reshape(-1, side.stride).any(1)
    assert np.flatnonzero(changed).tolist() == [LOG, LOG + 1]


def test_a_long_run_does_not_drift() -> None:
    """Folds every few tokens against one scan by the reference."""
    case, n = "delta", 2000 if GPU else 20
    x = inputs(n, CASES[case](cuda()).in_cols)
    got = in_pieces(case, x, [1] * n)
    want = Side(reference(), CASES[case]).run([(-1, 0, -1, 0, -1, 0)], [n], x)
    close(got, want, 5e-5)


def test_tables_are_checked() -> None:
    side = Side(cuda(), CASES["conv"])
    x = inputs(3, side.layer.in_cols)
    for row in [
        (-1, -1, -1, 0, -1, 0),
        (-1, -1, -1, 4, 0, 0),
        (-1, -1, 0, 4, 0, 0),
        (0, 0, -1, 0, -1, 0),
    ]:
        with pytest.raises(Refused):
            side.run([row], [3], x)
    with pytest.raises(Refused, match="x is"):
        side.run([(-1, -1, -1, 0, 0, 0)], [3], x[:, 1:].copy())
