"""Matrix instructions change no bit: products of bytes are as those of dot products."""

from __future__ import annotations

import numpy as np
import pytest

from quire.ops import _cpu
from quire.weights.quant import GGMLType
from tests.ops.devices import ISAS
from tests.ops.test_matmul import HALVES, bits, matrix

pytestmark = pytest.mark.skipif("i8mm" not in ISAS, reason="this CPU does not run i8mm")


@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 13])
def test_products_have_the_bits_of_dot_products(kind: GGMLType, n: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, 512)).astype(np.float32)
    got, want = (
        cpu.linear(cpu.array(x), matrix(cpu, kind, 45, 512)[0]).numpy()
        for cpu in (_cpu.Cpu(2, "i8mm"), _cpu.Cpu(2, "neon-dotprod"))
    )
    assert np.array_equal(bits(got), bits(want))


def test_it_is_chosen_where_the_cpu_has_it() -> None:
    assert _cpu.Cpu(1).isa == "i8mm"
