"""The first work of a process on a GPU: most of what its driver takes besides is taken then."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import numpy as np
import torch

from quire.ops.cuda.machine import Machine, wait
from quire.ops.cuda.matrices import pack

_KINDS = {8: 34, 12: 144, 14: 210}
"""Types of weights, and bytes of a block: Q8_0, Q4_K, Q6_K."""


@cache
def wake(index: int) -> None:
    """Does a little of what loading does, once: packs a few weights, then lets them go."""
    machine = Machine(index)
    with suppress(torch.OutOfMemoryError):  # what is free is too little then, which is said
        for kind, size in _KINDS.items():
            blocks = 16 * 256 // (32 if kind == 8 else 256)
            pack([(kind, 16, 256, np.zeros(blocks * size, np.uint8))], machine)
    torch.cuda.Stream(machine.device).synchronize()
    wait(machine.device)
    machine.trim()
