"""What the arena says it holds is what the process holds."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from quire.config import process_memory
from quire.ops import Array
from quire.ops.cpu import CpuOps
from tests.ops.devices import unless_sanitized

MB = 1 << 20
WIDTHS = (16, 64, 576, 1536, 4096)


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """No more than these bytes can be mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _round(ops: CpuOps, rng: random.Random) -> list[Array]:
    """Arrays of many shapes come and go, all of them written; some stay."""
    live: list[Array] = []
    for _ in range(200):
        live.append(ops.cpu.empty(rng.randrange(1, 300), rng.choice(WIDTHS)))
        ops.numpy(live[-1])[:] = 1
        if len(live) > 30:
            del live[rng.randrange(len(live))]
    return live[::5]


@unless_sanitized
def test_what_is_trimmed_goes_back_to_the_system() -> None:
    """Rounds of other shapes each: nothing of one is left in the next."""
    ops, rng = CpuOps(1), random.Random(3)
    live = _round(ops, rng)
    del live
    ops.trim()
    before = process_memory()
    for _ in range(8):
        live = _round(ops, rng)
        kept = ops.compute_bytes
        ops.trim()
        needed = sum(array.nbytes for array in live)
        assert needed <= ops.compute_bytes <= 1.25 * needed + 64 * len(live)
        assert ops.compute_bytes < kept
        assert process_memory() - before <= ops.compute_bytes + 2 * MB
        del live
    ops.trim()
    assert ops.compute_bytes == 0
    assert process_memory() - before <= 2 * MB


@unless_sanitized
def test_what_is_kept_is_used_again_and_bounded() -> None:
    """A shape that comes back takes nothing; shapes that change do not add up."""
    ops = CpuOps(1)
    address = ops.numpy(ops.cpu.empty(700, 100)).ctypes.data
    assert ops.numpy(ops.cpu.empty(700, 100)).ctypes.data == address
    for rows in range(1, 400):
        ops.cpu.empty(rows, 20000)
        assert ops.compute_bytes <= 160 * MB


@unless_sanitized
@pytest.mark.parametrize("cols", [1 << 10, 1 << 40, 1 << 62])
def test_an_array_that_cannot_be_had_is_not_counted(cols: int) -> None:
    """And one that can is given what is kept before it is refused."""
    ops = CpuOps(1)
    one = ops.array(np.ones((1000, 1000), np.float32))
    held = ops.compute_bytes
    with address_space(64 * MB):
        with pytest.raises(MemoryError):
            ops.cpu.empty(1 << 20, cols)
        assert ops.compute_bytes == held
        for rows in (9 << 10, 11 << 10, 13 << 10):  # each fits alone
            ops.cpu.empty(rows, 1 << 10)
    del one
    ops.trim()
    assert ops.compute_bytes == 0


@unless_sanitized
def test_a_matrix_that_cannot_be_packed_leaves_nothing() -> None:
    """The next one is packed as if nothing had been."""
    ops = CpuOps(2)
    rows = np.zeros((16384, 1024), np.float32)
    with address_space(32 * MB), pytest.raises(MemoryError):
        ops.pack([(0, *rows.shape, rows.view(np.uint8))])
    assert ops.compute_bytes == 0
    assert ops.pack([(0, *rows.shape, rows.view(np.uint8))]).nbytes == rows.nbytes
