"""A GPU's memory: taken where it is needed, given back, and read and written through the host."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from quire.config import LoadConfig
from quire.devices.budget import Budget
from quire.devices.cuda import CudaDevice, free_bytes, gpu_count
from quire.errors import OutOfMemory, RequestError
from quire.memory.batch import SeqTokens
from quire.memory.build import build_memory
from quire.memory.groups.layout import GroupSpec
from tests.cuda.sides import GPU, cuda

MIB = 1 << 20
GRANULE = 2 << 20
SLACK = 4 << 20  # what the driver takes for a kernel it loads meanwhile


def free() -> int:
    import torch

    torch.cuda.synchronize()
    found: int = torch.cuda.mem_get_info()[0]
    return found


@pytest.mark.gpu
def test_bytes_come_and_go() -> None:
    device = CudaDevice(Budget(1 << 36), cuda(), granule=GRANULE)
    size = 300_032  # no multiple of a granule
    before = free()
    backing = device.backing("pool", size, 1 << 16, True)  # 19 GB of addresses
    assert before - free() <= SLACK
    backing.back(0, 40)
    assert abs(before - free() - 40 * GRANULE) <= SLACK
    rng = np.random.default_rng(0)
    pages = [0, 1, 2, 7, 20, 26]
    data = rng.integers(0, 256, (6, size)).astype(np.uint8)
    with backing.writing(pages) as rows:
        for row, bytes in zip(rows, data, strict=True):
            row[:] = bytes
    np.testing.assert_array_equal(np.stack(backing.read(pages)), data)
    device.ops.copy_pages(
        backing.base, size, np.array([1, 7], np.int32), np.array([3, 8], np.int32)
    )
    np.testing.assert_array_equal(np.stack(backing.read([3, 8])), data[[1, 3]])
    backing.fill([1, 2, 20], 0xAB)
    now = backing.read(pages)
    assert (np.stack([now[1], now[2], now[4]]) == 0xAB).all()
    np.testing.assert_array_equal(np.stack([now[0], now[3], now[5]]), data[[0, 3, 5]])
    backing.give_back(10, 40)
    assert abs(before - free() - 10 * GRANULE) <= SLACK
    backing.back(12, 13)
    np.testing.assert_array_equal(backing.read([0])[0], data[0])
    device.drop_backing("pool")
    assert before - free() <= SLACK


@pytest.mark.gpu
def test_what_cannot_be_had_changes_nothing() -> None:
    device = CudaDevice(Budget(1 << 40), cuda())
    backing = device.backing("pool", 1 << 20, 1 << 18, True)  # 256 GiB of addresses
    before = free()
    with pytest.raises(MemoryError, match=r"bytes free"):
        backing.back(0, 1 << 13)
    assert abs(before - free()) < 64 << 20
    backing.back(0, 2)
    device.drop_backing("pool")
    with pytest.raises(MemoryError):
        device.backing("all", 1 << 20, 1 << 18, False)
    assert abs(before - free()) < 64 << 20


@pytest.mark.gpu
def test_mapped_bytes_follow_a_burst_up_and_down_within_the_budget() -> None:
    budget = Budget(1 << 30)
    device = CudaDevice(budget, cuda(), granule=GRANULE)
    before = free()  # pages are 1.5 MiB: they share granules
    spec = GroupSpec("kv", "attention", tuple(range(24)), 8, 128, 128)
    memory = build_memory([spec], device, LoadConfig(), {}, n_ctx=16_384)

    def mapped() -> int:
        """Bytes that the driver has given, which are those that the budget was told of."""
        found = before - free()
        assert abs(found - budget.used) <= SLACK and budget.used <= budget.limit
        memory.audit()
        return found

    def grown(seq: int, tokens: int) -> None:
        with memory.reserve([SeqTokens(seq, np.zeros(tokens, np.int32))]) as lease:
            lease.commit({seq: tokens})
        memory.back_ahead()

    first = memory.seq_new()
    grown(first, 64)
    start = mapped()
    assert start <= 4 * 1.5 * MIB + device.ahead + 2 * GRANULE
    burst = []
    with pytest.raises(OutOfMemory):
        while True:
            burst.append(memory.seq_new())
            grown(burst[-1], 600)
            mapped()
    assert mapped() > budget.limit - 100 * MIB and len(burst) > 10
    memory.checkpoint_save(burst[0], "kept")
    for seq in burst:
        memory.seq_free(seq)
    assert mapped() <= start + 60 * MIB  # what the checkpoint holds
    memory.checkpoint_delete("kept")
    assert mapped() <= start + SLACK
    memory.seq_free(first)
    assert mapped() <= SLACK
    memory.close()


@pytest.mark.gpu
def test_there_is_no_such_gpu() -> None:
    with pytest.raises(RequestError, match="there is no GPU 99"):
        CudaDevice(Budget(1 << 30), index=99)
    free, total, integrated = free_bytes()
    assert 1 << 30 < free <= total and not integrated
    assert gpu_count() >= 1


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_the_reason_is_said() -> None:
    with pytest.raises(RequestError, match="device='cpu'"):
        CudaDevice(Budget(1 << 30))


def test_importing_quire_imports_no_torch() -> None:
    code = "import sys, quire, quire.devices.cuda; print({'torch', 'triton'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
