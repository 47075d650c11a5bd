"""Where the bytes of a recurrent sequence lie: a page for its state, a page for its log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.errors import ModelError
from quire.memory.groups.layout import aligned


@dataclass(frozen=True)
class StateParts:
    """What one layer's state and log entries are made of, in floats."""

    tail: int
    """Of its convolution, and what fills it up."""
    heads: int
    dk: int
    dv: int
    raw: int
    """Raw inputs of a token; what a device derives from them lies behind."""
    derived: int = 0

    @property
    def rows(self) -> int:
        """A state in rows, filled up to 64 bytes."""
        return -(-self.heads * self.dk * self.dv // 16) * 16

    @property
    def lanes(self) -> int:
        """A state in blocks of 16 columns."""
        return self.heads * -(-self.dv // 16) * self.dk * 16


@dataclass(frozen=True)
class RecurrentSpec:
    """Recurrent layers of a model that share one table, as the model declares them."""

    name: str
    layers: tuple[int, ...]
    state_bytes: int
    """Bytes of one layer's state."""
    log_bytes: int
    """Bytes of one token's raw inputs to one layer."""
    log_tokens: int = 16
    """Tokens in the log before it is folded into the state; on some devices at multiples of it."""
    parts: StateParts | None = None
    """What they are made of, where the device says: then they can be read on others."""
    kind: Literal["recurrent"] = field(default="recurrent", init=False)

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise ModelError(f"{where} needs distinct layers, numbered from 0; got {self.layers}")
        for what in ("state_bytes", "log_bytes", "log_tokens"):
            if getattr(self, what) < 1:
                raise ModelError(f"{where} needs {what} of at least 1; got {getattr(self, what)}")

    def only(self, keep: Callable[[int], bool]) -> RecurrentSpec:
        """This group with the layers that pass the filter."""
        layers = tuple(layer for layer in self.layers if keep(layer))
        if not layers:
            raise ModelError(f"no layer of group {self.name!r} passes the filter: {self.layers}")
        return replace(self, layers=layers)


@dataclass(frozen=True)
class StateLayout:
    """A state page: the state of each layer in order. A log page: for each layer all its entries.

    States and entries start at multiples of 64 bytes; what is inside is the kernels' business.
    """

    spec: RecurrentSpec
    log_tokens: int = field(init=False)
    """Entries of a log page."""
    log_stride: int = field(init=False)
    """Bytes from one entry of a layer to the next."""
    state_page_bytes: int = field(init=False)
    log_page_bytes: int = field(init=False)
    offsets: tuple[tuple[int, int], ...] = field(init=False)
    """For each layer in order: where its state lies in a state page, its entry 0 in a log page."""
    by_layer: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False)
    """The same by a layer's number in the model."""

    def __post_init__(self) -> None:
        spec = self.spec
        state, stride = aligned(spec.state_bytes), aligned(spec.log_bytes)
        entries = stride * spec.log_tokens
        for name, value in {
            "log_tokens": spec.log_tokens,
            "log_stride": stride,
            "state_page_bytes": len(spec.layers) * state,
            "log_page_bytes": len(spec.layers) * entries,
            "offsets": tuple((i * state, i * entries) for i in range(len(spec.layers))),
        }.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "by_layer", dict(zip(spec.layers, self.offsets, strict=True)))

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that reads this memory."""
        return self.spec.layers
