"""What memory asks of a device about a model's pages, made of the device's operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.memory.build import GroupKernels
from quire.memory.layout import AttentionLayout, Int32
from quire.ops import Ops

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
