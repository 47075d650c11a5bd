"""One token of each sequence: parity with the reference, and the bits of every other way.

Without a GPU the kernel in CUDA C++ runs on the host, a thread after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Heads
from quire.ops.cuda import attend_native
from quire.ops.cuda.attend_native import Cut
from quire.ops.cuda.attention import Attention
from quire.ops.cuda.paged import Paged, PageShape, page_columns, shape_of
from tests.cuda.host_kernels import COMPILER, HostNative
from tests.cuda.pages_rig import Rig, Work, full_rope
from tests.cuda.sides import GPU, close, same_bits

pytestmark = pytest.mark.skipif(not GPU and not COMPILER, reason="there is no C++ compiler")
LENGTHS = (1, 15, 64, 65, 127, 128, 129, 255, 256, 300) if GPU else (1, 130)
"""Before the token: on both sides of pages, of blocks and of spans."""
ALONE, EVERY = [(len(LENGTHS) - 1, 1)], [(seq, 1) for seq in range(len(LENGTHS))]
SHAPES = [
    (Heads(9, 3, 64, 64, scale=0.125, window=50), "f16", 64),
    (Heads(3, 1, 256, 256, scale=0.05, window=100), "f16", 16),
    (Heads(4, 1, 128, 128, scale=0.1), "f16", 32),
    (Heads(32, 8, 128, 128, scale=0.09), "f16", 16), (Heads(16, 8, 128, 128, scale=0.1), "f16", 32),
    (Heads(8, 2, 128, 128, scale=0.1, window=200), "bf16", 16),
    (Heads(16, 1, 64, 64, scale=0.1), "bf16", 16), (Heads(4, 4, 256, 256, scale=0.05), "bf16", 32),
]  # fmt: skip
CUTS = [
    Cut(2, 1, 1, 1), Cut(2, 1, 2, 2), Cut(2, 1, 9, 9), Cut(2, 1, 2, 4, rooms=2),
    *([Cut(1, 1, 9, 9), Cut(3, 1, 2, 2), Cut(2, 1, 3, 8, rooms=2)] if GPU else []),
]  # fmt: skip
HERE = SHAPES if GPU else SHAPES[:2]
TAKEN = attend_native.takes


@pytest.fixture(autouse=True)
def language() -> Iterator[None]:
    """CUDA C++ in every test."""
    if GPU:
        yield
        return
    host = HostNative(4)
    with (
        mock.patch.object(attend_native, "native", lambda _: host),
        mock.patch.object(attend_native, "takes", lambda *_: True),
    ):
        yield


def filled(
    heads: Heads, kind: str = "f16", size: int = 16, first: int = 0, rotates: int = 0
) -> Rig:
    """Sequences of all lengths, whose first pages may be gone."""
    dims = heads.head_dim_k
    norms = np.random.default_rng(3).uniform(0.5, 2, (2, dims)).astype(np.float32)
    rope = full_rope(dims, neox=not rotates, n_rot=rotates)
    rig = Rig(heads, kind, kind, size, rope, (norms[0], norms[1]))
    rig.tables.first = dict.fromkeys(range(len(LENGTHS)), first)
    step = rig.tables.add(list(enumerate(LENGTHS)))
    qkv = rig.values(sum(LENGTHS), 1)
    with mock.patch.object(Attention, "_attend"):  # keys and values are all that is wanted
        rig.got.run(step, qkv)
    rig.want.run(step, qkv)
    return rig


def check(rig: Rig) -> None:
    work: Work
    for i, work in enumerate((EVERY, ALONE, EVERY[::2])):
        step, qkv = rig.tables.add(work), rig.values(len(work), 7 + i)
        limit = 2e-3 if rig.type_k == "f16" else 1e-2
        close(rig.got.run(step, qkv), rig.want.run(step, qkv), limit)


@pytest.mark.parametrize("case", HERE)
def test_shapes(case: tuple[Heads, str, int]) -> None:
    check(filled(*case))


PLACES = [(48, 0), (100_000, 48)]


@pytest.mark.parametrize(("first", "rotates"), PLACES if GPU else PLACES[1:])
def test_places_and_rotations(first: int, rotates: int) -> None:
    check(filled(Heads(4, 2, 64, 64, scale=0.2), first=first, rotates=rotates))


def test_a_layer_without_norm_or_rotation() -> None:
    rig = Rig(Heads(4, 2, 64, 64, scale=0.1))
    for work in ([(0, 140 if GPU else 10)], [(0, 1)]):
        step, qkv = rig.tables.add(work), rig.values(work[0][1])
        close(rig.got.run(step, qkv), rig.want.run(step, qkv), 2e-3)


def test_a_token_that_is_stored_already() -> None:
    rig = filled(Heads(4, 2, 64, 64, scale=0.2))
    step, qkv = rig.tables.add(EVERY), rig.values(len(EVERY), 5)
    want, before = rig.got.run(step, qkv), rig.got.bytes.read()
    queries = np.ascontiguousarray(qkv[:, : 4 * 64])
    same_bits(rig.got.run(step, queries, store=False), want)
    np.testing.assert_array_equal(rig.got.bytes.read(), before)


def test_what_fills_a_graph_is_no_token() -> None:
    rig = filled(Heads(4, 2, 64, 64, scale=0.2))
    step, qkv = rig.tables.add(EVERY), rig.values(len(EVERY), 5)
    want, before = rig.got.run(step, qkv), rig.got.bytes.read()
    (view, positions, rows), ops, more = step, rig.got.ops, len(EVERY) + 3
    own = shape_of(view, positions)
    shape = PageShape(more, more, 2 * own.pages, 16, own.page_bytes, True, 0)
    columns = ops.machine.upload_all(page_columns(view, positions, rows, shape))
    assert rig.got.rope is not None
    table = ops.rope_table(rig.got.rope, np.append(positions, [0] * 3).astype(np.int32))
    given = ops.array(np.concatenate([qkv, rig.values(3, 8)]))
    pages = Paged(rig.got.bytes.base, shape, columns)
    out = ops.attention(given, rig.got.heads, pages, table, *rig.offsets)
    same_bits(ops.numpy(out)[: len(EVERY)], want)
    np.testing.assert_array_equal(rig.got.bytes.read(), before)


def ran(rig: Rig, step: Any, qkv: NDArray[np.float32], before: Any) -> list[NDArray[Any]]:
    """Outputs and pages, which start as they were."""
    rig.got.bytes.write(before)
    return [rig.got.run(step, qkv), rig.got.bytes.read()]


@pytest.mark.parametrize("case", HERE)
def test_how_work_is_cut_changes_no_bit(case: tuple[Heads, str, int]) -> None:
    """Nor does the language, where there is a GPU."""
    rig = filled(*case)
    step, qkv = rig.tables.add(EVERY), rig.values(len(EVERY), 5)
    before = rig.got.bytes.read()
    want = ran(rig, step, qkv, before)
    for cut in CUTS:
        with mock.patch.object(attend_native, "cut", lambda *_, cut=cut: cut):
            for _ in range(3 if GPU else 1):
                for got, same in zip(ran(rig, step, qkv, before), want, strict=True):
                    same_bits(got, same)
    if GPU:
        with mock.patch.object(attend_native, "takes", lambda *_: False):
            for got, same in zip(ran(rig, step, qkv, before), want, strict=True):
                same_bits(got, same)


@pytest.mark.gpu
def test_a_long_sequence_among_short_ones() -> None:
    """It is cut into blocks of its own, and joined in order."""
    heads, outs = Heads(8, 2, 128, 128, scale=0.1), []
    for taken in (True, False):
        rig = Rig(heads, page_tokens=128, rope=full_rope(128))
        rig.got.run(rig.tables.add([(0, 9000), (1, 3), (2, 500)]), rig.values(9503))
        with mock.patch.object(attend_native, "takes", TAKEN if taken else lambda *_: False):
            outs.append(rig.got.run(rig.tables.add([(0, 1), (1, 1), (2, 1)]), rig.values(3, 1)))
    same_bits(*outs)


@pytest.mark.gpu
def test_the_kernel_is_used() -> None:
    """Of what models have; a cap on scores, other types and rows are Triton's."""
    rig = Rig(Heads(32, 8, 128, 128, scale=0.1))
    machine, layer = rig.got.ops.machine, rig.got.heads
    assert attend_native.takes(machine, layer, 16)
    assert not attend_native.takes(machine, layer, 48)
    for other in (
        Rig(Heads(32, 8, 128, 128, scale=0.1), "q8_0", "q8_0"), Rig(Heads(4, 2, 96, 96, scale=1.0)),
        Rig(Heads(4, 2, 64, 64, scale=1.0, softcap=20.0)), Rig(Heads(40, 1, 64, 64, scale=1.0)),
        Rig(Heads(4, 2, 64, 64, scale=1.0), "f16", "bf16"),
    ):  # fmt: skip
        assert not attend_native.takes(machine, other.got.heads, 16)
