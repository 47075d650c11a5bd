"""Layouts, types and budgets: sizes that others compute with."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import memory
from quire.devices.budget import Budget
from quire.errors import BudgetError, ModelError, RequestError
from quire.memory.groups.layout import AttentionLayout, GroupSpec, KVType


def test_row_bytes_are_those_of_the_formats() -> None:
    assert [KVType(t).row_bytes(64) for t in ("f32", "f16", "bf16", "q8_0", "q4_0")] == [
        256, 128, 128, 68, 36,
    ]  # fmt: skip


def test_rows_that_do_not_fill_blocks_are_refused() -> None:
    with pytest.raises(RequestError, match=r"q8_0.*80.*f16"):
        KVType.Q8_0.row_bytes(80)
    assert KVType.F16.row_bytes(80) == 160


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(RequestError, match="f32, f16, bf16, q8_0, q4_0"):
        KVType("q5_1")


@settings(deadline=None)
@given(
    n_layers=st.integers(1, 5),
    heads=st.integers(1, 5),
    dims=st.tuples(st.sampled_from([32, 64, 96]), st.sampled_from([32, 64, 160])),
    types=st.tuples(st.sampled_from(KVType), st.sampled_from(KVType)),
    page_tokens=st.sampled_from([1, 2, 16, 48]),
)
def test_parts_are_aligned_disjoint_and_in_order(
    n_layers: int, heads: int, dims: tuple[int, int], types: tuple[KVType, KVType],
    page_tokens: int,
) -> None:  # fmt: skip
    layers = tuple(range(1, 1 + 2 * n_layers, 2))
    spec = GroupSpec("g", "attention", layers, heads, *dims)
    layout = AttentionLayout(spec, *types, page_tokens)
    k_bytes = heads * page_tokens * types[0].row_bytes(dims[0])
    v_bytes = heads * page_tokens * types[1].row_bytes(dims[1])
    end = 0
    for layer, offsets in zip(layers, layout.offsets, strict=True):
        assert offsets == (layout.k_offset(layer), layout.v_offset(layer))
        for offset, size in zip(offsets, (k_bytes, v_bytes), strict=True):
            assert offset % 64 == 0 and end <= offset < end + 64
            end = offset + size
    assert layout.page_bytes % 64 == 0 and end <= layout.page_bytes < end + 64
    assert layout.bytes_per_token * page_tokens == n_layers * (k_bytes + v_bytes)


def test_the_default_model_needs_what_it_needs() -> None:
    spec = GroupSpec("full", "attention", tuple(range(30)), 3, 64, 64)
    layout = AttentionLayout(spec, KVType.F16, KVType.F16, 16)
    assert (layout.bytes_per_token, layout.page_bytes) == (23040, 16 * 23040)
    assert [layout.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_layers_can_read_others_and_be_left_out() -> None:
    spec = GroupSpec("g", "attention", (0, 1, 4), 1, 32, 32, reuse={5: 4, 6: 1})
    layout = AttentionLayout(spec, KVType.F16, KVType.F16, 16)
    assert layout.layers == (0, 1, 4, 5, 6)
    assert layout.k_offset(5) == layout.k_offset(4) and layout.v_offset(6) == layout.v_offset(1)
    assert len(layout.offsets) == 3
    assert layout.by_layer == {
        0: layout.offsets[0], 1: layout.offsets[1], 4: layout.offsets[2],
        5: layout.offsets[2], 6: layout.offsets[1],
    }  # fmt: skip
    early = spec.only(lambda layer: layer < 4 or layer == 6)
    assert (early.layers, dict(early.reuse)) == ((0, 1), {6: 1})
    smaller = AttentionLayout(early, KVType.F16, KVType.F16, 16)
    assert smaller.page_bytes * 3 == layout.page_bytes * 2
    assert smaller.layers == (0, 1, 6)
    assert smaller.by_layer == {layer: layout.by_layer[layer] for layer in (0, 1, 6)}
    late = AttentionLayout(spec.only(lambda layer: layer >= 4), KVType.F16, KVType.F16, 16)
    assert late.layers == (4, 5)  # 6 stays only where its owner does
    assert late.by_layer == {4: layout.offsets[0], 5: layout.offsets[0]}
    assert spec.only(lambda layer: layer != 5).reuse == {6: 1}
    with pytest.raises(ModelError, match="no layer"):
        spec.only(lambda layer: layer > 9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": ()},
        {"layers": (1, 1)},
        {"layers": (-1,)},
        {"n_kv_heads": 0},
        {"head_dim_k": -64},
        {"head_dim_v": 0},
        {"window": 128},
        {"kind": "window"},
        {"kind": "window", "window": 0},
        {"kind": "window", "window": -1},
        {"window": 0},
        {"reuse": {1: 0}},
        {"reuse": {5: 9}},
    ],
)
def test_groups_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "name": "odd", "kind": "attention", "layers": (0, 1), "n_kv_heads": 1, "head_dim_k": 32,
        "head_dim_v": 32,
    }  # fmt: skip
    with pytest.raises(ModelError, match="odd"):
        GroupSpec(**(fields | wrong))  # type: ignore[arg-type]


def test_page_tokens_start_at_one() -> None:
    spec = GroupSpec("g", "attention", (0,), 1, 32, 32)
    with pytest.raises(RequestError, match="page_tokens"):
        AttentionLayout(spec, KVType.F16, KVType.F16, 0)


def test_a_budget_counts_by_use_and_refuses_whole() -> None:
    budget = Budget(1000)
    budget.reserve(600, "weights")
    budget.reserve(300, "pages of full")
    assert (budget.used, budget.free) == (900, 100)
    with pytest.raises(BudgetError, match=r"log needs 101 more.*100 of the 1,000.*weights 600"):
        budget.reserve(101, "log")
    assert budget.breakdown == {"weights": 600, "pages of full": 300}
    budget.reserve(100, "pages of full")
    budget.release(400, "pages of full")
    assert budget.breakdown == {"weights": 600} and budget.free == 400
    with pytest.raises(AssertionError, match="weights"):
        budget.release(601, "weights")
    assert budget.used == 600
    with pytest.raises(RequestError, match="at least 1"):
        Budget(0)


def test_memory_stands_alone() -> None:
    """Nothing but NumPy, the standard library, errors, files, devices and memory itself."""
    files = sorted(Path(memory.__file__).parent.rglob("*.py"))
    assert len(files) > 30
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                inside = name in ("quire.errors", "quire.files") or name.startswith(
                    ("quire.memory", "quire.devices")
                )
                assert inside or root == "numpy" or root in sys.stdlib_module_names, (file, name)
