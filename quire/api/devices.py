"""Which devices a model may be on, and how many of their bytes it may take."""

from __future__ import annotations

from dataclasses import replace

from quire.config import LoadConfig, available_memory
from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.errors import RequestError
from quire.memory.tiers.pinned import PinnedTier
from quire.memory.tiers.tiers import Tier
from quire.ops import Refused
from quire.placement.described import CODE, Described, described, kind_of

HOST = "cpu"


def find_devices(settings: LoadConfig) -> list[Described]:
    """The devices that the settings ask for, as they are now; the last one is the host.

    `device="reference"` alone is a host of its own: only with n_gpu_layers is it one beside it.
    So are parts of the host under other names, such as cpu:1, each with threads and a budget.
    """
    names = ["cuda:0" if name == "cuda" else name for name in settings.device.split(",")]
    if names == ["reference"] and settings.n_gpu_layers == "auto":
        return [_described("reference", settings)]
    if names == ["auto"]:
        names = _gpus() if settings.activations != "f32" else []  # GPUs compute with 16 bits
    beside = [name for name in names if name not in (HOST, "auto")]
    if len(set(beside)) < len(beside):
        raise RequestError(f"device {settings.device!r:.80} names a device twice")
    if settings.n_gpu_layers == 0:
        beside = []
    return [_described(name, settings) for name in [*beside, HOST]]


def _described(name: str, settings: LoadConfig) -> Described:
    kind = kind_of(name)
    if kind == "cuda":
        from quire.devices.cuda import free_bytes

        free, total, integrated = free_bytes(_index(name))
        # It was asked: its context is there, the code of kernels is not.
        found = replace(described(name, free, total, integrated), libraries=CODE)
    else:
        found = described(name, available_memory(), unified=name != HOST)
        found = replace(found, margin=max(found.free - settings.budget_bytes(name), 0))
    return within_budget(found, settings)


def within_budget(one: Described, settings: LoadConfig) -> Described:
    """A device of which only so much may be taken, where the settings say that."""
    asked = settings.asked_bytes(one.name)
    if asked is None:
        return one
    # Margin, libraries and graphs are not of it.
    return replace(one, free=asked, margin=0, libraries=0, graphs=0, asked=True, real=one.free)


def _gpus() -> list[str]:
    from quire.devices.cuda import gpu_count

    return [f"cuda:{i}" for i in range(gpu_count())]


def _index(name: str) -> int:
    return int(name.partition(":")[2] or 0)


def budget_of(one: Described, settings: LoadConfig) -> Budget:
    """What a device may hold: what was asked for, or what it has free less a margin."""
    if one.kind == "cuda" and settings.asked_bytes(one.name) is None:
        return Budget(max(one.limit - one.libraries - one.graphs, 1))
    return Budget(settings.budget_bytes(one.name))


def device_of(one: Described, settings: LoadConfig, budget: Budget) -> Device:
    """A device that is there; only what it needs is imported."""
    if one.kind == "cuda":
        from quire.devices.cuda import CudaDevice

        return CudaDevice(budget, index=_index(one.name), exact_batches=settings.exact_batches)
    if one.kind == "reference":
        from quire.devices.reference import ReferenceDevice

        return ReferenceDevice(budget, one.name)
    from quire.devices.host import HostDevice
    from quire.ops.cpu import CpuOps

    try:
        ops = CpuOps(settings.thread_count(), exact=settings.activations == "f32")
    except Refused as error:
        raise RequestError(f"threads={settings.thread_count()}: {error}; pass fewer") from error
    return HostDevice(budget, ops, one.name)


def host_tier(device: Device, limit: int) -> list[Tier]:
    """The host's memory, for the pages of a device that has its own."""
    if device.copier is None or limit == 0:
        return []
    return [PinnedTier(device.copier, min(limit, available_memory() // 2))]
