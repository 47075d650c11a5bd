"""How much of a model runs: fewer layers or experts than its file has.

A file is then seen as if it had been made so: its metadata says fewer, and whatever model reads
it builds, loads and keeps memory for no more.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.weights.file import WeightFile
from quire.weights.gguf_format import Value

_MOST_BLOCKS = 4096


@dataclass(frozen=True)
class ActiveSize:
    """What every token goes through."""

    layers: int
    experts: int
    """Experts of a layer that a token uses; 0 where there are none."""

    @classmethod
    def of(cls, file: WeightFile) -> ActiveSize:
        """What a file says; layers that guess tokens ahead (nextn) do not count."""
        arch = file.get_str("general.architecture")
        blocks = file.get_int(f"{arch}.block_count", minimum=1, maximum=_MOST_BLOCKS)
        ahead = file.get_int(f"{arch}.nextn_predict_layers", default=0, minimum=0)
        return cls(
            blocks - min(ahead, blocks - 1),
            file.get_int(f"{arch}.expert_used_count", default=0, minimum=0),
        )


def blocks_ahead(file: WeightFile) -> tuple[str, ...]:
    """How the names of tensors begin that belong to blocks which guess tokens ahead."""
    arch = file.get_str("general.architecture")
    blocks = file.get_int(f"{arch}.block_count", default=0, maximum=_MOST_BLOCKS)
    return tuple(f"blk.{i}." for i in range(ActiveSize.of(file).layers, blocks)) if blocks else ()


def truncated(file: WeightFile, n_layer_exit: int | None, moe_n_expert: int | None) -> WeightFile:
    """The file as if it had only the first layers, or used fewer experts."""
    if n_layer_exit is None and moe_n_expert is None:
        return file
    arch = file.get_str("general.architecture")
    has = ActiveSize.of(file)
    changed: dict[str, Value] = {}
    if n_layer_exit is not None:
        _check("n_layer_exit", n_layer_exit, has.layers, f"{file.path} has {has.layers} layers")
        blocks = file.get_int(f"{arch}.block_count", minimum=1)
        changed |= {key: value[:n_layer_exit] for key, value in _by_layer(file, arch, blocks)}
        changed |= {f"{arch}.block_count": n_layer_exit, f"{arch}.nextn_predict_layers": 0}
    if moe_n_expert is not None:
        if not has.experts:
            raise RequestError(
                f"moe_n_expert is {moe_n_expert}, but {file.path} has no experts; leave it out"
            )
        uses = f"{file.path} was made to use {has.experts}"
        _check("moe_n_expert", moe_n_expert, has.experts, uses)
        changed[f"{arch}.expert_used_count"] = moe_n_expert
    seen = copy.copy(file)
    seen.metadata = MappingProxyType({**file.metadata, **changed})
    if n_layer_exit is not None:
        tensors = file.tensors.items()
        seen.tensors = {name: t for name, t in tensors if _layer_of(name) < n_layer_exit}
    return seen


def _layer_of(name: str) -> int:
    """The layer a tensor belongs to; -1 for one of no layer."""
    at, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    counted = at == "blk" and number.isdecimal() and len(number) < 10
    return int(number) if counted else -1


def _by_layer(file: WeightFile, arch: str, layers: int) -> list[tuple[str, NDArray[Any]]]:
    """What has an entry for each layer."""
    return [
        (key, value)
        for key, value in file.metadata.items()
        if key.startswith(f"{arch}.") and not key.startswith(f"{arch}.rope.")
        if isinstance(value, np.ndarray) and len(value) == layers
    ]


def _check(name: str, value: int, most: int, because: str) -> None:
    if not 1 <= value <= most:
        raise RequestError(f"{name} is {value}, but {because}; pass 1 to {most}, or leave it out")
