"""Instructions that are there for products alone change no bit of them."""

from __future__ import annotations

import numpy as np
import pytest

from quire.ops import _cpu
from quire.weights.quant import GGMLType
from tests.ops.devices import ISAS
from tests.ops.test_matmul import HALVES, bits, matrix

_IN_INTEGERS = (GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q6_K)
"""AVX2 has their scales of 16 columns in its integer sums, VNNI as floats."""
_SAME = {
    ("i8mm", "neon-dotprod"): list(HALVES),
    ("avx-vnni", "avx2"): [kind for kind in HALVES if kind not in _IN_INTEGERS],
}


@pytest.mark.parametrize(
    ("both", "kind"),
    [
        pytest.param(both, kind, id=f"{both[0]} {kind.name}")
        for both, kinds in _SAME.items()
        for kind in kinds
        if both[0] in ISAS
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 13])
def test_products_have_the_same_bits(both: tuple[str, str], kind: GGMLType, n: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, 512)).astype(np.float32)
    got, want = (
        cpu.linear(cpu.array(x), matrix(cpu, kind, 45, 512)[0]).numpy()
        for cpu in (_cpu.Cpu(2, isa) for isa in both)
    )
    assert np.array_equal(bits(got), bits(want))


def test_the_best_is_chosen() -> None:
    best = [isa for isa in ("avx512-vnni", "avx-vnni", "avx2", "i8mm") if isa in ISAS]
    assert not best or _cpu.Cpu(1).isa == best[0]
