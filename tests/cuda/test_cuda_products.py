"""Products with weights: parity with the reference for every type, and one result per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import GELU_MUL, SILU_MUL, Part, Refused
from quire.ops.batch import cross
from quire.weights.quant import DEQUANTIZABLE, GGMLType
from tests.cuda.sides import GPU, close, cuda, reference, same_bits

Floats = NDArray[np.float32]
TYPES = sorted(DEQUANTIZABLE)
SCALES = {
    GGMLType.Q4_0: [0], GGMLType.Q4_1: [0, 2], GGMLType.Q5_0: [0], GGMLType.Q5_1: [0, 2],
    GGMLType.Q8_0: [0], GGMLType.Q2_K: [80, 82], GGMLType.Q3_K: [108], GGMLType.Q4_K: [0, 2],
    GGMLType.Q5_K: [0, 2], GGMLType.Q6_K: [208], GGMLType.IQ4_NL: [0], GGMLType.IQ4_XS: [0],
}  # fmt: skip
"""Where blocks have float16 numbers, which must not be NaN."""
ROUNDING = {GGMLType.F32: 2e-6, GGMLType.BF16: 1e-2}


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def part(kind: GGMLType, rows: int, cols: int, seed: int = 0) -> Part:
    """Random rows of a type."""
    if kind is GGMLType.F32:
        data: NDArray[np.generic] = normal(rows, cols, seed=seed)
    elif kind is GGMLType.F16:
        data = normal(rows, cols, seed=seed).astype(np.float16)
    elif kind is GGMLType.BF16:
        data = (normal(rows, cols, seed=seed).view(np.uint32) >> 16).astype(np.uint16)
    else:
        rng = np.random.default_rng([rows, cols, seed])
        blocks = kind.nbytes((rows, cols)) // kind.type_size
        data = rng.integers(0, 256, (blocks, kind.type_size)).astype(np.uint8)
        for at in SCALES[kind]:
            scale = rng.uniform(0.001, 0.01, (blocks, 1)).astype(np.float16)
            data[:, at : at + 2] = scale.view(np.uint8)
    return int(kind), rows, cols, np.ascontiguousarray(data).view(np.uint8).ravel()


def width(kind: GGMLType) -> int:
    return 512 if kind.block_size == 256 else 608 if GPU else 96


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(kind: GGMLType) -> None:
    cols = width(kind)
    parts = [part(kind, 70, cols)]
    w, plain = cuda().pack(parts), reference().pack(parts)
    assert (w.rows, w.cols) == (70, cols)
    assert w.nbytes == cuda().packed_bytes([(int(kind), 70, cols)])
    norm = np.random.default_rng(1).uniform(0.5, 2, cols).astype(np.float32)
    for n in (1, 17, 70, 200) if GPU else (3, 70) if kind is GGMLType.F16 else (3,):
        x = normal(n, cols)
        got = cuda().numpy(cuda().linear(cuda().array(x), w, cuda().vector(norm), 1e-5))
        ref = reference()
        want = ref.numpy(ref.linear(ref.array(x), plain, ref.vector(norm), 1e-5))
        close(got, want, ROUNDING.get(kind, 2e-3))
        fine = cuda().numpy(cuda().linear_int16(cuda().array(x), w, cuda().vector(norm), 1e-5))
        close(
            fine,
            want,
            {GGMLType.F32: 2e-6, GGMLType.BF16: 5e-5, GGMLType.F16: 2e-6}.get(kind, 1e-3),
        )
    ids = np.array([3, 0, 69, 3], np.int32)
    rows = cuda().numpy(cuda().embed(w, ids, 2.0))
    close(rows, ref.numpy(ref.embed(plain, ids, 2.0)), 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TYPES)
def test_company_changes_no_bit(kind: GGMLType) -> None:
    """A token alone, among few, and among so many that another kernel takes them."""
    cols = 2560
    w, x = cuda().pack([part(kind, 320, cols)]), normal(300, cols)
    norm = cuda().vector(np.ones(cols, np.float32))
    for call in (cuda().linear, cuda().linear_int16):
        whole = cuda().numpy(call(cuda().array(x), w, norm, 1e-5))
        for n in (1, 2, 5, 20, 33, 64, 65, 130):
            same_bits(cuda().numpy(call(cuda().array(x[:n]), w, norm, 1e-5)), whole[:n])


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [
    (GGMLType.BF16, GGMLType.BF16), (GGMLType.F16, GGMLType.F32), (GGMLType.Q4_K, GGMLType.Q6_K),
    (GGMLType.Q8_0, GGMLType.Q5_K),
])  # fmt: skip
@pytest.mark.parametrize("mixed", [False, True])
def test_networks_have_one_result_per_token(kinds: tuple[GGMLType, GGMLType], mixed: bool) -> None:
    """Layers one after the other, so that sums left to the next reader are read in every way."""
    o, width, ffn = cuda(), 512, 1536
    up = [part(kinds[0], ffn, width), part(kinds[1] if mixed else kinds[0], ffn, width, seed=1)]
    gate_up, down = o.pack(up), o.pack([part(kinds[1], width, ffn)])
    same = o.pack([part(kinds[0], width, width)])
    norm, x = o.vector(np.full(width, 0.1, np.float32)), normal(200, width)

    def run(rows: Floats) -> Floats:
        total = o.array(rows)
        for _ in range(2):
            o.linear(o.linear(total, same, norm, 1e-5), same, into=total)
            o.network(total, gate_up, down, norm, 1e-5, SILU_MUL, into=total)
        return o.numpy(o.linear_int16(total, same, norm, 1e-5))

    whole = run(x)
    assert np.isfinite(whole).all()
    for n in (1, 2, 4, 5, 16, 40, 64, 65):
        same_bits(run(x[:n]), whole[:n])


@pytest.mark.gpu
def test_products_can_be_captured() -> None:
    import torch

    o = cuda()
    w = o.pack([part(GGMLType.Q4_K, 512, 512)])
    gate_up = o.pack([part(GGMLType.Q4_K, 1024, 512)])
    norm = o.vector(np.ones(512, np.float32))
    for n in (1, 16, 64, 100):
        x = o.array(normal(n, 512))

        def run(x: Any = x) -> Any:
            y = o.linear(x, w, norm, 1e-5)
            return o.network(y, gate_up, w, norm, 1e-5, SILU_MUL).values

        want = run().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        found.zero_()
        graph.replay()
        assert torch.equal(found, want)


def test_parts_of_several_types_with_bias_and_sum() -> None:
    kinds = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.F32, GGMLType.F16)
    parts = [part(kind, rows, 256) for kind, rows in zip(kinds, (40, 24, 3, 70), strict=True)]
    x, bias, into = normal(5, 256), normal(1, 137), normal(5, 137)
    found = []
    for ops in (cuda(), reference()):
        w, total = ops.pack(parts), ops.array(into)
        out = ops.linear(ops.array(x), w, bias=ops.vector(bias), into=total)
        assert out is total
        found.append(ops.numpy(out))
    close(*found, 2e-3)
    ids = np.array([0, 39, 40, 63, 64, 66, 67, 136], np.int32)
    close(*(o.numpy(o.embed(o.pack(parts), ids)) for o in (cuda(), reference())), 1e-3)


@pytest.mark.parametrize("act", [SILU_MUL, GELU_MUL])
@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16])
def test_activations_even_where_they_are_huge(act: int, kind: GGMLType) -> None:
    """act(gate) · up beyond 65,504: no float16 of it may become infinite."""
    gate_up, down = [part(kind, 192, 64)], [part(kind, 33, 96)]
    x = normal(4, 64) * np.array([[1], [50], [1000], [1e-4]], np.float32)
    got, want = (
        o.numpy(
            o.network(
                o.array(x), o.pack(gate_up), o.pack(down), o.vector(np.full(64, 50, np.float32)),
                1.0, act,
            )
        )
        for o in (cuda(), reference())
    )  # fmt: skip
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs, 2e-3 if kind is GGMLType.F16 else 1e-5)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = normal(4, 96)
    x[1, 5], x[2, 7] = np.nan, np.inf
    for kind in (GGMLType.F32, GGMLType.F16):
        out = cuda().numpy(cuda().linear(cuda().array(x), cuda().pack([part(kind, 8, 96)])))
        finite = np.isfinite(out).all(1).tolist()
        assert finite == [True, False, False, True]


def test_norms_gates_and_columns() -> None:
    x, gate, one = normal(6, 96), normal(6, 96, seed=1), normal(6, 1)
    weight = np.random.default_rng(2).uniform(0.5, 2, 96).astype(np.float32)
    found: list[list[Floats]] = []
    for o in (cuda(), reference()):
        mine, into = [], o.array(gate)
        o.add_norm(into, o.array(x), o.vector(weight), 1e-5)
        mine.append(o.numpy(into).copy())
        for first in (True, False):
            for group in (24, 96):
                for row in (weight, weight[:group]):
                    out = o.gated_norm(o.array(x), o.array(gate), o.vector(row), 1e-5, group, first)
                    mine.append(o.numpy(out).copy())
        mine.append(o.numpy(o.gate_sigmoid(o.array(x), o.array(gate))).copy())
        into = o.array(gate)
        o.add_gated(into, o.array(x), o.array(one))
        mine.append(o.numpy(into).copy())
        capped = o.array(x * 20)
        o.softcap(capped, 30.0)
        mine.append(o.numpy(capped).copy())
        mine.append(o.numpy(o.columns(o.array(x), 5, 30)).copy())
        mine.append(o.numpy(o.take_rows(o.array(x), np.array([4, 0, 4], np.int32))).copy())
        found.append(mine)
    for got, want in zip(*found, strict=True):
        close(got, want, 2e-6)


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0])
@pytest.mark.parametrize("normalize", [True, False])
def test_experts(kind: GGMLType, normalize: bool) -> None:
    n_experts, used, ffn, cols = 8, 3, 64, 96
    router = [part(GGMLType.F32, n_experts, cols)]
    ups = [part(kind, ffn, cols, seed=i) for i in range(2 * n_experts)]
    downs = [part(kind, cols, ffn, seed=i + 50) for i in range(n_experts)]
    norm = np.ones(cols, np.float32)
    for n in (1, 5, 90) if GPU else (3,):
        x, into = normal(n, cols), normal(n, cols, seed=3)
        found = []
        for o in (cuda(), reference()):
            total = o.array(into)
            o.experts(
                o.array(x), o.pack(router), o.pack(ups), o.pack(downs), used, norm=o.vector(norm),
                eps=1e-5, normalize=normalize, scale=2.5, into=total,
            )  # fmt: skip
            found.append(o.numpy(total).copy())
        tolerance = 1e-5 if kind is GGMLType.F32 else 3e-3
        close(*found, tolerance)
        here, there = cuda(), reference()
        for first, last in ((here, there), (there, here), (here, here)):  # halves, on two devices
            halves = first.experts_in(
                first.array(x), first.pack(router), first.pack(ups), used, norm=first.vector(norm),
                eps=1e-5, normalize=normalize, scale=2.5,
            )  # fmt: skip
            chosen, middle = (cross(each, first, last) for each in halves)
            total = last.array(into)
            last.experts_out(middle, chosen, n_experts, last.pack(downs), total)
            close(last.numpy(total), found[1], tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_K])
def test_experts_have_one_result_per_token(kind: GGMLType) -> None:
    o, n_experts, ffn, cols = cuda(), 8, 256, 512 if kind is GGMLType.Q4_K else 96
    router = o.pack([part(GGMLType.F32, n_experts, cols)])
    ups = o.pack([part(kind, ffn, cols, seed=i) for i in range(2 * n_experts)])
    downs = o.pack([part(kind, cols, ffn, seed=i + 50) for i in range(n_experts)])
    norm, x = o.vector(np.ones(cols, np.float32)), normal(200, cols)

    def run(rows: Floats) -> Floats:
        total = o.array(rows)
        o.experts(
            total, router, ups, downs, 2, norm=norm, eps=1e-5, normalize=True, scale=1.0, into=total
        )
        return o.numpy(total)

    whole = run(x)
    for n in (1, 7):
        same_bits(run(x[:n]), whole[:n])


def test_of_equal_experts_the_lower_number_is_chosen() -> None:
    o, cols = cuda(), 32
    router = o.pack([(0, 4, cols, np.zeros(4 * cols * 4, np.uint8))])
    blocks = [np.full((cols, 2 * cols), i, np.float32) for i in range(4)]
    ups = o.pack([part(GGMLType.F32, 2 * cols, cols, seed=i % 4) for i in range(8)])
    downs = o.pack([(0, cols, 2 * cols, b.view(np.uint8).ravel()) for b in blocks])
    into = o.array(np.zeros((1, cols), np.float32))
    o.experts(
        o.array(normal(1, cols)), router, ups, downs, 1, norm=o.vector(np.ones(cols, np.float32)),
        eps=1e-5, normalize=True, scale=1.0, into=into,
    )  # fmt: skip
    assert np.array_equal(o.numpy(into), np.zeros((1, cols)))  # expert 0 makes zeros


def test_matrices_may_lie_in_one_piece_of_memory() -> None:
    """The same bits wherever they lie, and the piece goes with the last of them."""
    o, x = cuda(), cuda().array(normal(3, 96))
    kinds = [GGMLType.F32, GGMLType.Q8_0, GGMLType.BF16, GGMLType.Q4_K] if GPU else [GGMLType.F32]
    parts = [[part(kind, 33, 256 if kind is GGMLType.Q4_K else 96)] for kind in kinds]
    alone = [o.pack(each) for each in parts]
    before = o.machine.reserved
    o.expect(sum(w.nbytes for w in alone))
    together = [o.pack(each) for each in parts]
    starts = [segment.q.data_ptr() for w in together for segment in w.segments]
    assert (
        len({segment.q.untyped_storage().data_ptr() for w in together for segment in w.segments})
        == 1
    )
    assert starts == sorted(starts) and all(start % 16 == 0 for start in starts)
    more = o.pack(parts[0])  # behind what was expected
    o.trim()
    for one, other in zip([*together, more], [*alone, alone[0]], strict=True):
        if one.cols == 96:
            same_bits(o.numpy(o.linear(x, one)), o.numpy(o.linear(x, other)))
    del together, more, one
    o.trim()
    assert o.machine.reserved <= before + (4 << 20)


def test_no_rows_and_mistakes() -> None:
    o = cuda()
    w = o.pack([part(GGMLType.F32, 8, 32)])
    assert o.linear(o.array(np.empty((0, 32), np.float32)), w).shape == (0, 8)
    with pytest.raises(Refused, match="32 columns are needed"):
        o.linear(o.array(normal(2, 31)), w)
    with pytest.raises(Refused, match="into must be"):
        o.linear(o.array(normal(2, 32)), w, into=o.array(normal(2, 9)))
    with pytest.raises(Refused, match="an id outside 8 rows"):
        o.embed(w, np.array([8], np.int32))
    with pytest.raises(Refused, match="parts of several widths"):
        o.pack([part(GGMLType.F32, 8, 32), part(GGMLType.F32, 8, 64)])
    with pytest.raises(Refused, match="ggml type 99"):
        o.packed_bytes([(99, 8, 32)])
