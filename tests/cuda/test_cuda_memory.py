"""Memory's own suites over a GPU's backing: the conformance of every kind, the random machine.

Their stand-ins for kernels write bytes by address, which only the host can do. So a mirror on the
host is what they see, and every byte that memory itself reads, fills or writes goes through the
GPU: one that is read where nothing is mapped, or left behind, shows as a wrong number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.devices.budget import Budget
from quire.devices.cuda import CudaBacking, CudaDevice
from quire.devices.device import Backing, Bytes, Ids

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
pytest.importorskip("hypothesis")
import fake_kernel
import fake_kinds
import test_memory_kinds as conformance
import test_memory_kinds_stateful as stateful

pytestmark = pytest.mark.gpu
GRANULE = 2 << 20
SCALE = GRANULE // 4096
"""The suites think in granules of 4,096 bytes: all sizes are that much larger."""
NOTHING = 0xEE


class Mirrored(CudaBacking):
    """A GPU's range with a mirror, whose address is the one that is told."""

    def __init__(self, machine: Any, page_bytes: int, max_pages: int, demand_paged: bool) -> None:
        super().__init__(machine, page_bytes, max_pages, demand_paged)
        self._on_gpu = self.base
        self._mirror = np.zeros((max_pages, page_bytes), np.uint8)
        self.base = self._mirror.ctypes.data

    @contextmanager
    def _real(self) -> Iterator[None]:
        mirror, self.base = self.base, self._on_gpu
        try:
            yield
        finally:
            self.base = mirror

    def back(self, low: int, high: int) -> None:
        with self._real():
            super().back(low, high)

    def give_back(self, low: int, high: int) -> None:
        with self._real():
            super().give_back(low, high)
        self._mirror.reshape(-1)[low * GRANULE : high * GRANULE] = NOTHING

    def read(self, pages: Ids) -> list[Bytes]:
        ids = [int(page) for page in pages]
        with self._real():
            with super().writing(ids) as rows:
                for row, page in zip(rows, ids, strict=True):
                    row[:] = self._mirror[page]
            for row, page in zip(super().read(ids), ids, strict=True):
                assert (row == self._mirror[page]).all()
        return [self._mirror[page] for page in ids]

    @contextmanager
    def writing(self, pages: Ids) -> Iterator[list[Bytes]]:
        ids = [int(page) for page in pages]
        with self._real(), super().writing(ids) as rows:
            yield rows
            for row, page in zip(rows, ids, strict=True):
                self._mirror[page] = row

    def fill(self, pages: Ids, byte: int) -> None:
        with self._real():
            super().fill(pages, byte)
        self._mirror[[int(page) for page in pages]] = byte

    def close(self) -> None:
        with self._real():
            super().close()


class Device(CudaDevice):
    """A GPU whose kernels are the suites' stand-ins."""

    def __init__(self, budget: Budget, name: str = "cpu") -> None:
        super().__init__(budget, fake_kernel.FakeOps(), granule=GRANULE)  # type: ignore[arg-type]
        self.name = name  # as the suites call it

    def _backing(self, page_bytes: int, max_pages: int, demand_paged: bool) -> Backing:
        return Mirrored(self.machine, page_bytes, max_pages, demand_paged)


def scaled(
    kind: str, page_tokens: int = 4, head_dim: int = 2, state_bytes: int = 16, limit: int = 1 << 20,
    max_tokens: int | None = None, budget: Budget | None = None,
) -> Any:  # fmt: skip
    sizes = head_dim * SCALE, state_bytes * SCALE, limit * SCALE
    return _plain(kind, page_tokens, *sizes, max_tokens, budget)


_plain = fake_kinds.make_kind


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites' memory lies on the GPU."""
    for module in (fake_kernel, fake_kinds):
        monkeypatch.setattr(module, "make_device", Device)
    for module in (conformance, stateful):
        monkeypatch.setattr(module, "make_kind", scaled)


@pytest.mark.parametrize("kind", fake_kinds.KINDS)
def test_random_operations(kind: str) -> None:
    stateful.run(kind, examples=4, steps=25)


class _At:
    """A page, as torch takes it over."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "strides": None,
            "version": 3,
        }  # fmt: skip


def test_pages_leave_and_come_back_while_the_gpu_computes() -> None:
    """A copy sees what was told before it, and nothing of what is told after."""
    import torch

    from quire.devices.copier import Copier
    from quire.memory.pages.pool import PagePool
    from quire.memory.tiers.pinned import PinnedTier
    from tests.cuda.sides import cuda

    device = CudaDevice(Budget(1 << 30), cuda())  # type: ignore[arg-type]
    copier: Copier = device.copier  # type: ignore[assignment]
    size, n = 4 << 20, 8
    pool, tier = PagePool("pages", size, 64, device), PinnedTier(copier, 1 << 30)
    ids = pool.allocate(n)

    def page(i: int) -> Any:
        return torch.as_tensor(_At(pool.bytes.base + int(i) * size, size), device="cuda")

    for value in range(3):
        torch.cuda._sleep(100_000_000)  # some 50 ms
        for i, at in enumerate(ids):
            page(at).fill_(10 * value + i)
        stored = tier.take(pool, ids)
        assert stored._copy.seconds() is None  # type: ignore[attr-defined]
        for at in ids:
            page(at).fill_(0xEE)  # whoever has the page next
        torch.cuda._sleep(100_000_000)
        others = pool.allocate(n)
        stored.bring(pool, others)
        stored.drop()
        again = tier.take(pool, ids)  # in the same rooms
        again.drop()
        sums = [int(page(at).to(torch.int64).sum()) for at in others]
        assert sums == [size * (10 * value + i) for i in range(n)]
        assert (np.stack(pool.bytes.read(ids)) == 0xEE).all()
        pool.release(others)
    torch.cuda.synchronize()
    speeds = tier.writing.bytes_per_s, tier.reading.bytes_per_s
    print(f"to the host {speeds[0] / 1e9:.1f} GB/s, back {speeds[1] / 1e9:.1f} GB/s")
    assert min(speeds) > 5e9
    tier.close()
    pool.release(ids)


# The conformance of every kind: its fixtures and its tests, as they are.
globals().update({
    name: thing for name, thing in vars(conformance).items()
    if name.startswith("test_") or name in ("kind", "memory", "moved")
})  # fmt: skip
