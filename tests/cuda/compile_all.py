"""Triton's kernels as they are launched, compiled for a GPU that is not there.

    python tests/cuda/compile_all.py ARCHITECTURE

The interpreter takes what the compiler refuses: a name that has two shapes, say. So the operations
run as on a GPU, with every launch ending where its kernel is compiled.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.ops import Draw, Heads, Rope
from quire.ops.cuda import CudaOps, Machine, attend_native, attention, drawing
from quire.ops.cuda.stage import Stage
from tests.cuda import pages_rig, sides
from tests.cuda import test_cuda_every as every
from tests.cuda.played import played


class Nowhere:
    """A driver of an architecture, without a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Every launch ends where its kernel is compiled."""
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = only_compile  # type: ignore[method-assign]
    attend_native.takes = lambda *_: False  # here it is Triton's turn
    driver.set_active(Nowhere())  # type: ignore[arg-type]
    with played(run=True) as (ops, found):
        machine: Any = ops.machine
        machine.hopper, machine.launches_ahead = False, int(sys.argv[1]) >= 90
        sides.cuda = pages_rig.cuda = lambda: ops  # type: ignore[assignment]
        for case in (every.products, every.networks, every.by_library, every.experts, every.rows):
            case(ops)
        _attend()
        every.pages(ops)
        _sample(ops)
    print(*sorted(name.replace(" ", "/") for name in found))


def _attend() -> None:
    """Every kind of K and V, and dimensions that differ and are no powers of two."""
    norms = np.ones((2, 64), np.float32)
    kinds, plain = ("f16", "f32", "q8_0", "q4_0"), Heads(6, 2, 64, 64, scale=0.125)
    cases: list[tuple[Heads, str, str, Rope | None, Any]] = [
        (replace(plain, head_dim_v=96), k, v, None, (None, None))
        for k, v in product(kinds, kinds) if kinds.index(v) in (kinds.index(k), 0)
    ]  # fmt: skip
    for neox in (False, True):
        rope = pages_rig.full_rope(64, neox, 32)
        cases.append((replace(plain, softcap=30.0, window=9), "bf16", "bf16", rope, norms))
    cases.append((Heads(32, 8, 128, 128, scale=0.1), "f16", "f16", None, (None, None)))
    for heads, k, v, rope, weights in cases:
        rig = pages_rig.Rig(heads, k, v, rope=rope, norms=tuple(weights))
        for work in ([(0, 1), (1, 1)], [(0, 80), (1, 1)]):
            step = rig.tables.add(work)
            rig.got.run(step, rig.values(len(step[1])))
            cols = heads.n_heads * heads.head_dim_k
            rig.got.run(step, rig.values(len(step[1]))[:, :cols].copy(), store=False)
    attention.spans_at_once = lambda *_: 2  # in waves
    step = rig.tables.add([(0, 200)])
    rig.got.run(step, rig.values(200))


def _sample(ops: CudaOps) -> None:
    """Everything that a sampler can ask for, and what is told of tokens."""
    x = torch.zeros(2, 5000)
    one = ops.sampler(
        0.8, 40, 0.9, 0.1, 1.1, 0.1, 0.1, np.ones(1, np.int32), np.ones(1, np.float32)
    )
    one.observe(np.ones(1, np.int32))
    draws = [Draw(one, 0.1), None]
    choice = drawing.Choice.of(draws)
    columns = drawing.columns_of(ops.machine, draws, choice, 2, 5000)
    chances, edits = choice.given([ops.machine.upload(column) for column in columns])
    assert chances is not None and edits is not None
    drawing.edit(x, edits, edits.news)
    for each in (choice, drawing.Choice()):
        ids = drawing.drawing(ops.machine, x, each, chances)
    stage = Stage(Machine(None), 8, 2, 1 + 2 * 128)
    for told in (0, 8, 128):
        stage.give(ids, drawing.report(ops.machine, x, ids, told))


if __name__ == "__main__":
    main()
