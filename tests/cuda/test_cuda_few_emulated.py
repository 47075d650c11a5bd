"""The product of few tokens in CUDA C++, run without a GPU: see host.h for what that shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.ops import SILU_MUL
from quire.ops.cuda import few
from quire.weights.quant import GGMLType, dequantize
from tests.cuda.host_kernels import COMPILER, HostNative
from tests.cuda.sides import GPU, close, cuda, same_bits
from tests.cuda.test_cuda_products import Floats, normal, part

pytestmark = pytest.mark.skipif(GPU or not COMPILER, reason="a GPU, or no compiler")
EPS = 1e-6


def product(
    monkeypatch: pytest.MonkeyPatch, kind: GGMLType, rows: int, x: Floats, norm: Floats | None,
    processors: int = 2, act: int = 0, fine: bool = False, into: Floats | None = None,
) -> Floats:  # fmt: skip
    """What a GPU of so many multiprocessors makes of it: one has more tiles than the other."""
    native = HostNative(processors)
    monkeypatch.setattr(few, "native", lambda _: native)
    (segment,) = cuda().pack([part(kind, rows, x.shape[1])]).segments
    out = torch.zeros(len(x), rows // 2 if act else rows) if into is None else torch.tensor(into)
    machine: Any = SimpleNamespace(interpreted=False, device=None)
    given: dict[str, Any] = {"into": into is not None, "act": act, "fine": fine}
    weights = None if norm is None else torch.tensor(norm)
    assert few.product_few(machine, torch.tensor(x), segment, weights, EPS, out, **given)
    assert native.asked == ["few_gated" if act else "few" if norm is None else "few_normed"]
    return np.asarray(out)


def expected(kind: GGMLType, rows: int, x: Floats, norm: Floats | None) -> Floats:
    _, _, cols, data = part(kind, rows, x.shape[1])
    if norm is not None:
        x = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS) * norm
    return (x @ dequantize(data, kind, (rows, cols)).T).astype(np.float32)


@pytest.mark.parametrize("kind, cols", [
    (GGMLType.Q4_K, 1280),  # slices of three units, and one of two
    (GGMLType.Q6_K, 768),   # of two units, and two warps without any
    (GGMLType.Q8_0, 608),   # half a unit at the end
])  # fmt: skip
def test_a_token_gets_what_the_weights_say_in_any_company(
    kind: GGMLType, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, norm = normal(3, cols), normal(cols, seed=1)
    want = expected(kind, 75, x, norm)
    got = product(monkeypatch, kind, 75, x, norm)
    close(got, want, 2e-3)
    same_bits(got[1:2], product(monkeypatch, kind, 75, x[1:2], norm, processors=9))
    before = normal(3, 75)
    close(
        product(monkeypatch, kind, 75, x, None, into=before),
        before + expected(kind, 75, x, None),
        2e-3,
    )


@pytest.mark.parametrize("fine", [False, True])
def test_gate_and_up_meet_in_one_kernel(fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, norm = normal(2, 1280), normal(1280, seed=1)
    both = expected(GGMLType.Q4_K, 160, x, norm)
    gate, up = both[:, :80], both[:, 80:]
    given = {"act": SILU_MUL, "fine": fine}
    got = product(monkeypatch, GGMLType.Q4_K, 160, x, norm, **given)
    close(got, gate * (1 + np.tanh(gate / 2)) / 2 * up, 2e-3)
    same_bits(got[:1], product(monkeypatch, GGMLType.Q4_K, 160, x[:1], norm, processors=9, **given))
