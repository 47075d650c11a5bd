"""Every kernel once at small shapes, for `sanitize.sh`: what it gives is what the reference gives.

Without a GPU the kernels that are chosen by it are chosen all the same, and none may be left out:
a new one needs a case here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.ops import SILU_MUL, Heads
from quire.ops.cuda import CudaOps, prompts, recur_native
from quire.ops.cuda.steps import Steps
from quire.ops.reference.sampling import Sampling
from quire.weights.quant import GGMLType
from tests.cuda import test_cuda_choices as choices
from tests.cuda.launches import HOST_ONLY, native_kernels, recording, triton_kernels, wanted
from tests.cuda.pages_rig import Rig, Side, full_rope
from tests.cuda.played import played
from tests.cuda.sides import GPU, close, cuda, reference
from tests.cuda.test_cuda_products import normal, part
from tests.cuda.test_cuda_recurrent import CASES as LAYERS
from tests.cuda.test_cuda_recurrent import Side as Recurrent
from tests.cuda.test_cuda_recurrent import inputs
from tests.cuda.test_cuda_sampling import random_logits, sampler

Found = Sequence[NDArray[Any]]
F16, F32, BF16, Q8, Q4K = (
    GGMLType.F16, GGMLType.F32, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_K,
)  # fmt: skip


def products(o: Any) -> Found:
    """Of few, some and many tokens; in slices and whole; of one format and of two."""
    found = []
    for kinds, rows, cols in (
        ((Q8,), 48, 256), ((BF16,), 48, 64), ((F32,), 48, 96), ((Q8, Q4K), 35, 256),
        ((F16,), 35, 256),
    ):  # fmt: skip
        w = o.pack([part(kind, rows, cols) for kind in kinds])
        for n in (2, 16, 70):
            x, norm = normal(n, cols), o.vector(np.full(cols, 0.5, np.float32))
            found += [
                o.numpy(o.linear(o.array(x), w)),
                o.numpy(o.linear(o.array(x), w, norm, 1e-5)),
            ]
    ids = np.array([3, 34], np.int32)
    return [*found, o.numpy(o.embed(w, ids))]


def networks(o: Any) -> Found:
    """Gate and up in one product; of widths that no kernel of ours takes too."""
    found = []
    for kind, cols in ((Q8, 64), (BF16, 64), (F16, 96)):
        gate_up, down = o.pack([part(kind, 256, cols)]), o.pack([part(kind, cols, 128)])
        norm = o.vector(np.full(cols, 0.1, np.float32))
        for n in (2, 16, 70):
            x = o.array(normal(n, cols))
            o.network(x, gate_up, down, norm, 1e-5, SILU_MUL, into=x)
            # Who reads a sum of slices first adds them.
            found += [o.numpy(o.linear(x, gate_up, norm, 1e-5)), o.numpy(x)]
    return found


def by_library(o: Any) -> Found:
    """As on GPUs before Hopper, if batches need not be exact; without the library's own kernels."""
    gate_up, down = o.pack([part(BF16, 64, 64)]), o.pack([part(BF16, 64, 32)])
    norm, x = o.vector(np.ones(64, np.float32)), o.array(normal(70, 64))
    if not isinstance(o, CudaOps):
        return [o.numpy(o.network(x, gate_up, down, norm, 1e-5, SILU_MUL))]

    def multiplied(a: Any, b: Any) -> Any:
        return (a.float()[:, :, None] * b.float()).sum(1).to(a.dtype)

    with (
        mock.patch.object(type(o.machine), "hopper", False),
        mock.patch.object(o, "exact_batches", False),
        mock.patch.object(o, "_library", lambda *_: False),
        mock.patch.object(torch, "mm", multiplied),
    ):
        return [o.numpy(o.network(x, gate_up, down, norm, 1e-5, SILU_MUL))]


def experts(o: Any) -> Found:
    """In CUDA C++ and in Triton."""
    found = []
    for kind, cols in ((Q8, 64), (F16, 96)):
        norm, x = o.vector(np.ones(cols, np.float32)), o.array(normal(5, cols))
        ups = o.pack([part(kind, 32, cols, seed=i) for i in range(8)])
        downs = o.pack([part(kind, cols, 32, seed=i + 9) for i in range(4)])
        router = o.pack([part(F32, 4, cols)])
        o.experts(x, router, ups, downs, 2, norm=norm, eps=1e-5, normalize=True, scale=1.0, into=x)
        found.append(o.numpy(x))
    return found


def rows(o: Any) -> Found:
    """Norms that no product takes."""
    x, gate, weight = o.array(normal(3, 96)), o.array(normal(3, 96, seed=1)), normal(96)
    o.add_norm(x, gate, o.vector(weight), 1e-5)
    return [o.numpy(x), o.numpy(o.gated_norm(x, gate, o.vector(weight), 1e-5, 24, True))]


def attention(o: Any) -> Found:
    """Prompts and single tokens, of rows in 16 bits and in blocks; for products in 16 bits too."""
    found = []
    for kind, dims in (("f16", 128), ("q8_0", 64)):
        rig = Rig(Heads(8, 2, dims, dims, scale=0.1), kind, kind, rope=full_rope(dims), align=256)
        side, w = Side(o, rig), o.pack([part(BF16, 32, 8 * dims)])
        for work in ([(0, 140), (1, 3)], [(0, 1), (1, 1)], [(0, 20), (1, 1)]):
            view, positions, rows = step = rig.tables.add(work)
            qkv, table = rig.values(len(rows)), o.rope_table(side.rope, positions)
            with mock.patch.object(prompts, "_BLOCKS", 1 if work[0][1] > 20 else 1 << 30):
                found.append(side.run(step, qkv))
                there = o.pages(view, side.bytes.base, positions, rows)
                out = o.attention(o.array(qkv), side.heads, there, table, *side.offsets)
                found.append(o.numpy(o.linear(out, w)))
    return found


def pages(o: Any) -> Found:
    """Tokens that are turned, moved and copied."""
    rig = Rig(Heads(2, 1, 64, 32, scale=0.2), "f16", "f16", rope=full_rope(64))
    side, (k, v) = Side(o, rig), rig.offsets
    side.run(rig.tables.add([(0, 20)]), rig.values(20))
    first, second, other = (
        np.array([page], np.int32) for page in (*rig.tables.tables[0], rig.tables.free.pop())
    )
    base, size, at = side.bytes.base, rig.page_bytes, [np.array([each]) for each in (k, v)]
    by, slot = np.full((1, 16), 3, np.int32), np.array([3], np.int32)
    o.rotate_pages(side.heads, side.rope, base, size, 16, first, by, at[0])
    o.move_tokens(side.heads, base, size, 16, first, slot, second, slot, *at)
    o.copy_pages(base, size, first, other)
    rig.tables.tables[0][0] = int(other[0])
    return [side.run(rig.tables.add([(0, 1)]), rig.values(1))]


def recurrent(o: Any) -> Found:
    """Prompts, single tokens and folds; in CUDA C++ and in Triton."""
    found = []
    for case in ("delta", "odd delta"):
        side = Recurrent(o, LAYERS[case])
        cols = side.layer.in_cols
        found.append(side.run([(-1, 0, -1, 0, 0, 2)], [9], inputs(9, cols)))
        if isinstance(o, CudaOps):  # what logs have besides raw inputs, once more
            _derive(o, side)
        with mock.patch.object(recur_native, "_each", lambda parts, *_: parts):  # all in a block
            found.append(side.run([(0, -1, 0, 2, 0, 0)], [1], inputs(1, cols)))
        side.fold(0, 0, 3, 3)
        found.append(side.run([(3, -1, -1, 0, 3, 0)], [1], inputs(1, cols)))
    return found


def _derive(o: CudaOps, side: Recurrent) -> None:
    pages = [np.array([each], np.int32) for each in (0, 0, 2)]
    o.derive(
        [side.layer], [(side.state_at, side.log_at)], side.states.base, 2 * side.state_at,
        side.logs.base, 2 * side.log_at, side.stride, *pages,
    )  # fmt: skip


def samples(o: Any) -> Found:
    """Cuts, penalties, bias and log-probabilities."""
    x, ids = random_logits(3, 1100), np.array([7, 8, 9], np.int32)
    wish = Sampling(0.9, 40, 0.9, 0.01, 1.2, 0.4, 0.3, ((7, 3.0),))
    mine = [sampler(o, wish, {5: 2}) for _ in x]
    drawn = o.sample(o.array(x), np.arange(3, dtype=np.int32), mine, np.array([0.1, 0.5, 0.9]))
    chosen, likely, theirs = o.logprobs(o.array(x), ids, 5)
    marked = np.eye(1100, dtype=np.float32)  # so that every other token is far off
    return [marked[drawn], marked[likely], chosen, theirs]


CHOSEN: list[Callable[[Any], Found]] = [
    products, networks, by_library, experts, rows, attention, recurrent,
]  # fmt: skip
"""Whose kernels a GPU chooses otherwise than the interpreter."""
SAME: list[Callable[[Any], Found]] = [pages, samples]


@pytest.mark.parametrize("case", [*CHOSEN, *SAME] if GPU else SAME)
def test_every_kernel_gives_what_the_reference_gives(case: Callable[[Any], Found]) -> None:
    for got, want in zip(case(cuda()), case(reference()), strict=True):
        close(got, want, 2e-2)


def test_steps_that_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is recorded, compute-sanitizer cannot have each tensor in memory of its own."""
    monkeypatch.setattr(Steps, "_replay", Steps._body)
    table = choices.Table()
    for late in (False, True, True):
        table.step([2, 5], late)
    table.read()


def test_lists_of_kernels_are_whole() -> None:
    launched, uncalled = triton_kernels()
    assert launched == uncalled, "what no other kernel calls is launched, and nothing else"
    assert launched >= HOST_ONLY and len(native_kernels()) >= 21 and len(launched) >= 38


@pytest.mark.skipif(GPU, reason="there is a GPU: sanitize.sh writes down what it launches")
def test_no_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with played() as (ops, chosen):
        for case in CHOSEN:
            case(ops)
    with recording() as same:
        for case in SAME:
            case(cuda())
        test_steps_that_are_not_recorded(monkeypatch)
    assert not wanted() - chosen - same, "each needs a case above, for compute-sanitizer to see it"
    assert not chosen & HOST_ONLY, "launched on a GPU after all"
