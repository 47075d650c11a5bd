"""The implementations of the table that this machine has."""

from __future__ import annotations

import os
from functools import cache

import pytest

from quire.devices.budget import Budget
from quire.devices.reference import ReferenceDevice
from quire.ops import Ops, _cpu
from quire.ops.cpu import CpuOps


def _runs(isa: str) -> bool:
    try:
        _cpu.Cpu(1, isa)
    except ValueError:
        return False
    return True


_NAMES = ("portable", "avx2", "avx-vnni", "avx512-vnni", "neon-dotprod", "i8mm")
ISAS = [isa for isa in _NAMES if _runs(isa)]
"""The CPU's instruction sets."""
unless_sanitized = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer's memory is its own"
)
"""For what a process holds, or fails to get."""
TABLES = ["reference", *ISAS]
"""Every implementation of the table."""


@cache
def table(name: str) -> Ops:
    """An implementation by name, with float32 activations."""
    return (
        ReferenceDevice(Budget(1)).ops if name == "reference" else CpuOps(2, exact=True, isa=name)
    )
