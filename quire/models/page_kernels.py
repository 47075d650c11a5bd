"""What memory asks of a device about a model's pages, made of the device's operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.memory.build import GroupKernels
from quire.memory.layout import AttentionLayout, Int32
from quire.memory.state_layout import RecurrentSpec
from quire.ops import Ops, Recurrent
from quire.ops.recurrent import folding

_FIRST = np.zeros(1, np.int32)


def attention_kernels(ops: Ops, heads: Any, rope: Any) -> GroupKernels:
    """Rotating and moving tokens in the pages of layers with these heads and this rope."""

    def rotate(page: int, layout: AttentionLayout, deltas: Int32) -> None:
        k_offsets = np.array([k for k, _ in layout.offsets])
        ops.rotate_pages(
            heads, rope, page, layout.page_bytes, layout.page_tokens, _FIRST, deltas[None],
            k_offsets,
        )  # fmt: skip

    def move(
        from_page: int, to_page: int, layout: AttentionLayout, from_slots: Int32, to_slots: Int32
    ) -> None:
        k_offsets, v_offsets = np.array(layout.offsets).T.copy()
        ops.move_tokens(
            heads, from_page, to_page, layout.page_bytes, layout.page_tokens, from_slots, to_slots,
            k_offsets, v_offsets,
        )  # fmt: skip

    return GroupKernels(rotate=rotate, move=move)


def recurrent_group(name: str, layers: Mapping[int, Recurrent]) -> RecurrentSpec:
    """The group of recurrent layers of one size, by their numbers in the model."""
    sizes = {(layer.state_bytes, layer.log_bytes) for layer in layers.values()}
    assert len(sizes) == 1, "the layers of a group share one layout"
    return RecurrentSpec(name, tuple(layers), *sizes.pop())


def recurrent_kernels(ops: Ops, layers: Mapping[int, Recurrent]) -> GroupKernels:
    """Folding logs into states, in these layers by their numbers in the model."""
    return GroupKernels(fold=folding(ops, layers))
