"""Recurrent layers: parity with the reference, and one result however tokens were taken in."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import _cpu
from quire.ops.cpu import CpuOps
from quire.ops.reference import recurrent as reference
from quire.ops.reference.recurrent import Convolution, DeltaNet, Remembered, ShortConv, Ssd
from tests.ops.state_book import StateBook, column

Floats = NDArray[np.float32]
Layer = DeltaNet | Ssd | ShortConv
LOG = 16


@cache
def device(isa: str = "auto", threads: int = 2) -> CpuOps:
    return CpuOps(threads, isa=isa)


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def conv(seed: int, channels: int, width: int, bias: bool) -> Convolution:
    return Convolution(normal(seed, channels, width), normal(seed + 1, channels) if bias else None)


def delta(
    n_k: int, n_v: int, dk: int, dv: int, width: int, seed: int, bias: bool = False,
    tiled: bool = False,
) -> DeltaNet:  # fmt: skip
    mixed = conv(seed, 2 * n_k * dk + n_v * dv, width, bias)
    a = -np.exp(normal(seed + 2, n_v))
    return DeltaNet(n_k, n_v, dk, dv, mixed, a, normal(seed + 3, n_v), tiled)


def ssd(
    heads: int, groups: int, p: int, n: int, width: int, seed: int, bias: bool = True,
    limits: tuple[float, float] = (0.0, np.inf),
) -> Ssd:  # fmt: skip
    mixed = conv(seed, heads * p + 2 * groups * n, width, bias)
    a, dt, d = -np.exp(normal(seed + 2, heads)), normal(seed + 3, heads), normal(seed + 4, heads)
    return Ssd(heads, groups, p, n, mixed, a, dt - 1, d, limits)


def short(channels: int, width: int, seed: int, bias: bool = False) -> ShortConv:
    return ShortConv(conv(seed, channels, width, bias))


def handle(ops: CpuOps, layer: Layer) -> Any:
    c = layer.conv
    match layer:
        case DeltaNet(n_k, n_v, dk, dv):
            return ops.delta_net(
                n_k, n_v, dk, dv, c.weight, c.bias, layer.ssm_a, layer.dt_bias, layer.tiled
            )
        case Ssd(heads, groups, p, n):
            return ops.ssd(
                heads, groups, p, n, c.weight, c.bias, layer.ssm_a, layer.dt_bias, layer.d,
                layer.dt_limits,
            )  # fmt: skip
    return ops.short_conv(c.weight, c.bias)


class Rig(StateBook):
    """Two layers of one shape."""

    ops: CpuOps

    def __init__(self, ops: CpuOps, layers: list[Layer], log_tokens: int = LOG) -> None:
        super().__init__(ops, [handle(ops, layer) for layer in layers], log_tokens)
        self.definitions = layers

    def feed(self, seq: int, x: Floats, chunks: list[int]) -> Floats:
        """All of x, in chunks of these sizes over and over."""
        outs, at, turn = [], 0, 0
        while at < len(x):
            size = chunks[turn % len(chunks)]
            outs.append(self.run({seq: x[at : at + size]})[seq])
            at, turn = at + size, turn + 1
        return np.concatenate(outs)


CASES = {
    "delta 1/1 heads, width 4": partial(delta, 1, 1, 16, 16, 4),
    "delta 2/4 heads, dk > dv, width 3": partial(delta, 2, 4, 40, 24, 3, bias=True),
    "delta 3/9 heads, odd dims, width 2": partial(delta, 3, 9, 7, 37, 2),
    "delta 2/6 heads tiled, width 1": partial(delta, 2, 6, 33, 5, 1, tiled=True),
    "delta 4/8 heads of 64": partial(delta, 4, 8, 64, 64, 4),
    "ssd 5/1 heads, odd dims, width 4": partial(ssd, 5, 1, 19, 11, 4),
    "ssd 6/3 heads of 32, dt limited": partial(ssd, 6, 3, 32, 48, 3, limits=(0.05, 1.5)),
    "ssd 4/4 heads, no bias, width 1": partial(ssd, 4, 4, 64, 16, 1, bias=False),
    "short conv of 300, width 3": partial(short, 300, 3),
    "short conv of 37, width 4": partial(short, 37, 4, bias=True),
    "short conv of 64, width 2": partial(short, 64, 2),
}
SOME = [name for i, name in enumerate(CASES) if i in (2, 3, 5, 6, 9)]


def make(case: str, isa: str = "auto", threads: int = 2) -> Rig:
    return Rig(device(isa, threads), [CASES[case](seed=seed) for seed in (10, 20)])


def inputs(rig: Rig, n: int, seed: int = 0) -> Floats:
    return normal(seed, n, rig.layers[0].in_cols)


def close(found: Floats, wanted: NDArray[Any]) -> None:
    """Float32 sums of some hundred terms beside float64."""
    scale = float(np.abs(wanted).max()) + 1e-6
    assert float(np.abs(found - wanted).max()) < 3e-5 * scale


class Truth:
    """The same layers by the reference, sequence by sequence."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.memory: dict[int, list[Remembered]] = {}

    def step(self, seq: int, x: Floats) -> NDArray[Any]:
        before = self.memory.setdefault(seq, [layer.start() for layer in self.layers])
        outs = [layer.run(x, m) for layer, m in zip(self.layers, before, strict=True)]
        self.memory[seq] = [after for _, after in outs]
        return np.concatenate([out for out, _ in outs], 1)


# ---- parity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_matches_the_reference(case: str, isa: str, threads: int) -> None:
    rig = make(case, isa, threads)
    truth = Truth(rig.definitions)
    steps = [{0: 1, 1: 17, 2: 5}, {2: 40, 0: 1, 1: 1}, {1: 15, 0: 14, 3: 2}, {3: 23, 0: 1, 1: 2}]
    for number, counts in enumerate(steps):
        work = {s: inputs(rig, n, 100 * number + s) for s, n in counts.items()}
        for seq, out in rig.run(work).items():
            close(out, truth.step(seq, work[seq]))
    for seq in range(4):
        page = np.frombuffer(rig.state(seq), np.uint8)
        for (at, _), remembered in zip(rig.offsets, truth.memory[seq], strict=True):
            wanted = remembered.page()
            assert len(wanted) == rig.layers[0].state_bytes
            close(page[at : at + len(wanted)].view(np.float32), wanted.view(np.float32))


def test_gates_that_are_extreme(isa: str) -> None:
    """Nothing overflows on the way to results that are finite."""
    for case in ("delta 1/1 heads, width 4", "ssd 6/3 heads of 32, dt limited"):
        rig = make(case, isa)
        x = inputs(rig, 8)
        x[:, -2:] = np.array([[-200, 200], [200, -200], [90, 90], [-90, -90]] * 2)
        x[:, 3] *= 100
        close(rig.run({0: x})[0], Truth(rig.definitions).step(0, x))


# ---- one result -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", SOME)
def test_chunks_change_no_bit(case: str, isa: str) -> None:
    whole = make(case, isa, 1)
    x = inputs(whole, 130)
    out = whole.feed(0, x, [130])
    for chunks in ([1], [7], [16], [64], [1, 3, 17, 2], [12, 118]):
        rig = make(case, isa)
        assert np.array_equal(rig.feed(0, x, chunks), out), chunks
        assert rig.state(0) == whole.state(0), chunks


@pytest.mark.parametrize("case", SOME)
def test_where_a_fold_falls_changes_no_bit(case: str) -> None:
    plain = make(case)
    x = inputs(plain, 24)
    out = plain.feed(0, x, [24])
    for first in range(1, 9):
        rig = make(case)
        # The second chunk does not fit behind the first, so the first is folded.
        found = rig.feed(0, x, [first, LOG, 24 - LOG - first] if first < 8 else [8, LOG])
        assert np.array_equal(found, out) and rig.state(0) == plain.state(0)


@pytest.mark.parametrize("case", SOME)
def test_the_length_of_a_log_changes_no_bit(case: str) -> None:
    plain = make(case)
    long = Rig(plain.ops, plain.definitions, log_tokens=100)
    x = inputs(plain, 130)
    assert np.array_equal(long.feed(0, x, [1]), plain.feed(0, x, [1]))
    assert np.array_equal(long.feed(1, x, [90, 10, 30]), plain.feed(1, x, [130]))
    assert {long.state(0), long.state(1)} == {plain.state(0), plain.state(1)}
    assert long.state(0) == long.state(1)


@pytest.mark.parametrize("case", SOME)
def test_alone_or_in_a_batch_changes_no_bit(case: str) -> None:
    together, alone = make(case), make(case, threads=1)
    for number, counts in enumerate([{0: 3, 1: 40, 2: 1}, {2: 20, 1: 9, 0: 16}, {1: 9, 3: 1}]):
        work = {seq: inputs(alone, n, 10 * number + seq) for seq, n in counts.items()}
        for seq, out in together.run(work).items():
            assert np.array_equal(out, alone.run({seq: work[seq]})[seq])
    assert all(together.state(seq) == alone.state(seq) for seq in range(4))


@pytest.mark.parametrize("case", SOME)
def test_a_draft_that_is_dropped_leaves_nothing(case: str) -> None:
    plain, drafted = make(case), make(case)
    x = inputs(plain, 60)
    out = plain.feed(0, x, [1])
    at, outs = 0, []
    for turn in range(12):
        draft = np.concatenate([x[at : at + 2], inputs(plain, 3, 900 + turn)])
        outs.append(drafted.run({0: draft}, keep=2)[0])
        at += 2
    outs.append(drafted.feed(0, x[at:], [1]))
    assert np.array_equal(np.concatenate(outs), out)
    assert drafted.state(0) == plain.state(0)


@pytest.mark.parametrize(
    "case", ["delta 3/9 heads, odd dims, width 2", "ssd 5/1 heads, odd dims, width 4"]
)
def test_five_thousand_tokens_with_folds_and_partial_drafts(case: str) -> None:
    rng = np.random.default_rng(4)
    rig, plain = make(case), make(case, threads=1)
    x = inputs(rig, 5000)
    at, outs = 0, []
    while at < len(x):
        count = int(rng.choice([1, 1, 1, 4, 9, 16, 50]))
        new = x[at : at + count]
        if len(new) > LOG:
            outs.append(rig.run({0: new})[0])
        else:
            kept = int(rng.integers(0, len(new) + 1))
            outs.append(rig.run({0: new}, keep=kept)[0])
        at += len(outs[-1])
    out = np.concatenate(outs)
    assert np.array_equal(out, plain.feed(0, x, [5000]))
    assert rig.state(0) == plain.state(0)
    close(out, Truth(rig.definitions).step(0, x))


# ---- what is written ------------------------------------------------------------------------


@pytest.mark.parametrize("case", SOME)
def test_an_append_writes_its_entries_and_nothing_else(case: str) -> None:
    rig = make(case)
    rig.feed(0, inputs(rig, 25), [20, 5])
    table = rig.tables[0]
    state, log = rig.states[table.state], rig.logs[table.log]
    before, first = (state.tobytes(), log.copy()), table.length
    x = inputs(rig, 3, 1)
    rig.run({0: x})
    assert state.tobytes() == before[0]
    written = np.zeros(len(log), bool)
    size = rig.layers[0].log_bytes
    for _, at in rig.offsets:
        for i in range(first, first + 3):
            start = at + i * rig.log_stride
            written[start : start + size] = True
            entry = log[start : start + size].view(np.float32)
            wanted = x[i - first]
            if len(wanted) != len(entry):
                b, _, values = np.split(wanted, 3)
                wanted = b * values
            assert np.array_equal(entry, wanted)
    assert np.array_equal(log[~written], before[1][~written])


def test_a_scan_reads_its_old_state_and_log_only() -> None:
    rig = make("delta 3/9 heads, odd dims, width 2")
    rig.feed(0, inputs(rig, 25), [20, 5])
    rig.copy(0, to=1)
    table = rig.tables[0]
    pages = rig.states[table.state], rig.logs[table.log]
    before = [page.tobytes() for page in pages]
    rig.run({0: inputs(rig, 30, 1)})
    assert [page.tobytes() for page in pages] == before
    again = rig.run({1: inputs(rig, 30, 1)})[1]
    assert np.array_equal(
        again, rig.feed(2, np.concatenate([inputs(rig, 25), inputs(rig, 30, 1)]), [55])[25:]
    )


# ---- gates and norms ------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("groups, group", [(1, 40), (5, 37), (8, 128), (3, 5)])
def test_gated_norm(isa: str, threads: int, gate_first: bool, groups: int, group: int) -> None:
    ops, cols = device(isa, threads), groups * group
    x, gate = normal(1, 77, cols), normal(2, 77, cols)
    for weight in (normal(3, group), normal(4, cols)):
        args = (ops.vector(weight), 1e-5, group, gate_first)
        out = ops.numpy(ops.gated_norm(ops.array(x), ops.array(gate), *args))
        close(out, reference.gated_norm(x, gate, weight, 1e-5, group, gate_first))
        one = ops.gated_norm(ops.array(x[5:6]), ops.array(gate[5:6]), *args)
        assert np.array_equal(ops.numpy(one)[0], out[5])


def test_gate_sigmoid_and_columns(isa: str) -> None:
    ops = device(isa)
    x, gate = normal(1, 33, 141), 30 * normal(2, 33, 141)
    values = ops.array(x)
    assert ops.gate_sigmoid(values, ops.array(gate)) is values
    close(ops.numpy(values), reference.gate_sigmoid(x, gate))
    assert np.array_equal(ops.numpy(ops.columns(ops.array(x), 3, 100)), x[:, 3:103])
    for start, count in ((-1, 3), (0, 142), (140, 2), (3, 0)):
        with pytest.raises(ValueError, match="columns"):
            ops.columns(values, start, count)


# ---- wrong arguments ------------------------------------------------------------------------


def test_sizes_of_weights_are_checked() -> None:
    ops, good = device(), delta(2, 4, 8, 8, 4, 1)
    weight, a, dt = good.conv.weight, good.ssm_a, good.dt_bias
    for args, message in [
        ((3, 4, 8, 8, weight, None, a, dt), "divide"),
        ((2, 4, 8, 9, weight, None, a, dt), r"conv is \[64, 4\]"),
        ((2, 4, 8, 8, weight, weight[:3, 0], a, dt), "conv_bias"),
        ((2, 4, 8, 8, weight, None, a[:3], dt), "ssm_a"),
        ((2, 4, 8, 8, weight, None, -a, dt), "never positive"),
        ((2, 4, 8, 8, weight, None, a, dt[:3]), "dt_bias"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.delta_net(*args)
    with pytest.raises(ValueError, match="remembers nothing"):
        ops.short_conv(weight[:, :1])


def test_states_are_checked() -> None:
    def states(
        state_in: int = -1, state_out: int = -1, log_in: int = -1, length: int = 0,
        log_out: int = 0, tail: int = 0, rows: tuple[int, ...] = (0, 0),
    ) -> Any:  # fmt: skip
        given = (state_in, state_out, log_in, length, log_out, tail)
        columns = (np.array([value], np.int32) for value in given)
        return _cpu.States(64, 640, 64, 640, 64, 4, *columns, np.array(rows, np.int32))

    states()
    for wrong, message in [
        ({"log_out": -1}, "a state or a log"),
        ({"tail": 1}, "a state or a log"),
        ({"state_out": 1}, "the last 0 of 2 tokens into log page 0"),
        ({"state_out": 1, "log_out": -1, "tail": 1}, "the last 1 of 2 tokens into log page -1"),
        ({"state_out": 1, "tail": 2}, "the last 2 of 2"),
        ({"state_out": 1, "tail": 1, "log_in": 0}, "overwrite log page 0"),
        ({"state_in": 2, "state_out": 2, "log_out": -1}, "overwrite state page 2"),
        ({"length": 1}, "log page -1"),
        ({"length": 5, "log_in": 0}, "holds 4"),
        ({"length": 3, "log_in": 0}, "behind 3"),
        ({"length": 1, "log_in": 1}, "writes 0"),
        ({"rows": ()}, "no tokens"),
        ({"rows": (0, 1)}, "sequence 1"),
        ({"state_in": -2}, "below -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            states(**wrong)
    pair = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="lie apart"):
        rows = np.array([0, 1, 0], np.int32)
        _cpu.States(64, 640, 64, 640, 64, 4, pair, pair - 1, pair - 1, pair, pair, pair, rows)


def test_recur_checks_where_it_reads_and_writes() -> None:
    rig = make("short conv of 64, width 2")
    layer, ops = rig.layers[0], rig.ops
    x = ops.array(inputs(rig, 2))
    bases = rig.states.ctypes.data, rig.logs.ctypes.data
    states = ops.states(rig.plan({0: 2})[0], *bases, np.zeros(2, np.int32))
    ends = rig.states.shape[1], rig.logs.shape[1]
    for at in ((ends[0], 0), (-64, 0), (32, 0), (0, ends[1]), (0, -4), (0, 2)):
        with pytest.raises(ValueError, match="recurrent layer"):
            ops.recur(x, layer, states, *at)
    with pytest.raises(ValueError, match=r"need \[2, 192\]"):
        ops.recur(ops.array(inputs(rig, 3)), layer, states, 0, 0)
    rig.layers = [layer]
    with pytest.raises(ValueError, match="offsets of 2"):
        rig.fold_pages(column(-1), column(0), column(1), column(0))
