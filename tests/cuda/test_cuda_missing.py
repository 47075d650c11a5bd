"""What is said where a GPU cannot be used, each reason in its own words; none of it needs one."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest

from quire.devices import cuda
from quire.devices.budget import Budget
from quire.errors import BudgetError, RequestError
from quire.ops.cuda import machine

Patch = pytest.MonkeyPatch


def there_is(patch: Patch, count: int = 1, capability: tuple[int, int] = (9, 0)) -> None:
    """A driver and some GPUs, as torch tells of them."""
    patch.setattr(machine.torch.version, "cuda", "13.0")
    for name, told in (
        ("is_available", lambda: True), ("device_count", lambda: count),
        ("get_device_capability", lambda _: capability), ("get_device_name", lambda _: "Old One"),
    ):  # fmt: skip
        patch.setattr(machine.torch.cuda, name, told)


def no_torch(patch: Patch) -> None:
    """An installation without PyTorch."""
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("quire.ops.cuda"):
            raise ImportError("No module named 'torch'", name="torch")
        return real(name, *args)

    patch.setattr(builtins, "__import__", refuse)


def plain_torch(patch: Patch) -> None:
    """A PyTorch for CPUs."""
    patch.setattr(machine.torch.version, "cuda", None)


def no_driver(patch: Patch) -> None:
    """A PyTorch for CUDA that finds no driver."""
    there_is(patch)
    patch.setattr(machine.torch.cuda, "is_available", lambda: False)


REASONS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no torch": (no_torch, r"needs PyTorch and Triton.*install quire\[cuda\]"),
    "torch for CPUs": (plain_torch, r"needs a PyTorch built for CUDA, and .* is not; install one"),
    "no driver": (no_driver, r"needs an NVIDIA driver .*and there is none, or no GPU; update it"),
    "another number": (lambda p: there_is(p, 0), r"there is no GPU 0: this machine has 0"),
    "too old": (
        lambda p: there_is(p, 1, (7, 5)),
        r"Old One has compute capability 7\.5, and kernels need 8\.0 \(Ampere\) or newer",
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_said(reason: str, monkeypatch: Patch) -> None:
    happens, words = REASONS[reason]
    happens(monkeypatch)
    with pytest.raises(RequestError, match=words):
        cuda.free_bytes(0)
    with pytest.raises(RequestError, match=words):
        cuda.CudaDevice(Budget(1 << 30))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_ones_are_taken(capability: tuple[int, int], monkeypatch: Patch) -> None:
    there_is(monkeypatch, 2, capability)
    assert machine.missing(0) is None and machine.missing(1) is None
    assert machine.missing(2) == "there is no GPU 2: this machine has 2"


def test_too_little_memory_is_said(monkeypatch: Patch) -> None:
    class Full:
        def free_bytes(self) -> tuple[int, int]:
            return 10_000_000, 80_000_000_000

    monkeypatch.setattr(cuda, "_open", lambda index: (Full(), None))
    with pytest.raises(BudgetError, match=r"cuda:1 has 10,000,000 of 80,000,000,000 bytes free"):
        cuda.free_bytes(1)
