"""Folding for memory: what makes a log part of a state, in whatever layers a group has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.ops import Ops, Recurrent


def folding(ops: Ops, layers: Mapping[int, Recurrent]) -> Callable[[int, int, int, int, Any], None]:
    """The `Fold` of memory for a model's recurrent layers, by their numbers in the model."""

    def fold(state_in: int, log: int, n_entries: int, state_out: int, layout: Any) -> None:
        ops.fold(
            [layers[number] for number in layout.layers], layout.offsets, layout.state_page_bytes,
            layout.log_page_bytes, layout.log_stride, state_in, log, n_entries, state_out,
        )  # fmt: skip

    return fold
