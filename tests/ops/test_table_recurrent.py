"""Recurrent layers through the table, beside plain loops over each sequence's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Ops, Recurrent, Refused
from tests.ops.devices import TABLES, table
from tests.ops.state_book import StateBook, column

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
LOG = 8


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


def convolved(x: Doubles, weight: Floats, bias: Floats | None, t: int) -> Doubles:
    """Channels of token t: the newest token meets the last tap."""
    width = weight.shape[1]
    taps = [x[t - j] * weight[:, width - 1 - j] for j in range(min(width, t + 1))]
    return np.asarray(sum(taps) + (0 if bias is None else bias), np.float64)


class Delta:
    """A gated delta net of odd sizes."""

    def __init__(self, tiled: bool) -> None:
        self.sizes, self.tiled = (2, 6, 9, 21), tiled
        n_k, n_v, dk, dv = self.sizes
        self.conv = normal(1, 2 * n_k * dk + n_v * dv, 3)
        self.a, self.dt = -np.exp(normal(2, n_v)), normal(3, n_v)

    def handle(self, ops: Ops) -> Recurrent:
        return ops.delta_net(*self.sizes, self.conv, None, self.a, self.dt, self.tiled)

    def plain(self, rows: Floats) -> Doubles:
        n_k, n_v, dk, dv = self.sizes
        x, out = rows.astype(np.float64), np.empty((len(rows), n_v, dv))
        channels = len(self.conv)
        states = np.zeros((n_v, dk, dv))
        for t in range(len(x)):
            mixed = convolved(x[:, :channels], self.conv, None, t)
            mixed = mixed * sigmoid(mixed)
            q, k = mixed[: 2 * n_k * dk].reshape(2, n_k, dk)
            v = mixed[2 * n_k * dk :].reshape(n_v, dv)
            for h in range(n_v):
                key = h % n_k if self.tiled else h // (n_v // n_k)
                unit = [z[key] / np.sqrt((z[key] ** 2).sum() + 1e-6) for z in (q, k)]
                beta, gate = sigmoid(x[t, channels + h]), x[t, channels + n_v + h]
                states[h] *= np.exp(self.a[h] * softplus(gate + self.dt[h]))
                states[h] += np.outer(unit[1], beta * (v[h] - unit[1] @ states[h]))
                out[t, h] = unit[0] @ states[h] / dk**0.5
        return out.reshape(len(x), -1)


class Mamba:
    """A Mamba-2 layer with limits of its steps."""

    def __init__(self) -> None:
        self.sizes = heads, groups, p, n = 6, 3, 19, 10
        self.conv, self.bias = normal(4, heads * p + 2 * groups * n, 4), normal(5, 114 + 60)
        self.a, self.dt, self.d = -np.exp(normal(6, heads)), normal(7, heads), normal(8, heads)

    def handle(self, ops: Ops) -> Recurrent:
        return ops.ssd(
            *self.sizes, self.conv, self.bias, self.a, self.dt, self.d, dt_limits=(0.1, 1.5)
        )

    def plain(self, rows: Floats) -> Doubles:
        heads, groups, p, n = self.sizes
        x, out = rows.astype(np.float64), np.empty((len(rows), heads, p))
        states = np.zeros((heads, n, p))
        for t in range(len(x)):
            mixed = convolved(x[:, : len(self.conv)], self.conv, self.bias, t)
            mixed = mixed * sigmoid(mixed)
            values, (b, c) = (
                mixed[: heads * p].reshape(heads, p),
                mixed[heads * p :].reshape(2, groups, n),
            )
            for h in range(heads):
                g = h // (heads // groups)
                step = np.clip(softplus(x[t, len(self.conv) + h] + self.dt[h]), 0.1, 1.5)
                states[h] *= np.exp(step * self.a[h])
                states[h] += np.outer(b[g], step * values[h])
                out[t, h] = c[g] @ states[h] + self.d[h] * values[h]
        return out.reshape(len(x), -1)


class Short:
    """A gated short convolution."""

    def __init__(self) -> None:
        self.conv, self.bias = normal(9, 37, 3), normal(10, 37)

    def handle(self, ops: Ops) -> Recurrent:
        return ops.short_conv(self.conv, self.bias)

    def plain(self, rows: Floats) -> Doubles:
        b, c, x = np.split(rows.astype(np.float64), 3, 1)
        mixed = [convolved(b * x, self.conv, self.bias, t) for t in range(len(rows))]
        return np.asarray(c * np.stack(mixed))


CASES = {"delta": Delta(False), "delta, tiled": Delta(True), "mamba": Mamba(), "short": Short()}
STEPS = [{0: 3, 1: 21}, {1: 4, 0: 2, 2: 25}, {0: 4}, {2: 1, 1: 8, 0: 13}, *[{0: 1, 1: 1}] * 9]
"""Appends, folds before appends, scans with and without a tail, with and without a log."""


@pytest.mark.parametrize("name", CASES)
def test_layers_are_plain_recurrences(ops: Ops, name: str) -> None:
    case = CASES[name]
    layer = case.handle(ops)
    book = StateBook(ops, [layer, layer], LOG)
    rows: dict[int, list[Floats]] = {}
    outs: dict[int, list[Floats]] = {}
    for number, counts in enumerate(STEPS):
        work = {s: normal(100 * number + s, n, layer.in_cols) for s, n in counts.items()}
        for seq, out in book.run(work).items():
            assert out.shape == (counts[seq], 2 * layer.out_cols)
            rows.setdefault(seq, []).append(work[seq])
            outs.setdefault(seq, []).append(out)
    for seq, parts in rows.items():
        wanted = np.tile(case.plain(np.concatenate(parts)), (1, 2))
        assert np.abs(np.concatenate(outs[seq]) - wanted).max() < 3e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", CASES)
def test_pages_of_one_layout_hold_the_same_bytes(name: str) -> None:
    """Logs are the same bytes on every device, states the same numbers in the same places."""
    books = []
    for each in TABLES:
        layer = CASES[name].handle(table(each))
        books.append(StateBook(table(each), [layer], LOG))
        for number, n in enumerate((21, 3)):
            books[-1].run({0: normal(number, n, layer.in_cols)})
    first = books[0]
    for other in books[1:]:
        assert other.tables == first.tables
        np.testing.assert_array_equal(other.logs, first.logs)
        wanted, found = (
            np.frombuffer(book.state(0), np.float32)[: layer.state_bytes // 4]
            for book in (first, other)
        )
        assert np.abs(found - wanted).max() < 3e-5 * np.abs(wanted).max()


def test_what_cannot_be_is_refused(ops: Ops) -> None:
    delta = CASES["delta"]
    assert isinstance(delta, Delta)
    a, dt, conv = delta.a, delta.dt, delta.conv
    for args in (
        (4, 6, 9, 21, conv, None, a, dt), (2, 6, 9, 20, conv, None, a, dt),
        (2, 6, 9, 21, conv, None, a[:5], dt), (2, 6, 9, 21, conv, None, -a, dt),
        (2, 6, 9, 21, conv, None, a, dt[:5]),
    ):  # fmt: skip
        with pytest.raises(Refused):
            ops.delta_net(*args)
    with pytest.raises(Refused):
        ops.short_conv(normal(0, 5, 1))
    layer = CASES["short"].handle(ops)
    book = StateBook(ops, [layer], LOG)
    view, _ = book.plan({0: 2})
    bases, rows = (book.states.ctypes.data, book.logs.ctypes.data), np.zeros(2, np.int32)
    states = ops.states(view, *bases, rows)
    x = ops.array(normal(1, 2, layer.in_cols))
    for at in ((book.states.shape[1], 0), (-64, 0), (32, 0), (0, book.logs.shape[1]), (0, -4)):
        with pytest.raises(Refused):
            ops.recur(x, layer, states, *at)
    with pytest.raises(Refused):
        ops.recur(ops.array(normal(1, 3, layer.in_cols)), layer, states, 0, 0)
    good = {"state_in": -1, "state_out": -1, "log_in": -1, "log_length": 0, "log_out": 0, "tail": 0}
    for wrong in (
        {"log_out": -1}, {"tail": 1}, {"state_out": 1}, {"state_out": 1, "log_out": -1, "tail": 1},
        {"state_out": 1, "tail": 2}, {"state_out": 1, "tail": 1, "log_in": 0},
        {"state_in": 2, "state_out": 2, "log_out": -1}, {"log_length": 1},
        {"log_length": 9, "log_in": 0}, {"log_length": 7, "log_in": 0},
        {"log_length": 1, "log_in": 1}, {"state_in": -2},
    ):  # fmt: skip
        columns = {name: column(value) for name, value in {**good, **wrong}.items()}
        with pytest.raises(Refused):
            ops.states(book.view(**columns), *bases, rows)
    assert (book.states == 0xFF).all() and (book.logs == 0xFF).all()
