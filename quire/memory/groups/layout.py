"""Where the bytes of a token lie: the types of K and V, a model's groups, and a page's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError, RequestError

Int32 = NDArray[np.int32]

MAX_POSITION = 2**31 - 2
"""Kernels number positions with int32, and the next one has to be a number too."""

_ALIGN = 64
# (values in a block, bytes of a block)
_BLOCKS = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}


class KVType(StrEnum):
    """How K or V is stored."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"

    @classmethod
    def _missing_(cls, value: object) -> None:
        known = ", ".join(cls)
        raise RequestError(f"{value!r} is not a type for K or V; choose one of {known}")

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n values."""
        block, size = _BLOCKS[self.value]
        if n % block:
            raise RequestError(
                f"{self.value} stores blocks of {block} values, and a row of {n} is not a multiple "
                f"of {block}; use f16, bf16 or f32 for this model"
            )
        return n // block * size


@dataclass(frozen=True)
class GroupSpec:
    """Layers of a model that share one kind of memory, as the model declares them."""

    name: str
    kind: Literal["attention", "window"]
    layers: tuple[int, ...]
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None
    reuse: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Layers that store nothing and read another layer of this group: reader -> owner."""

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise ModelError(f"{where} needs distinct layers, numbered from 0; got {self.layers}")
        for what in ("n_kv_heads", "head_dim_k", "head_dim_v"):
            if getattr(self, what) < 1:
                raise ModelError(f"{where} needs {what} of at least 1; got {getattr(self, what)}")
        if not ((self.window or 0) > 0 if self.kind == "window" else self.window is None):
            raise ModelError(f"{where} of kind {self.kind!r} cannot have window={self.window}")
        for reader, owner in self.reuse.items():
            if reader in self.layers or owner not in self.layers:
                raise ModelError(
                    f"{where}: layer {reader} cannot read layer {owner}; a reader stores nothing "
                    f"itself, and the owner is one of the layers {self.layers}"
                )

    def only(self, keep: Callable[[int], bool]) -> GroupSpec:
        """This group with the layers that pass the filter; readers stay where their owner does."""
        layers = tuple(layer for layer in self.layers if keep(layer))
        if not layers:
            raise ModelError(f"no layer of group {self.name!r} passes the filter: {self.layers}")
        reuse = {r: o for r, o in self.reuse.items() if keep(r) and o in layers}
        return replace(self, layers=layers, reuse=reuse)


@dataclass(frozen=True)
class AttentionLayout:
    """One page, byte by byte: for each layer in order its K part, then its V part.

    A part holds `page_tokens` tokens of every KV head and starts at a multiple of 64 bytes. What
    order the values have inside a part is the kernels' business: memory copies whole pages.
    """

    spec: GroupSpec
    type_k: KVType
    type_v: KVType
    page_tokens: int
    k_part_bytes: int = field(init=False)
    v_part_bytes: int = field(init=False)
    page_bytes: int = field(init=False)
    bytes_per_token: int = field(init=False)
    """Bytes of one token's K and V in all layers, without any padding."""
    offsets: tuple[tuple[int, int], ...] = field(init=False)
    """Offsets of K and V for each layer that stores something, in the group's order."""
    by_layer: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False)
    """The same by a layer's number in the model, those that read another's included."""

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise RequestError(f"page_tokens must be at least 1, not {self.page_tokens}")
        spec = self.spec
        k_token = spec.n_kv_heads * self.type_k.row_bytes(spec.head_dim_k)
        v_token = spec.n_kv_heads * self.type_v.row_bytes(spec.head_dim_v)
        k_part, v_part = k_token * self.page_tokens, v_token * self.page_tokens
        k_room, v_room = aligned(k_part), aligned(v_part)
        starts = [i * (k_room + v_room) for i in range(len(spec.layers))]
        offsets = tuple((start, start + k_room) for start in starts)
        by_layer = dict(zip(spec.layers, offsets, strict=True))
        by_layer |= {reader: by_layer[owner] for reader, owner in spec.reuse.items()}
        for name, value in {
            "k_part_bytes": k_part,
            "v_part_bytes": v_part,
            "page_bytes": len(spec.layers) * (k_room + v_room),
            "bytes_per_token": len(spec.layers) * (k_token + v_token),
            "offsets": offsets,
            "by_layer": by_layer,
        }.items():
            object.__setattr__(self, name, value)

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that reads this memory: those that store, then those that reuse."""
        return tuple(self.by_layer)

    def k_offset(self, layer: int) -> int:
        """Where in a page the K part of a layer of the model starts."""
        return self.by_layer[layer][0]

    def v_offset(self, layer: int) -> int:
        """Where in a page the V part of a layer of the model starts."""
        return self.by_layer[layer][1]

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens need."""
        return -(-tokens // self.page_tokens)


def aligned(size: int) -> int:
    """The size, rounded up so that what follows starts at a multiple of 64 bytes."""
    return -(-size // _ALIGN) * _ALIGN
