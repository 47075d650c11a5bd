"""Recurrent layers: parity with the reference over appends, scans and folds, and equal bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.memory.groups.state_pools import Mode, choose_at_positions
from quire.ops import Ops, Refused
from quire.ops.cuda.recurrent import state_places
from quire.ops.cuda.recurrent_layer import CudaStates, StateShape
from quire.ops.cuda.recurrent_rows import state_columns
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
    "long delta": delta(1, 2, 64, 48),
    "tiled": delta(2, 6, 16, 24, True),
    "ssd": ssd(4, 2, 32, 16),
    "even ssd": ssd(4, 2, 20, 32),
    "odd ssd": ssd(5, 1, 19, 11),
    "conv": short(70, 3),
    "wide": short(33, 4),
}
if GPU:
    CASES |= {"large delta": delta(4, 8, 128, 128), "large ssd": ssd(8, 1, 64, 128),
              "large and wide delta": delta(2, 4, 256, 64)}  # fmt: skip


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
        names = ("state_in", "state_out", "log_in", "log_length", "log_out", "tail", "log_kept",
                 "room")  # fmt: skip
        rows = [(*row, *(-1, LOG)[len(row) - 6 :]) for row in rows]
        columns = np.array(rows, np.int32).T.copy()
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


@pytest.mark.parametrize("case", CASES if GPU else ["odd delta", "odd ssd", "wide"])
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


class Line:
    """One sequence on the GPU, whose logs are folded where positions say."""

    def __init__(self, case: str) -> None:
        self.side = Side(cuda(), CASES[case])
        self.state, self.position, self.log, self.length = -1, 0, -1, 0

    def take(self, x: Floats, kept: int | None = None, company: bool = False) -> Floats:
        """Computes tokens and keeps the first of them; outputs of those."""
        n, kept = len(x), len(x) if kept is None else kept
        mode, tail = choose_at_positions(self.position, self.length, n, LOG)
        if mode is Mode.FOLD:
            self.side.fold(self.state, self.log, self.length, self.free_state)
            self.state, self.position = self.free_state, self.position + self.length
            self.log, self.length = self.free_log, 0
        self.log = max(self.log, 0)
        log_in = self.log if self.length else -1
        if mode in (Mode.APPEND, Mode.FOLD):
            row = (self.state, -1, log_in, self.length, self.log, 0, -1, LOG)
        else:
            kept_log = self.log if mode is Mode.CROSS else -1
            places = self.state, self.free_state, log_in, self.length, self.free_log
            row = (*places, tail, kept_log, LOG)
        rows, counts, values = [row], [n], x
        if company:  # an append, padding, and a scan
            rows = [(-1, -1, -1, 0, 7, 0), (-1, -1, -1, 0, -1, 0), row, (-1, 6, -1, 0, -1, 0)]
            counts, more = [2, 1, n, 7], inputs(10, x.shape[1], n)
            values = np.concatenate([more[:3], x, more[3:]])
        out = self.side.run(rows, counts, values)[sum(counts[: len(rows) // 2]) :][:kept]
        if kept == 0:
            return out
        self.length += kept
        if mode in (Mode.CROSS, Mode.SCAN) and (mode is Mode.SCAN or kept > n - tail):
            self.position += self.length - kept + n - tail
            self.state, self.log, self.length = self.free_state, self.free_log, kept - n + tail
        return out

    @property
    def free_state(self) -> int:
        return (self.state + 1) % 2

    @property
    def free_log(self) -> int:
        return (self.log + 1) % 2


def in_pieces(case: str, x: Floats, pieces: list[int], company: bool = False) -> Floats:
    """Outputs of one sequence that comes in pieces."""
    line, ends = Line(case), np.cumsum(pieces)
    spans = zip(pieces, ends, strict=True)
    return np.concatenate([line.take(x[end - n : end], None, company) for n, end in spans])


def drafted(case: str, x: Floats, n: int) -> Floats:
    """Outputs of one sequence that comes as drafts of which a part is wrong."""
    line, out, at = Line(case), [], 0
    while at < len(x):
        right = min([0, 1, n, n // 2][len(out) % 4], len(x) - at)
        wrong = inputs(n - right, x.shape[1], at)
        out.append(line.take(np.concatenate([x[at : at + right], wrong]), right))
        at += right
    return np.concatenate(out)


@pytest.mark.parametrize("case", CASES if GPU else ["odd ssd"])
def test_pieces_company_and_drafts_change_no_bit(case: str) -> None:
    n = 24 if GPU else 9
    x = inputs(n, CASES[case](cuda()).in_cols)
    want = in_pieces(case, x, [n])
    pieces = [[7, 1, 1, 1, 6, 5, 3], [1] * 24, [3] * 8, [2, 22], [LOG] * 4 + [4], [20, 4], [21, 3]]
    for each in pieces if GPU else ([1, 3, 3, 1, 1],):
        same_bits(in_pieces(case, x, each), want)
    same_bits(in_pieces(case, x, pieces[0] if GPU else [7, 2], company=True), want)
    for drafts in range(1, LOG + 1) if GPU else (4,):
        same_bits(drafted(case, x, drafts), want)


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


def test_padding_writes_nothing() -> None:
    for case in ("delta", "conv"):
        side = Side(cuda(), CASES[case])
        before = side.states.read(), side.logs.read()
        out = side.run([(-1, -1, -1, 0, -1, 0)] * 2, [1, 3], inputs(4, side.layer.in_cols))
        assert (out == 0).all()
        np.testing.assert_array_equal(side.states.read(), before[0])
        np.testing.assert_array_equal(side.logs.read(), before[1])


def test_a_shape_that_is_filled_up_computes_the_same() -> None:
    """What fills up a captured step writes nothing, whoever is beside it."""
    for case in ("delta", "conv"):
        found = []
        for more in (0, 3):
            side = Side(cuda(), CASES[case])
            rows = [(-1, -1, -1, 0, 1, 0), (-1, 2, -1, 0, 3, 2)]
            seq_rows, x = np.repeat([0, 1], [1, 7]).astype(np.int32), inputs(8, side.layer.in_cols)
            view, ops = side.view(rows), side.ops
            shape = StateShape(8 + more, 2 + more, False)
            columns = ops.machine.upload_all(state_columns(view, seq_rows, shape))
            assert [len(column) for column in columns] == shape.sizes
            places = state_places(view, side.states.base, side.logs.base)
            padded = ops.array(np.concatenate([x, np.full((more, x.shape[1]), np.nan, np.float32)]))
            states: Any = CudaStates(places, shape, columns)
            out = ops.numpy(ops.recur(padded, side.layer, states, side.state_at, side.log_at))
            assert (out[8:] == 0).all()
            found.append((out[:8], side.states.read(), side.logs.read()))
        for alone, filled in zip(*found, strict=True):
            same_bits(alone, filled)


def test_a_long_run_does_not_drift() -> None:
    """Thousands of tokens, one by one, beside the plain recurrence in float64."""
    case, n = "delta", 5000 if GPU else 12
    x = inputs(n, CASES[case](cuda()).in_cols)
    got = in_pieces(case, x, [1] * n)
    want = Side(reference(), CASES[case]).run([(-1, 0, -1, 0, -1, 0)], [n], x)
    close(got, want, 2e-5)
    close(got[-50:], want[-50:], 2e-5)


def test_tables_are_checked() -> None:
    side = Side(cuda(), CASES["conv"])
    x = inputs(3, side.layer.in_cols)
    for row in [
        (-1, -1, -1, 4, 0, 0),
        (-1, 0, -1, 0, 1, 2, 1),
        (-1, 0, -1, 0, 1, 4, 2),
        (-1, -1, 0, 4, 0, 0),
        (0, 0, -1, 0, -1, 0),
    ]:
        with pytest.raises(Refused):
            side.run([row], [3], x)
    with pytest.raises(Refused, match="x is"):
        side.run([(-1, -1, -1, 0, 0, 0)], [3], x[:, 1:].copy())
