"""Recurrent layers on the GPU, and where the states and logs of a step lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.ops import Recurrent
from quire.ops.cuda.machine import need, power_of_two

_LINE = 16  # floats: what follows a tail starts at a multiple of 64 bytes
_COLUMNS = 32  # columns of values that a program of Triton's has: bits depend on it


@dataclass(frozen=True, eq=False)
class CudaLayer:
    """A recurrent layer and the sizes it declares."""

    kind: str
    """delta, ssd or conv."""
    in_cols: int
    out_cols: int
    heads: int
    k_heads: int
    """Heads or groups of keys."""
    dk: int
    dv: int
    channels: int
    width: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    tiled: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def tail_words(self) -> int:
        """Floats of the convolution's tail, and what fills its last line."""
        return -(-(self.width - 1) * self.channels // _LINE) * _LINE

    @property
    def state_bytes(self) -> int:
        """Bytes of its state in a state page."""
        state = self.heads * self.dk * self.dv
        return 4 * (self.tail_words + -(-state // _LINE) * _LINE)

    @property
    def raw_cols(self) -> int:
        """Floats of a token's raw inputs in a log."""
        return self.channels if self.kind == "conv" else self.in_cols

    @property
    def log_bytes(self) -> int:
        """Bytes of one token in a log page: raw inputs, then its key, its u and its decays."""
        if self.kind == "conv":
            return 4 * self.channels
        return 4 * (self.in_cols + self.k_heads * self.dk + self.heads * self.dv + self.heads)

    @property
    def shape(self) -> dict[str, int | bool]:
        """What kernels are compiled for."""
        return {
            "HEADS": self.heads, "K_HEADS": self.k_heads, "TILED": self.tiled, "DK": self.dk,
            "DV": self.dv, "DKP": power_of_two(self.dk, 32), "BV": _COLUMNS,
        }  # fmt: skip

    @property
    def programs(self) -> int:
        """How many programs share its heads."""
        return self.heads * -(-self.dv // _COLUMNS)


def layer_of(layer: Recurrent) -> CudaLayer:
    """A layer that this device made."""
    if not isinstance(layer, CudaLayer):
        raise TypeError(f"{type(layer).__name__} is not a layer of the GPU")
    return layer


def layers_of(layers: Sequence[Recurrent]) -> list[CudaLayer]:
    """Layers that this device made, all of one shape."""
    found = [layer_of(layer) for layer in layers]
    sizes = {(f.kind, f.heads, f.k_heads, f.dk, f.dv, f.channels, f.width) for f in found}
    need(len(sizes) <= 1, "layers of several shapes")
    return found


def need_placed(
    layer: CudaLayer, state_at: int, state_page: int, log_at: int, log_page: int, stride: int,
    entries: int,
) -> None:  # fmt: skip
    """Refuses offsets at which a layer's state or log would not lie inside a page."""
    inside = 0 <= state_at <= state_page - layer.state_bytes and state_at % 64 == 0
    need(inside, f"recurrent layer: its state at {state_at} of a page of {state_page}")
    need(stride >= layer.log_bytes, f"recurrent layer: entries are {stride} bytes apart")
    inside = 0 <= log_at <= log_page - entries * stride and log_at % 16 == 0
    need(inside, f"recurrent layer: its log at {log_at} of a page of {log_page}")
    whole = state_page % 16 == 0 and log_page % 16 == 0 and stride % 16 == 0
    need(whole, "recurrent layer: pages and entries must be multiples of 16 bytes")


@dataclass(frozen=True)
class Places:
    """Where pages lie, and how large they are."""

    state_base: int
    state_bytes: int
    log_base: int
    log_bytes: int
    log_stride: int
    log_tokens: int

    @property
    def bases(self) -> tuple[int, int]:
        """Addresses of both pools."""
        return self.state_base, self.log_base

    @property
    def words(self) -> tuple[int, int, int]:
        """Floats of a state page, of a log page, and from one entry to the next."""
        return self.state_bytes // 4, self.log_bytes // 4, self.log_stride // 4


class StateShape(NamedTuple):
    """How large a step is: padding included, so that a captured one serves several."""

    tokens: int
    seqs: int
    """More than there are where there are more tokens: padding is a sequence too."""
    single: bool
    """Whether each sequence has one token, which goes into its log."""

    @property
    def sizes(self) -> list[int]:
        """Of the columns that kernels are told."""
        return [self.seqs] * 8 + [self.tokens] * 4


@dataclass(frozen=True)
class CudaStates:
    """One group's states and logs in one step, over `state_columns` on the device."""

    places: Places
    shape: StateShape
    columns: Sequence[torch.Tensor]
