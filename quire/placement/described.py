"""Devices as they are described, to plan for: they need not be there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.config import parse_bytes
from quire.errors import RequestError

GIB = 1 << 30
KINDS = ("cpu", "cuda", "reference")
_HOST_MARGIN = GIB // 2
_GRANULES = {"cpu": 4096, "cuda": 32 << 20, "reference": 4096}
_CONTEXT = {"cuda": 524 << 20}
"""The driver's context: gone before anything is loaded. Measured on an H200."""
CODE = 76 << 20
"""The code of kernels, and what they spill."""
_GRAPHS = {"cuda": 48 << 20}
"""Recorded steps. With the code, 164 MiB of a 4B in four bits on an H200, arrays aside."""


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

    @property
    def limit(self) -> int:
        """Bytes that may be used."""
        return max(self.free - self.margin, 0)

    @property
    def granularity(self) -> int:
        """Bytes in which pages are paid for."""
        return _GRANULES[self.kind]


def described(name: str, free: int, total: int | None = None, unified: bool = False) -> Described:
    """A device with so much free memory, and the usual margin: 1 GiB or 5%, whichever is less.

    The host keeps half a GiB, or 5% if that is less.
    """
    kind = kind_of(name)
    most = _HOST_MARGIN if kind == "cpu" else GIB
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
