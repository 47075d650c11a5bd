"""How fast a plan can decode: weights, keys and values are read once for every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from quire.models.loader import DOWN, EMBEDDING, EXPERTS
from quire.ops import Ops
from quire.placement.plan import DevicePlan, Plan

_ROUNDS = 13
_ROWS, _COLS = 8192, 4096


@dataclass(frozen=True)
class Bandwidth:
    """Bytes of weights per second that products with one token read: quartiles of some rounds."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one sequence, as far as reading bounds it, over the measured spread."""

    low: float
    middle: float
    high: float


def measure(ops: Ops, kind: int) -> Bandwidth:
    """How fast a device reads weights of a ggml type, by multiplying with some of them."""
    from quire.weights.quant import GGMLType

    data = np.zeros(GGMLType(kind).nbytes((_ROWS, _COLS)), np.uint8)
    matrix = ops.pack([(kind, _ROWS, _COLS, data)])
    x = ops.array(np.ones((1, _COLS), np.float32))
    rates = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        ops.numpy(ops.linear(x, matrix))
        rates.append(matrix.nbytes / (perf_counter() - start))
    rates = sorted(rates[1:])  # the first one meets cold caches
    return Bandwidth(*(rates[len(rates) * i // 4] for i in (1, 2, 3)))


def expected(plan: Plan, bandwidths: Mapping[str, Bandwidth]) -> Speed | None:
    """With half of the context filled; None where a device that is used was not measured."""
    used = [one for one in plan.devices if one.parts]
    if any(one.device.name not in bandwidths for one in used):
        return None
    sizes = [(bytes_per_token(plan, one), bandwidths[one.device.name]) for one in used]

    low = sum(size / each.low for size, each in sizes)
    middle = sum(size / each.middle for size, each in sizes)
    high = sum(size / each.high for size, each in sizes)
    return Speed(1 / low, 1 / middle, 1 / high)


def bytes_per_token(plan: Plan, one: DevicePlan) -> float:
    """What a device reads for a token of one sequence, its context half full."""
    read = 0.0
    for kind, size in one.weights.items():
        if kind == EMBEDDING:
            tied_here = plan.model.tied and any(part.kind == "output" for part in one.parts)
            read += size if tied_here else 0  # else one row of it
        else:
            read += size * (plan.model.active if kind in (EXPERTS, DOWN) else 1.0)
    return read + sum(one.memory.values()) / plan.load.sequences / 2
