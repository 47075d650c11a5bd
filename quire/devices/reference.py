"""The NumPy reference as a device: the truth is one more implementation, and a slow one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.host import HostDevice
from quire.ops.reference.table import ReferenceOps
from quire.weights.quant import GGMLType, dequantize


class ReferenceDevice(HostDevice):
    """Runs whole models in plain NumPy, to hold other devices against."""

    def __init__(self, budget: Budget, name: str = "reference") -> None:
        super().__init__(budget, ReferenceOps(_values), name)


def _values(data: NDArray[np.uint8], kind: int, shape: tuple[int, int]) -> NDArray[np.float32]:
    return dequantize(data, GGMLType(kind), shape)
