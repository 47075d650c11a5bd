"""Every operation on arrays and matrices, through the table, beside its plain definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import GELU_MUL, SILU_MUL, Array, Ops, Refused
from quire.ops.table import Ops as Table
from quire.weights.quant import GGMLType, dequantize
from quire.weights.quantize import quantize
from tests.ops.devices import TABLES, table

Floats = NDArray[np.float32]
EPS = 1e-5


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def part(kind: GGMLType, values: Floats) -> tuple[tuple[int, int, int, Any], NDArray[np.float64]]:
    """A part of a matrix as a file has it, and the values it stands for."""
    if kind is GGMLType.Q8_0:
        data = quantize(values, GGMLType.Q8_0)
    elif kind is GGMLType.Q4_0:
        data = quantize(values, GGMLType.Q4_0)
    else:
        data = values.astype(np.float16 if kind is GGMLType.F16 else np.float32).view(np.uint8)
    raw = np.ascontiguousarray(data).reshape(-1)
    rows, cols = values.shape
    return (int(kind), rows, cols, raw), dequantize(raw, kind, (rows, cols)).astype(np.float64)


def close(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    """Float32 sums beside float64."""
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 1e-5 * (np.abs(wanted).max() + 1e-6)


def norm(x: NDArray[Any], weight: Floats) -> NDArray[np.float64]:
    y = x.astype(np.float64)
    return np.asarray(y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * weight)


def sigmoid(x: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))))


def act(kind: int, x: NDArray[Any]) -> NDArray[np.float64]:
    gate, up = np.split(x.astype(np.float64), 2, 1)
    if kind == SILU_MUL:
        return np.asarray(gate * sigmoid(gate) * up)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return np.asarray(gate * (1 + np.tanh(inner)) / 2 * up)


@pytest.mark.parametrize("name", TABLES)
def test_every_operation_is_there(name: str) -> None:
    wanted = {n for group in Table.__mro__ for n in vars(group) if not n.startswith("_")}
    assert len(wanted) > 30
    assert not [n for n in wanted if not hasattr(table(name), n)]
    assert table(name).name


# ---- arrays ---------------------------------------------------------------------------------


def test_arrays_keep_their_values(ops: Ops) -> None:
    x = normal(1, 7, 13)
    made = ops.array(x)
    assert made.shape == (7, 13) and made.nbytes == x.nbytes
    x_before = x.copy()
    x[:] = 0
    np.testing.assert_array_equal(ops.numpy(made), x_before)
    assert ops.vector(x[0]).shape == ops.array(x[0]).shape == (1, 13)
    np.testing.assert_array_equal(ops.numpy(ops.array(x_before[:, ::2])), x_before[:, ::2])


def test_rows_and_columns(ops: Ops) -> None:
    x = normal(2, 9, 37)
    made = ops.array(x)
    rows = np.array([8, 0, 0, 3], np.int32)
    np.testing.assert_array_equal(ops.numpy(ops.take_rows(made, rows)), x[rows])
    np.testing.assert_array_equal(ops.numpy(ops.columns(made, 3, 34)), x[:, 3:])
    assert ops.take_rows(made, rows[:0]).shape == (0, 37)
    for start, count in ((-1, 3), (0, 38), (36, 2), (3, 0)):
        with pytest.raises(Refused):
            ops.columns(made, start, count)
    for row in (-1, 9):
        with pytest.raises(Refused):
            ops.take_rows(made, np.array([row], np.int32))


def test_bytes_are_counted_and_returned(ops: Ops) -> None:
    ops.trim()
    before = ops.compute_bytes
    kept = ops.array(normal(3, 100, 100))
    assert ops.compute_bytes >= before + kept.nbytes
    del kept
    ops.trim()
    assert ops.compute_bytes == before


@pytest.mark.parametrize("cols", [1, 33, 96])
def test_norms(ops: Ops, cols: int) -> None:
    x, into, weight = normal(4, 5, cols), normal(5, 5, cols), normal(6, cols)
    made = ops.array(into)
    ops.add_norm(made, ops.array(x), ops.vector(weight), EPS)
    close(ops.numpy(made), into + norm(x, weight))
    for wrong in (ops.array(x[:4]), ops.array(np.tile(x, 2))):
        with pytest.raises(Refused):
            ops.add_norm(made, wrong, ops.vector(weight), EPS)
    with pytest.raises(Refused):
        ops.add_norm(made, ops.array(x), ops.vector(np.tile(weight, 2)), EPS)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("groups", "group"), [(1, 40), (5, 37), (3, 5)])
def test_gated_norm(ops: Ops, gate_first: bool, groups: int, group: int) -> None:
    x, gate = normal(7, 6, groups * group), normal(8, 6, groups * group)
    silu = gate.astype(np.float64) * sigmoid(gate)
    for weight in (normal(9, group), normal(10, groups * group)):
        y = (x * silu if gate_first else x).reshape(6, groups, group)
        wanted = norm(y, weight.reshape(-1, group)).reshape(x.shape)
        args = (ops.vector(weight), EPS, group, gate_first)
        found = ops.gated_norm(ops.array(x), ops.array(gate), *args)
        close(ops.numpy(found), wanted if gate_first else wanted * silu)
    with pytest.raises(Refused):
        ops.gated_norm(ops.array(x), ops.array(gate[:3]), *args)
    with pytest.raises(Refused):
        ops.gated_norm(ops.array(x), ops.array(gate), args[0], EPS, group + 1, gate_first)


def test_gates_and_caps(ops: Ops) -> None:
    x, gate, row = normal(11, 6, 41), 20 * normal(12, 6, 41), normal(13, 6, 1)
    made = ops.array(x)
    assert ops.gate_sigmoid(made, ops.array(gate)) is made
    close(ops.numpy(made), x * sigmoid(gate))
    into = ops.array(gate)
    ops.add_gated(into, ops.array(x), ops.array(row))
    close(ops.numpy(into), gate + x * sigmoid(row))
    ops.softcap(into, 4.0)
    close(ops.numpy(into), 4 * np.tanh((gate + x * sigmoid(row)) / 4))
    with pytest.raises(Refused):
        ops.gate_sigmoid(made, ops.array(gate[:3]))
    with pytest.raises(Refused):
        ops.add_gated(into, ops.array(x), ops.array(gate))
    with pytest.raises(Refused):
        ops.softcap(into, 0.0)


# ---- matrices -------------------------------------------------------------------------------

KINDS = (GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 19])
def test_products(ops: Ops, kind: GGMLType, n: int) -> None:
    cols = 96 if "Q" in kind.name else 45
    one, a = part(kind, normal(20, 17, cols))
    two, b = part(GGMLType.F32, normal(21, 3, cols))
    w = ops.pack([one, two])
    values = np.concatenate([a, b])
    assert (w.rows, w.cols) == values.shape
    assert w.nbytes == ops.packed_bytes([one[:3], two[:3]])
    x, weight, bias = normal(22, n, cols), normal(23, cols), normal(24, 20)
    close(ops.numpy(ops.linear(ops.array(x), w)), x @ values.T)
    close(
        ops.numpy(ops.linear(ops.array(x), w, ops.vector(weight), EPS, bias=ops.vector(bias))),
        norm(x, weight) @ values.T + bias,
    )
    close(ops.numpy(ops.linear_int16(ops.array(x), w, ops.vector(weight), EPS)),
          norm(x, weight) @ values.T)  # fmt: skip
    made, into = ops.array(normal(26, n, 20)), normal(26, n, 20)
    assert ops.linear(ops.array(x), w, into=made) is made
    close(ops.numpy(made), into + x @ values.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [SILU_MUL, GELU_MUL])
def test_networks(ops: Ops, kind: GGMLType, which: int) -> None:
    width, inner = 64, 96
    (gate, gates), (up, ups) = (part(kind, normal(seed, inner, width)) for seed in (40, 41))
    down, downs = part(kind, normal(42, width, inner))
    gate_up, last = ops.pack([gate, up]), ops.pack([down])
    x, weight = normal(43, 5, width), normal(44, width)
    middle = act(which, norm(x, weight) @ np.concatenate([gates, ups]).T)
    given = gate_up, last, ops.vector(weight), EPS
    close(ops.numpy(ops.network(ops.array(x), *given, which)), middle @ downs.T)
    into = ops.array(x)
    assert ops.network(into, *given, which, into=into) is into
    close(ops.numpy(into), x + middle @ downs.T)
    for wrong in ((gate_up, gate_up, *given[2:], which), (*given, 0), (*given, 3)):
        with pytest.raises(Refused):
            ops.network(ops.array(x), *wrong)
    with pytest.raises(Refused):
        ops.network(ops.array(x[:, 1:]), *given, which)


def test_products_of_wrong_sizes_are_refused(ops: Ops) -> None:
    w = ops.pack([part(GGMLType.F32, normal(27, 8, 32))[0]])
    x = ops.array(normal(28, 2, 32))
    into = ops.array(np.zeros((2, 8), np.float32))
    wrong = ops.array(normal(29, 2, 33))
    calls: list[dict[str, Any]] = [
        {"x": wrong},
        {"norm": wrong},
        {"bias": x},
        {"into": wrong},
    ]
    for call in calls:
        with pytest.raises(Refused):
            ops.linear(**{"x": x, "w": w, "into": into, **call})
    np.testing.assert_array_equal(ops.numpy(into), 0)
    for parts in ([], [part(GGMLType.F32, normal(0, 2, c))[0] for c in (32, 64)]):
        with pytest.raises(Refused):
            ops.pack(parts)
    with pytest.raises(Refused):
        ops.packed_bytes([(int(GGMLType.F32), 0, 32)])


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(ops: Ops, kind: GGMLType) -> None:
    one, a = part(kind, normal(32, 17, 64))
    two, b = part(GGMLType.F32, normal(33, 9, 64))
    w = ops.pack([one, two])
    ids = np.array([0, 16, 17, 25, 3, 3], np.int32)
    values = np.concatenate([a, b]).astype(np.float32)
    np.testing.assert_array_equal(ops.numpy(ops.embed(w, ids)), values[ids])
    close(ops.numpy(ops.embed(w, ids, 2.5)), 2.5 * values[ids])
    for wrong in (-1, 26):
        with pytest.raises(Refused):
            ops.embed(w, np.array([wrong], np.int32))


@pytest.mark.parametrize("normalize", [True, False])
def test_experts(ops: Ops, normalize: bool) -> None:
    experts, used, width, ffn, scale = 6, 2, 48, 20, 1.5
    router, gate, up, down = normal(40, experts, width), *(
        normal(41 + i, experts, *shape)
        for i, shape in enumerate([(ffn, width), (ffn, width), (width, ffn)])
    )  # fmt: skip
    x, into, weight = normal(45, 9, width), normal(46, 9, width), normal(47, width)
    h = norm(x, weight)
    scores = h @ router.astype(np.float64).T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    wanted = into.astype(np.float64)
    for i in range(9):
        chosen = np.argsort(-scores[i], kind="stable")[:used]
        total = shares[i, chosen].sum() if normalize else 1
        for e in chosen:
            middle = act(SILU_MUL, np.concatenate([gate[e] @ h[i], up[e] @ h[i]])[None])
            wanted[i] += scale * shares[i, e] / total * (down[e] @ middle[0])

    def packed(*stacks: Floats) -> Any:
        return ops.pack([part(GGMLType.F32, each)[0] for stack in stacks for each in stack])

    def run(n_used: int, out: Array, down_w: Any) -> Array:
        return ops.experts(
            ops.array(x), packed(router[None]), packed(gate, up), down_w, n_used,
            norm=ops.vector(weight), eps=EPS, normalize=normalize, scale=scale, into=out,
        )  # fmt: skip

    made = ops.array(into)
    assert run(used, made, packed(down)) is made
    close(ops.numpy(made), wanted)
    halves = ops.array(into)
    chosen, middle = ops.experts_in(
        ops.array(x), packed(router[None]), packed(gate, up), used,
        norm=ops.vector(weight), eps=EPS, normalize=normalize, scale=scale,
    )  # fmt: skip
    assert chosen.shape == (9, 2 * used) and middle.shape == (9 * used, ffn)
    assert ops.experts_out(middle, chosen, experts, packed(down), halves) is halves
    close(ops.numpy(halves), wanted)
    for count, down_w in ((5, packed(down)), (experts, packed(down[:5]))):
        with pytest.raises(Refused):
            ops.experts_out(middle, chosen, count, down_w, halves)
    for n_used, down_w in ((0, packed(down)), (7, packed(down)), (2, packed(down[:5]))):
        with pytest.raises(Refused):
            run(n_used, made, down_w)
