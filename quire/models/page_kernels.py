"""What can be done with a model's pages, made of the operations of its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.devices.device import GroupKernels
from quire.memory.groups.layout import AttentionLayout, Int32
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout, StateParts
from quire.ops import Ops, Recurrent


def attention_kernels(ops: Ops, heads: Any, rope: Any) -> GroupKernels:
    """Rotating and moving tokens in the pages of layers with these heads and this rope."""

    def rotate(base: int, layout: AttentionLayout, pages: Int32, deltas: Int32) -> None:
        k_offsets = np.array([k for k, _ in layout.offsets])
        sizes = layout.page_bytes, layout.page_tokens
        ops.rotate_pages(heads, rope, base, *sizes, pages, deltas, k_offsets)

    def move(
        base: int, layout: AttentionLayout, from_pages: Int32, from_slots: Int32,
        to_pages: Int32, to_slots: Int32,
    ) -> None:  # fmt: skip
        k_offsets, v_offsets = np.array(layout.offsets).T.copy()
        ops.move_tokens(
            heads, base, layout.page_bytes, layout.page_tokens, from_pages, from_slots, to_pages,
            to_slots, k_offsets, v_offsets,
        )  # fmt: skip

    return GroupKernels(rotate=rotate, move=move)


def recurrent_group(ops: Ops, name: str, layers: Mapping[int, Recurrent]) -> RecurrentSpec:
    """The group of recurrent layers of one size, by their numbers in the model."""
    sizes = {(layer.state_bytes, layer.log_bytes) for layer in layers.values()}
    assert len(sizes) == 1, "the layers of a group share one layout"
    told = ops.state_parts(next(iter(layers.values())))
    parts = None if told is None else StateParts(*told)
    return RecurrentSpec(name, tuple(layers), *sizes.pop(), parts=parts)


def recurrent_kernels(ops: Ops, layers: Mapping[int, Recurrent]) -> GroupKernels:
    """Folding logs into states, in these layers by their numbers in the model."""

    def fold(
        state_base: int, log_base: int, layout: StateLayout, state_in: Int32, log: Int32,
        n_entries: Int32, state_out: Int32,
    ) -> None:  # fmt: skip
        ops.fold(
            [layers[number] for number in layout.layers], layout.offsets,
            state_base, layout.state_page_bytes, log_base, layout.log_page_bytes,
            layout.log_stride, state_in, log, n_entries, state_out,
        )  # fmt: skip

    def derive(
        state_base: int, log_base: int, layout: StateLayout, state_in: Int32, log: Int32,
        n_entries: Int32,
    ) -> None:  # fmt: skip
        ops.derive(
            [layers[number] for number in layout.layers], layout.offsets,
            state_base, layout.state_page_bytes, log_base, layout.log_page_bytes,
            layout.log_stride, state_in, log, n_entries,
        )  # fmt: skip

    return GroupKernels(fold=fold, derive=derive)
