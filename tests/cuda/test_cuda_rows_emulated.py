"""Rows on their way into products, in CUDA C++ without a GPU: see host.h for what that shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.ops import SILU_MUL
from quire.ops.cuda import launch
from quire.ops.cuda.launch import Prepared, Slices
from tests.cuda.host_kernels import COMPILER, HostNative
from tests.cuda.sides import GPU, close
from tests.cuda.test_cuda_products import Floats, normal

pytestmark = pytest.mark.skipif(GPU or not COMPILER, reason="a GPU, or no compiler")
EPS = 1e-5
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}
MACHINE: Any = SimpleNamespace(device=None)


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostNative(2)
    monkeypatch.setattr(launch, "native", lambda _: host)


def prepared(
    x: Floats, kind: torch.dtype, norm: Floats | None = None, act: int = 0, fine: bool = False,
    joined: Any = None, odd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Values and what undoes their scale; of rows that do not lie on 16 bytes if `odd`."""
    n, cols = len(x), x.shape[1] // (2 if act else 1)
    rows = torch.zeros(n, x.shape[1] + odd)[:, odd:]
    rows.copy_(torch.tensor(x))
    values, undo = torch.zeros(n * (1 + fine), cols, dtype=kind), torch.ones(n)
    weight = None if norm is None else torch.tensor(norm)
    launch.prepare(MACHINE, rows, weight, EPS, act, fine, values, undo, joined)
    return values, undo


def undone(values: torch.Tensor, undo: torch.Tensor) -> Floats:
    """What they stand for, with what rounding had lost."""
    n = len(undo)
    total = (values.float() * undo.repeat(len(values) // n)[:, None]).view(-1, n, values.shape[1])
    return np.asarray(total.sum(0))


def expected(x: Floats, norm: Floats | None, act: int) -> Floats:
    if act:
        gate, up = np.split(x.astype(np.float64), 2, 1)
        x = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    if norm is None:
        return x
    return (x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS) * norm).astype(
        np.float32
    )


@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize("cols", [96, 70, 1300])
def test_rows_are_normed_activated_and_rounded(kind: torch.dtype, cols: int) -> None:
    x, norm = normal(3, cols) * np.array([[1], [1e5], [1e-6]], np.float32), normal(cols, seed=1)
    for weight in (None, norm):
        close(undone(*prepared(x, kind, weight)), expected(x, weight, 0), ROUNDING[kind])
    both = normal(3, 2 * cols)
    close(
        undone(*prepared(both, kind, act=SILU_MUL)), expected(both, None, SILU_MUL), ROUNDING[kind]
    )
    if kind is not torch.float32:
        fine = undone(*prepared(x, kind, norm, fine=True))
        close(fine, expected(x, norm, 0), {torch.float16: 1e-6, torch.bfloat16: 5e-5}[kind])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_neither_company_nor_place_nor_what_is_kept_changes_a_bit(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, norm = normal(3, 2500), normal(2500, seed=1)
    x[:, -2] = 1000  # the largest, behind what is kept
    want = prepared(x, kind, norm)
    for odd in (False, True):
        for kept in (1, 10):
            monkeypatch.setattr(launch, "MOST_KEPT", kept)
            for got, same in zip(prepared(x[1:2], kind, norm, odd=odd), want, strict=True):
                assert torch.equal(got, same[1:2])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_slices_are_added_alike_by_whoever_reads_them_first(kind: torch.dtype) -> None:
    n, rows = 3, 1100
    parts, into = torch.tensor(normal(5, n, rows)), torch.tensor(normal(n, rows, seed=1))
    bias, norm = torch.tensor(normal(rows, seed=2)), normal(rows, seed=3)
    scales = torch.tensor([0.5, 2.0, 1.0])
    x = Prepared(torch.zeros(n, 8, dtype=torch.float16), scales, n, False)
    total = into.clone()
    slices = Slices(MACHINE, parts, x, bias, True)
    slices.join(total)
    close(np.asarray(total), np.asarray(parts.sum(0) * scales[:, None] + bias + into), 1e-6)
    sums = torch.zeros(n, rows)
    fused = prepared(np.asarray(into), kind, norm, joined=slices.arguments(into, sums))
    assert torch.equal(sums, total)
    for got, want in zip(fused, prepared(np.asarray(total), kind, norm), strict=True):
        assert torch.equal(got, want)


def test_slices_of_rows_that_are_no_fours_and_of_what_rounding_had_lost() -> None:
    n, rows = 2, 71
    parts = torch.tensor(normal(3, 2 * n, rows))
    x = Prepared(torch.zeros(2 * n, 8), torch.ones(n), n, True)
    out = torch.zeros(n, rows)
    Slices(MACHINE, parts, x, None, False).join(out)
    close(np.asarray(out), np.asarray(parts.sum(0).view(2, n, rows).sum(0)), 1e-6)
