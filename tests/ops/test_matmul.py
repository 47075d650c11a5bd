"""Matrix products: tiles are exact, products follow the reference, and n changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import GELU_MUL, SILU_MUL, _cpu
from quire.ops.reference import kv
from quire.ops.reference import matrices as reference
from quire.weights.quant import GGMLType, dequantize

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Where the blocks of each type keep their fp16 scales.
HALVES = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_XS: (0,),
}
DENSE = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
TYPES = (*HALVES, *DENSE)


def random_bytes(rng: np.random.Generator, kind: GGMLType, rows: int, cols: int) -> Bytes:
    """Weights of a type: any bits, with scales of a usual size."""
    if kind in DENSE:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        if kind is GGMLType.BF16:
            return kv.to_bf16(values).view(np.uint8).reshape(-1)
        dtype = np.float32 if kind is GGMLType.F32 else np.float16
        return values.astype(dtype).view(np.uint8).reshape(-1)
    blocks = rng.integers(0, 256, (rows * cols // kind.block_size, kind.type_size), np.uint8)
    for at in HALVES[kind]:
        scales = rng.uniform(-0.05, 0.05, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def part(kind: GGMLType, rows: int, cols: int, data: Bytes) -> tuple[int, int, int, Bytes]:
    return (int(kind), rows, cols, data)


def matrix(cpu: Any, kind: GGMLType, rows: int, cols: int, seed: int = 0) -> tuple[Any, Floats]:
    """A packed matrix and its values."""
    data = random_bytes(np.random.default_rng(seed), kind, rows, cols)
    data.flags.writeable = False  # as a mapped file is
    return cpu.pack([part(kind, rows, cols, data)]), dequantize(data, kind, (rows, cols))


def cols_of(kind: GGMLType) -> tuple[int, ...]:
    sizes = (32, 96, 256, 576, 768) if kind not in DENSE else (1, 31, 96, 577)
    return tuple(c for c in sizes if c % kind.block_size == 0)


def bits(a: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(a).view(np.uint32)


def close(got: Floats, want: Floats, x: Floats, w: Floats, tolerance: float) -> None:
    """Within a tolerance of the size of the terms that were added."""
    scale = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T + 1e-30
    assert got.shape == want.shape
    assert (np.abs(got - want) / scale).max() < tolerance


@pytest.mark.parametrize("kind", TYPES, ids=lambda k: k.name)
def test_tiles_hold_the_very_values_of_the_file(isa: str, kind: GGMLType) -> None:
    cpu = _cpu.Cpu(2, isa)
    for rows in (1, 7, 17, 100):
        for cols in cols_of(kind):
            w, values = matrix(cpu, kind, rows, cols, seed=rows)
            assert (w.rows, w.cols) == (rows, cols)
            assert w.nbytes == cpu.packed_bytes([(int(kind), rows, cols)])
            assert np.array_equal(bits(w.unpack()), bits(values)), (kind, rows, cols)


@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_products_of_int8_activations(isa: str, kind: GGMLType) -> None:
    cpu = _cpu.Cpu(2, isa)
    rng = np.random.default_rng(1)
    for rows, cols in [(1, 256), (7, 768), (100, 256), (17, 32), (33, 96)]:
        if cols % kind.block_size:
            continue
        w, values = matrix(cpu, kind, rows, cols)
        x = rng.standard_normal((11, cols)).astype(np.float32)
        got = cpu.linear(cpu.array(x), w).numpy()
        close(got, reference.linear(x, values), x, values, 2e-6)


@pytest.mark.parametrize("kind", TYPES, ids=lambda k: k.name)
def test_exact_products(isa: str, kind: GGMLType) -> None:
    cpu = _cpu.Cpu(2, isa, True)
    rng = np.random.default_rng(2)
    for rows in (5, 40):
        for cols in cols_of(kind):
            w, values = matrix(cpu, kind, rows, cols)
            x = rng.standard_normal((13, cols)).astype(np.float32)
            got = cpu.linear(cpu.array(x), w).numpy()
            close(got, reference.linear(x, values, exact=True), x, values, 1e-6)


@pytest.mark.parametrize("exact", [False, True], ids=["int8", "exact"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda k: k.name)
def test_no_bit_depends_on_batch_or_threads(isa: str, kind: GGMLType, exact: bool) -> None:
    cols = 256 if kind not in DENSE else 99
    x = np.random.default_rng(3).standard_normal((130, cols)).astype(np.float32)
    rows_of_one = None
    for threads in (1, 2, 3):
        cpu = _cpu.Cpu(threads, isa, exact)
        w, _ = matrix(cpu, kind, 90, cols)
        if rows_of_one is None:
            rows_of_one = np.concatenate([cpu.linear(cpu.array(row[None]), w).numpy() for row in x])
        for n in (1, 2, 3, 5, 8, 16, 33, 64, 130):
            got = cpu.linear(cpu.array(x[:n]), w).numpy()
            assert np.array_equal(bits(got), bits(rows_of_one[:n])), (threads, n)


def test_many_tokens_of_a_wide_matrix(isa: str) -> None:
    """Enough that tokens are taken in several strips."""
    cpu = _cpu.Cpu(2, isa)
    w, values = matrix(cpu, GGMLType.Q4_1, 40, 4096)
    x = np.random.default_rng(4).standard_normal((150, 4096)).astype(np.float32)
    got = cpu.linear(cpu.array(x), w).numpy()
    close(got, reference.linear(x, values), x, values, 2e-6)
    assert np.array_equal(bits(got[140:141]), bits(cpu.linear(cpu.array(x[140:141]), w).numpy()))


def test_many_rows_for_many_tokens(isa: str) -> None:
    """So many rows that threads share them, however many tokens there are."""
    cpu = _cpu.Cpu(2, isa)
    w, values = matrix(cpu, GGMLType.Q4_1, 2 * 8192 + 40, 32)
    x = np.random.default_rng(4).standard_normal((50, 32)).astype(np.float32)
    got = cpu.linear(cpu.array(x), w).numpy()
    close(got, reference.linear(x, values), x, values, 2e-6)
    assert np.array_equal(bits(got[40:41]), bits(cpu.linear(cpu.array(x[40:41]), w).numpy()))


@pytest.mark.parametrize("n", [1, 3, 20])
def test_parts_of_mixed_formats(isa: str, n: int) -> None:
    cpu = _cpu.Cpu(2, isa)
    rng = np.random.default_rng(5)
    kinds = [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.F16, GGMLType.Q5_0, GGMLType.Q8_0, GGMLType.F32]
    shapes = [(kind, rows) for kind, rows in zip(kinds, (33, 7, 1, 16, 20, 9), strict=True)]
    data = [(kind, rows, random_bytes(rng, kind, rows, 256)) for kind, rows in shapes]
    w = cpu.pack([part(kind, rows, 256, d) for kind, rows, d in data])
    values = np.concatenate([dequantize(d, kind, (rows, 256)) for kind, rows, d in data])
    assert len(w.formats) == len(kinds)
    assert np.array_equal(bits(w.unpack()), bits(values))
    x = rng.standard_normal((n, 256)).astype(np.float32)
    got = cpu.linear(cpu.array(x), w).numpy()
    dense = np.isin(np.repeat(np.arange(6), [r for _, r in shapes]), (2, 5))
    want = np.where(dense, reference.linear(x, values, exact=True), reference.linear(x, values))
    close(got, want, x, values, 2e-6)


def floats(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_bias_and_sum(isa: str, n: int, bias: bool, into: bool) -> None:
    cpu = _cpu.Cpu(2, isa, True)
    w, values = matrix(cpu, GGMLType.Q4_1, 50, 96)
    x, b, total = floats(1, n, 96), floats(2, 50) if bias else None, floats(3, n, 50)
    target = cpu.array(total) if into else None
    got = cpu.linear(
        cpu.array(x), w, bias=cpu.array(b[None]) if b is not None else None, into=target
    )
    assert (got is target) == into
    want = reference.linear(x, values, bias=b, into=total if into else None, exact=True)
    assert np.allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_fused_norm(isa: str, n: int) -> None:
    """The same bits as the norm alone and then the product."""
    cpu = _cpu.Cpu(2, isa)
    w, _ = matrix(cpu, GGMLType.Q4_1, 50, 96)
    x, weight = floats(1, n, 96), floats(2, 96)
    alone = cpu.rms_norm(cpu.array(x), cpu.array(weight[None]), 1e-5)
    assert np.allclose(alone.numpy(), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    fused = cpu.linear(cpu.array(x), w, norm=cpu.array(weight[None]), eps=1e-5)
    assert np.array_equal(bits(fused.numpy()), bits(cpu.linear(alone, w).numpy()))


@pytest.mark.parametrize(("n", "cols"), [(1, 96), (9, 61), (2, 3)])
def test_added_norm(isa: str, n: int, cols: int) -> None:
    cpu = _cpu.Cpu(2, isa)
    x, into, weight = floats(1, n, cols), floats(2, n, cols), floats(3, cols)
    got = cpu.array(into)
    cpu.add_norm(got, cpu.array(x), cpu.array(weight[None]), 1e-5)
    want = reference.add_norm(into, x, weight, 1e-5)
    assert np.allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "cols"), [(1, 1000), (9, 61)])
def test_softcap(isa: str, n: int, cols: int) -> None:
    cpu = _cpu.Cpu(2, isa)
    x = floats(1, n, cols) * 40
    x[0, :6] = [0, 1e-6, -1e30, 1e30, 1e4, -1e4]
    got = cpu.array(x)
    cpu.softcap(got, 30.0)
    assert np.allclose(got.numpy(), reference.softcap(x, 30.0), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("act", [SILU_MUL, GELU_MUL])
def test_fused_activation(isa: str, n: int, act: int) -> None:
    """The same bits as the activation alone and then the product."""
    cpu = _cpu.Cpu(2, isa)
    w, _ = matrix(cpu, GGMLType.Q4_1, 50, 96)
    x = floats(1, n, 192)
    alone = cpu.act_mul(cpu.array(x), act)
    want = (reference.silu if act == SILU_MUL else reference.gelu)(x[:, :96]) * x[:, 96:]
    assert np.allclose(alone.numpy(), want, rtol=1e-5, atol=1e-6)
    fused = cpu.linear(cpu.array(x), w, act=act)
    assert np.array_equal(bits(fused.numpy()), bits(cpu.linear(alone, w).numpy()))


@pytest.mark.parametrize("act", [SILU_MUL, GELU_MUL])
def test_activations_far_from_zero(isa: str, act: int) -> None:
    cpu = _cpu.Cpu(1, isa)
    gate = np.array([-1e30, -200, -88, -1, -1e-30, 0, 1e-30, 1, 88, 200, 1e30], np.float32)
    x = np.concatenate([gate, np.ones_like(gate)])[None]
    with np.errstate(over="ignore"):
        want = (reference.silu if act == SILU_MUL else reference.gelu)(gate)
    assert np.allclose(cpu.act_mul(cpu.array(x), act).numpy()[0], want, rtol=1e-5, atol=1e-6)


def test_embedding_rows(isa: str) -> None:
    cpu = _cpu.Cpu(2, isa)
    ids = np.array([0, 99, 3, 3, 17, 64] * 7, np.int32)
    for kind in (GGMLType.Q8_0, GGMLType.Q6_K, GGMLType.F16):
        w, values = matrix(cpu, kind, 100, 256)
        assert np.array_equal(bits(cpu.embed(w, ids).numpy()), bits(values[ids]))
        assert np.array_equal(cpu.embed(w, ids, 16.0).numpy(), reference.embed(values, ids, 16.0))


def extreme_blocks(kind: GGMLType, rows: int, cols: int, fill: int, scale: float) -> Bytes:
    blocks = np.full((rows * cols // kind.block_size, kind.type_size), fill, np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(-1)


@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_integer_sums_do_not_overflow(isa: str, kind: GGMLType) -> None:
    """The largest weights against the largest activations, of one sign and of both."""
    cpu = _cpu.Cpu(1, isa)
    x = np.ones((4, 256), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 1::2] = -1
    for fill in (0x00, 0x7F, 0x80, 0xFF, 0x3F, 0xAA, 0x55):
        data = extreme_blocks(kind, 16, 256, fill, 0.5)
        values = dequantize(data, kind, (16, 256))
        got = cpu.linear(cpu.array(x), cpu.pack([part(kind, 16, 256, data)])).numpy()
        close(got, x @ values.T, x, values, 1e-6)


@pytest.mark.parametrize("scale", [0.0, 6e-8, 1e-5, 65504.0])
def test_unusual_scales(isa: str, scale: float) -> None:
    cpu = _cpu.Cpu(1, isa)
    x = np.random.default_rng(8).standard_normal((3, 256)).astype(np.float32)
    for kind in HALVES:
        data = extreme_blocks(kind, 5, 256, 0x5A, scale)
        values = dequantize(data, kind, (5, 256))
        w = cpu.pack([part(kind, 5, 256, data)])
        assert np.array_equal(bits(w.unpack()), bits(values))
        got = cpu.linear(cpu.array(x), w).numpy()
        close(got, reference.linear(x, values), x, values, 2e-6)


@pytest.mark.parametrize("n", [1, 9])
def test_unusual_activations(isa: str, n: int) -> None:
    """Zeros give zeros, huge and tiny values their products, a NaN or infinity never a number."""
    cpu = _cpu.Cpu(1, isa)
    w, values = matrix(cpu, GGMLType.Q8_0, 20, 96)

    def run(x: Floats) -> Floats:
        out: Floats = cpu.linear(cpu.array(np.repeat(x[None], n, 0)), w).numpy()
        return out

    assert not run(np.zeros(96, np.float32)).any()
    x = np.random.default_rng(9).standard_normal(96).astype(np.float32)
    for factor in (1e30, 1e-28):
        big = x * np.float32(factor)
        close(
            run(big), np.repeat(reference.linear(big[None], values), n, 0), big[None], values, 2e-6
        )
    assert np.abs(run(x * np.float32(1e-40))).max() < 1e-30
    for bad in (np.nan, np.inf, -np.inf):
        y = x.copy()
        y[40] = bad
        assert not np.isfinite(run(y)).any()


def test_a_step_allocates_nothing_new(isa: str) -> None:
    cpu = _cpu.Cpu(2, isa)
    w, _ = matrix(cpu, GGMLType.Q4_0, 64, 64)
    x = cpu.array(np.ones((4, 64), np.float32))
    cpu.linear(x, w)
    held = cpu.arena_bytes
    for _ in range(5):
        cpu.linear(x, w)
    assert cpu.arena_bytes == held


def test_bad_arguments_are_refused() -> None:
    cpu = _cpu.Cpu(1)
    data = np.zeros(36, np.uint8)
    for parts, message in [
        ([], "at least one"),
        ([(2, 2, 32, data[:-1])], "takes 36 bytes, not 35"),
        ([(2, 2, 33, data)], "multiple"),
        ([(2, 0, 32, data)], "empty"),
        ([(2, -1, 32, data)], "empty"),
        ([(16, 2, 32, data)], "type 16"),
        ([(2, 2**62, 32, data)], "too large"),
        ([(2, 2, 32, data), (2, 1, 64, data)], "cannot be stacked"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpu.pack(parts)
    w, square = cpu.pack([(2, 2, 32, data)]), cpu.pack([(2, 32, 32, np.zeros(576, np.uint8))])
    x = cpu.empty(3, 32)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: cpu.linear(cpu.empty(3, 31), w), "32 columns"),
        (lambda: cpu.linear(x, w, act=1), "64 columns"),
        (lambda: cpu.linear(x, w, act=3), "act"),
        (lambda: cpu.linear(x, w, norm=cpu.empty(1, 31)), "norm"),
        (lambda: cpu.linear(x, w, bias=cpu.empty(1, 3)), "bias"),
        (lambda: cpu.linear(x, w, into=cpu.empty(2, 2)), "into"),
        (lambda: cpu.linear(x, square, into=x), "another"),
        (lambda: cpu.linear(cpu.empty(3, 64), w, act=1, norm=cpu.empty(1, 32)), "both"),
        (lambda: cpu.embed(w, np.array([2], np.int32)), "id 2"),
        (lambda: cpu.embed(w, np.array([-1], np.int32)), "id -1"),
        (lambda: cpu.rms_norm(x, cpu.empty(1, 3), 0.0), "weight"),
        (lambda: cpu.add_norm(x, cpu.empty(3, 31), cpu.empty(1, 31), 0.0), "into"),
        (lambda: cpu.add_norm(x, x, cpu.empty(1, 31), 0.0), "weight"),
        (lambda: cpu.softcap(x, 0.0), "cap"),
        (lambda: cpu.act_mul(cpu.empty(1, 3), 1), "gate"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    if cpu.isa != "portable":
        with pytest.raises(ValueError, match="packed for"):
            _cpu.Cpu(1, "portable").linear(x, w)


def test_callers_on_several_threads_take_turns(isa: str) -> None:
    """The lock of Python is released in a product, so another thread may begin one."""
    cpu = _cpu.Cpu(2, isa)
    w, _ = matrix(cpu, GGMLType.Q4_0, 1000, 256)
    x = [cpu.array(floats(seed, 40, 256)) for seed in range(4)]
    want = [cpu.linear(each, w).numpy().copy() for each in x]

    def run(i: int) -> bool:
        return all(np.array_equal(cpu.linear(x[i], w).numpy(), want[i]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
