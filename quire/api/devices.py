"""Which device a model runs on, and how many of its bytes it may take."""

from __future__ import annotations

from quire.config import LoadConfig, available_memory
from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.errors import RequestError
from quire.memory.tiers.pinned import PinnedTier
from quire.memory.tiers.tiers import Tier
from quire.ops import Refused


def budget_of(settings: LoadConfig) -> Budget:
    """The byte budget: what was asked for, or what the device has free, less a margin."""
    if settings.gpu is not None and settings.memory_budget is None:
        from quire.devices.cuda import default_budget

        return Budget(default_budget(settings.gpu))
    return Budget(settings.budget_bytes())


def device_of(settings: LoadConfig, budget: Budget) -> Device:
    """The device that the settings ask for; only what it needs is imported."""
    if settings.gpu is not None:
        from quire.devices.cuda import CudaDevice

        return CudaDevice(budget, index=settings.gpu)
    if settings.device == "reference":
        from quire.devices.reference import ReferenceDevice

        return ReferenceDevice(budget)
    from quire.devices.host import HostDevice
    from quire.ops.cpu import CpuOps

    try:
        ops = CpuOps(settings.thread_count(), exact=settings.activations == "f32")
    except Refused as error:
        raise RequestError(f"threads={settings.thread_count()}: {error}; pass fewer") from error
    return HostDevice(budget, ops)


def host_tier(device: Device, limit: int) -> list[Tier]:
    """The host's memory, for the pages of a device that has its own."""
    if device.copier is None or limit == 0:
        return []
    return [PinnedTier(device.copier, min(limit, available_memory() // 2))]
