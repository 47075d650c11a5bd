"""Which layers look through a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError
from quire.weights.file import WeightFile
from quire.weights.naming import HFConfig

FULL, WINDOW = "attention", "window"
MAX_WINDOW = 2**30
_PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class Windows:
    """The window's size, counting the token that looks, and a flag for each layer."""

    size: int
    sliding: NDArray[np.bool_]

    @classmethod
    def read(
        cls, file: WeightFile, arch: str, n_layers: int, period: int = 0, required: bool = False
    ) -> Windows:
        """As a file says; without a pattern, all layers but every `period`-th have the window.

        llama.cpp leaves the window of Llama and Qwen files alone. Those models were trained with
        it, so where a file has one, it holds here.
        """
        key = f"{arch}.attention.sliding_window"
        if not required and not file.get_int(key, default=0):
            return cls(0, np.zeros(n_layers, np.bool_))
        size = file.get_int(key, minimum=1, maximum=MAX_WINDOW)
        pattern = file.metadata.get(f"{arch}.{_PATTERN}")
        if isinstance(pattern, np.ndarray):
            return cls(size, _flags(file, f"{arch}.{_PATTERN}", pattern, n_layers))
        period = file.get_int(f"{arch}.{_PATTERN}", default=period, minimum=0, maximum=MAX_WINDOW)
        return cls(size, all_but_every(period, n_layers))

    def of(self, layer: int) -> int:
        """How many tokens a layer sees; 0 for all."""
        return self.size if self.sliding[layer] else 0


def all_but_every(period: int, n_layers: int) -> NDArray[np.bool_]:
    """A window in all layers but the last of each period; without a period, in all."""
    layers = np.arange(1, n_layers + 1)
    return np.asarray(layers % period != 0) if period else np.ones(n_layers, np.bool_)


def layer_types(config: HFConfig, default: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which layers have a window, where a folder says it for each."""
    if "layer_types" not in config:
        return default
    types = config.strings("layer_types")
    if len(types) != len(default) or set(types) - {"sliding_attention", "full_attention"}:
        config.refuse("layer_types", "each layer must be sliding_attention or full_attention")
    return np.array([kind == "sliding_attention" for kind in types])


def _flags(
    file: WeightFile, key: str, found: NDArray[np.generic], n_layers: int
) -> NDArray[np.bool_]:
    if len(found) != n_layers or found.dtype.kind not in "biu":
        raise ModelError(
            f"{file.path}: {key} has {len(found)} entries of type {found.dtype}; it must have a "
            f"flag for each of {n_layers} layers"
        )
    return np.asarray(found, np.bool_)
