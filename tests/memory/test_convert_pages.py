"""Pages of one order of bytes as pages of another: the same bits, there and back."""

from __future__ import annotations

import numpy as np
import pytest

from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType
from quire.memory.saved.convert import Conversion
from quire.ops.reference.kv import store_keys, store_values


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("page_tokens", [16, 48])
def test_keys_are_the_same_bits_in_another_order(kind: str, page_tokens: int) -> None:
    heads, dims = 3, 64
    spec = GroupSpec("full", "attention", (0, 2), heads, dims, 32)
    layout = AttentionLayout(spec, KVType(kind), KVType.F16, page_tokens)
    rng = np.random.default_rng(0)
    lanes = rng.integers(0, 256, layout.page_bytes).astype(np.uint8)
    rows = lanes.copy()
    size = page_tokens * heads * layout.type_k.row_bytes(dims)
    for layer in spec.layers:
        part = slice(layout.k_offset(layer), layout.k_offset(layer) + size)
        for slot in range(page_tokens):
            x = rng.standard_normal((heads, dims)).astype(np.float32)
            store_keys(lanes[part], kind, slot, x)
            store_values(rows[part], kind, slot, x)  # keys in rows lie as values do
    for ours, source, wanted in (("rows", lanes, rows), ("lanes16", rows, lanes)):
        theirs = {"bytes": f"little-endian, {'lanes16' if ours == 'rows' else 'rows'}"}
        found = Conversion(layout, {"bytes": f"little-endian, {ours}"}, theirs)
        target = np.full_like(lanes, 0xEE)
        found.pages[0](source, target)
        assert found.sizes == [layout.page_bytes]
        np.testing.assert_array_equal(target, wanted)


def test_other_orders_are_refused() -> None:
    spec = GroupSpec("full", "attention", (0,), 1, 32, 32)
    ours = {"bytes": "little-endian, rows"}
    for order, tokens in (
        ("little-endian, tiles of 16", 16), ("little-endian, lanes16", 8), ("big-endian, rows", 16),
        ("big-endian, lanes16", 16),
    ):  # fmt: skip
        layout = AttentionLayout(spec, KVType.F16, KVType.F16, tokens)
        with pytest.raises(ValueError, match=r"cannot be read|no blocks"):
            Conversion(layout, ours, {"bytes": order})
