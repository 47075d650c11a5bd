"""A GPU's memory: one range of addresses per pool, and slabs of memory mapped where pages are used.

    addresses   |slab|slab|    |slab|    |    |        reserved once, as long as the budget
    memory      |####|####|    |####|                  created and mapped by `back`, in granules

Addresses stay, so kernels and captured graphs keep them whatever is mapped behind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import numpy as np

from quire.devices.budget import Budget
from quire.devices.copier import Copier
from quire.devices.device import Backing, Bytes, Device, Draws, Ids, Int32, Steps
from quire.errors import BudgetError, RequestError
from quire.ops import Array, Drawn, Ops

GRANULE = 32 << 20
"""Bytes of a slab: a call to the driver costs the same for 2 MiB and for 64."""
_AHEAD = 4  # slabs that are mapped before they are needed: while the GPU computes
_STAGE = 32 << 20  # bytes on their way between host and GPU


def _runs(pages: Ids) -> Iterator[tuple[int, int, int]]:
    """Ids as (place in the list, first id, count), where ids count up."""
    ids = [int(page) for page in pages]
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield start, ids[start], i - start
            start = i


class CudaBacking(Backing):
    """A reserved range; granule i lies at base + i · granule and has memory while it is backed.

    The driver unmaps at once, also under a kernel that still runs, so giving back waits for the
    GPU first. It is rare: pools keep what they may use again.
    """

    def __init__(
        self, machine: CudaMachine, page_bytes: int, max_pages: int, demand_paged: bool
    ) -> None:
        self.gives_back = demand_paged
        self._machine, self._page_bytes = machine, page_bytes
        self.copier = machine.copier
        self._granule = machine.granule
        self._size = -(-max_pages * page_bytes // self._granule) * self._granule
        self._slabs: dict[int, int] = {}
        self.base = machine.reserve(self._size)
        if not demand_paged:
            try:
                self.back(0, self._size // self._granule)
            except MemoryError:
                machine.driver.free(self.base, self._size)
                raise

    def back(self, low: int, high: int) -> None:
        done: list[int] = []
        try:
            for granule in range(low, high):
                assert granule not in self._slabs, f"granule {granule} has memory already"
                address = self.base + granule * self._granule
                self._slabs[granule] = self._machine.map(address)
                done.append(granule)
        except MemoryError:
            self._unmap(done)
            raise

    def give_back(self, low: int, high: int) -> None:
        self._machine.wait()
        self._unmap(list(range(low, high)))

    def _unmap(self, granules: list[int]) -> None:
        for granule in granules:
            address = self.base + granule * self._granule
            self._machine.driver.unmap(address, self._granule, self._slabs.pop(granule))

    def read(self, pages: Ids) -> list[Bytes]:
        found: Bytes = np.empty((len(pages), self._page_bytes), np.uint8)
        self._machine.wait()
        for at, first, count in _runs(pages):
            self._machine.fetch(found[at : at + count], self.base + first * self._page_bytes)
        return list(found)

    @contextmanager
    def writing(self, pages: Ids) -> Iterator[list[Bytes]]:
        filled: Bytes = np.empty((len(pages), self._page_bytes), np.uint8)
        yield list(filled)
        self._machine.wait()
        for at, first, count in _runs(pages):
            self._machine.put(self.base + first * self._page_bytes, filled[at : at + count])

    def fill(self, pages: Ids, byte: int) -> None:
        self._machine.wait()
        for _, first, count in _runs(pages):
            address = self.base + first * self._page_bytes
            self._machine.driver.fill(address, byte, count * self._page_bytes)

    def close(self) -> None:
        self._machine.wait()
        self._unmap(list(self._slabs))
        self._machine.driver.free(self.base, self._size)


class CudaMachine:
    """One GPU: its driver, its stream, and the pinned memory that bytes pass through."""

    def __init__(self, index: int = 0, granule: int = GRANULE) -> None:
        self.driver, self._torch = _open(index)
        self.index = index
        least = self.driver.granularity
        self.granule = -(-granule // least) * least
        self._stage = self._torch.pinned(_STAGE)
        self.copier: Copier = _copier(self.driver, index)

    def reserve(self, size: int) -> int:
        """A range of addresses; MemoryError if there are not as many."""
        try:
            address: int = self.driver.reserve(size)
        except RuntimeError as error:
            raise MemoryError(f"the driver refuses {size:,} bytes of addresses: {error}") from error
        return address

    def map(self, address: int) -> int:
        """A granule of memory at an address; MemoryError if the GPU has none left."""
        try:
            handle: int = self.driver.map(address, self.granule)
        except RuntimeError as error:
            free, total = self.driver.free_bytes()
            raise MemoryError(
                f"the GPU has {free:,} of {total:,} bytes free and gives none: {error}"
            ) from error
        return handle

    def wait(self) -> None:
        """Until the GPU has done what it was told."""
        self._torch.wait(self.index)

    def fetch(self, into: Bytes, address: int) -> None:
        """Bytes of the GPU, through pinned memory."""
        flat = into.reshape(-1)
        for at in range(0, flat.size, _STAGE):
            size = min(_STAGE, flat.size - at)
            self.driver.fetch(self._stage.ctypes.data, address + at, size)
            flat[at : at + size] = self._stage[:size]

    def put(self, address: int, source: Bytes) -> None:
        """Bytes to the GPU, through pinned memory."""
        flat = source.reshape(-1)
        for at in range(0, flat.size, _STAGE):
            size = min(_STAGE, flat.size - at)
            self._stage[:size] = flat[at : at + size]
            self.driver.put(address + at, self._stage.ctypes.data, size)


class CudaDevice(Device):
    """A GPU under a budget, with its operations."""

    def __init__(
        self, budget: Budget, ops: Ops | None = None, index: int = 0, granule: int = GRANULE,
        exact_batches: bool = True,
    ) -> None:  # fmt: skip
        self.machine = CudaMachine(index, granule)
        self.granularity = self.machine.granule
        self.ahead = _AHEAD * self.granularity
        self.capacity = self.machine.driver.free_bytes()[1]
        self.copier = self.machine.copier
        super().__init__(f"cuda:{index}", budget, ops or _ops(index, exact_batches))

    def steps(self, model: Any, first: int = 0) -> Steps:
        return CudaSteps(self, model, first)

    def _backing(self, page_bytes: int, max_pages: int, demand_paged: bool) -> Backing:
        return CudaBacking(self.machine, page_bytes, max_pages, demand_paged)


class CudaSteps:
    """Whole steps as captured graphs; see `quire.ops.cuda.steps`."""

    def __init__(self, device: CudaDevice, model: Any, first: int) -> None:
        from quire.ops.cuda import steps

        self._device, self._group = device, steps.Group
        self._steps = steps.Steps(model, device.ops, first)

    @property
    def seconds_per_token(self) -> float:
        return float(self._steps.clock.seconds_per_token)

    @property
    def replayed(self) -> bool:
        return self._steps.replayed

    def forget(self) -> bool:
        return self._steps.forget()

    def run(
        self, tokens: Int32, positions: Int32, seq_rows: Int32, views: Mapping[str, Any],
        rows: Int32, draws: Draws, sources: Int32 | None, x: Array | None = None,
    ) -> tuple[Array, Drawn] | None:  # fmt: skip
        groups = {}
        for name, view in views.items():
            bound = self._device.bound(name)
            groups[name] = self._group(view, bound.bases, bound.layout.by_layer)
        return self._steps.run(tokens, positions, seq_rows, groups, rows, draws, sources, x)


def free_bytes(index: int = 0) -> tuple[int, int, bool]:
    """What a GPU has free now and in all, and whether that is the host's memory.

    What its driver and torch take for themselves is taken by then. BudgetError if
    what is left is not even one slab.
    """
    driver, machine = _open(index)
    free, total = driver.free_bytes()
    if free >= GRANULE:
        _wake(index)
        free, _ = driver.free_bytes()
    if free < GRANULE:
        raise BudgetError(
            f"cuda:{index} has {free:,} of {total:,} bytes free, and pages are taken in slabs of "
            f"{GRANULE:,}; end what else runs on this GPU, or use device='cpu'"
        )
    facts = machine.torch.cuda.get_device_properties(index)
    return free, total, bool(getattr(facts, "is_integrated", False))


def gpu_count() -> int:
    """GPUs that can be used: 0 without a driver, or without what computes on them."""
    if not all(find_spec(name) for name in ("torch", "triton")):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _wake(index: int) -> None:
    from quire.ops.cuda.waking import wake

    wake(index)


def _copier(driver: Any, index: int) -> Copier:
    from quire.ops.cuda.copies import CudaCopier

    return CudaCopier(driver, index)


def _ops(index: int, exact_batches: bool) -> Ops:
    from quire.ops.cuda import CudaOps, Machine

    ops = CudaOps(Machine(index))
    ops.exact_batches = exact_batches
    return cast(Ops, ops)


def _open(index: int) -> tuple[Any, Any]:
    """The driver of a GPU, and what torch does for it; refused in words where that cannot be."""
    try:
        from quire.ops.cuda import machine
    except ImportError as error:
        raise RequestError(
            f"device='cuda' needs PyTorch and Triton ({error}); install quire[cuda], or use "
            "device='cpu'", param="device",
        ) from error  # fmt: skip
    if (missing := machine.missing(index)) is not None:
        raise RequestError(missing, param="device")
    from quire.ops.cuda.driver import Driver

    return Driver(index), machine
