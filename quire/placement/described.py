"""Devices as they are described, to plan for: they need not be there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.config import parse_bytes
from quire.devices.cuda import GRANULE
from quire.errors import RequestError

GIB = 1 << 30
KINDS = ("cpu", "cuda", "reference")
_HOST_MARGIN = GIB // 2
_GRANULES = {"cpu": 4096, "cuda": GRANULE, "reference": 4096}
_CONTEXT = {"cuda": 681 << 20}
"""What the driver and torch take of a GPU before anything is loaded, as measured on an H200. Of a
GPU that is there this is known: it is gone when one asks what is free."""
CODE = 8 << 20
"""The code of kernels that come later."""
_GRAPHS = {"cuda": 8 << 20}
"""Recorded steps but for their arrays: 0.4 MiB for each of 36 layers, measured in the same way."""


@dataclass(frozen=True)
class Described:
    """A device: what it has free, and what of that is to stay free."""

    name: str
    kind: str
    free: int
    margin: int = 0
    """Bytes that stay free, for whoever else uses it."""
    unified: bool = False
    """Whether its memory is the host's, as that of integrated GPUs is."""
    libraries: int = 0
    """What libraries will take for themselves of what is free now."""
    graphs: int = 0
    """What recorded steps will take."""
    asked: bool = False
    """Whether `memory_budget` is what it has free."""
    real: int = 0
    """What it has free in fact, where that is asked for."""

    @property
    def limit(self) -> int:
        """Bytes that may be used."""
        return max(self.free - self.margin, 0)

    @property
    def granularity(self) -> int:
        """Bytes in which pages are paid for."""
        return _GRANULES[self.kind]


def described(name: str, free: int, total: int | None = None, unified: bool = False) -> Described:
    """A device with so much free memory, and the usual margin.

    That is 1 GiB, 5% or an eighth of what is free, whichever is least; of the host, half a GiB or
    5%.
    """
    kind = kind_of(name)
    most = _HOST_MARGIN if kind == "cpu" else min(GIB, free // 8)
    margin = min(most, (free if total is None else total) // 20)
    libraries = _CONTEXT[kind] + CODE if kind in _CONTEXT else 0
    return Described(name, kind, free, margin, unified, libraries, _GRAPHS.get(kind, 0))


def kind_of(name: str) -> str:
    """cpu, cuda or reference."""
    kind = name.partition(":")[0]
    if kind not in KINDS:
        raise RequestError(f"device {name!r:.80} is not known; there are {', '.join(KINDS)}")
    return kind


def parse(texts: list[str]) -> list[Described]:
    """Devices from texts such as "cuda:24GiB" and "cpu:64GiB"; of several GPUs each is one text."""
    found: list[Described] = []
    for text in texts:
        match = re.fullmatch(
            r"(cpu|cuda|reference)(?::(\d+))?:([\d.]+ ?[kmgtKMGT]?[iI]?[bB]?)", text
        )
        if not match:
            raise RequestError(
                f"a device is described by its kind and what it has free, such as cuda:24GiB or "
                f"cpu:64GiB, not {text!r:.80}"
            )
        kind, number, size = match.groups()
        index = number or sum(one.kind == kind for one in found)
        name = kind if kind == "cpu" else f"{kind}:{index}"
        if any(one.name == name for one in found):
            raise RequestError(f"device {name} is described twice")
        found.append(described(name, parse_bytes(size), unified=kind == "reference"))
    return found
