"""The recurrent kernels in CUDA C++, run without a GPU: see host.h for what that shows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.ops.cuda import recur_native
from tests.cuda import test_cuda_recurrent as recurrent
from tests.cuda.host_kernels import COMPILER, HostNative
from tests.cuda.sides import GPU, close, cuda, reference, same_bits

pytestmark = pytest.mark.skipif(GPU or not COMPILER, reason="a GPU, or no compiler")
CASES = ["delta", "long delta", "even ssd"]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that are launched natively; the others are interpreted."""
    host, taken, gpu = HostNative(132), recur_native.takes, SimpleNamespace(interpreted=False)
    monkeypatch.setattr(recur_native, "native", lambda _: host)
    monkeypatch.setattr(recur_native, "takes", lambda _, *layer: taken(gpu, *layer))
    return host.asked


@pytest.mark.parametrize("case", CASES)
def test_they_match_the_reference(case: str, native: list[str]) -> None:
    recurrent.test_matches_the_reference(case)
    assert set(native) == set(recur_native.FILES) - {"decode"}


@pytest.mark.parametrize("case", CASES[1:])
def test_pieces_company_and_drafts_change_no_bit(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = recurrent.inputs(13, recurrent.CASES[case](cuda()).in_cols)
    want = recurrent.in_pieces(case, x, [13])
    for pieces in ([1] * 13, [2, 8, 3]):
        same_bits(recurrent.in_pieces(case, x, pieces), want)
    same_bits(recurrent.in_pieces(case, x, [6, 7], company=True), want)
    same_bits(recurrent.drafted(case, x, 4), want)
    monkeypatch.setattr(recur_native, "MANY", 2)
    monkeypatch.setattr(recur_native, "_each", lambda parts, *_: parts)
    same_bits(recurrent.in_pieces(case, x, [1] * 13), want)
    same_bits(recurrent.in_pieces(case, x, [6, 7], company=True), want)


def test_what_fills_a_step_up_writes_nothing() -> None:
    recurrent.test_padding_writes_nothing()
    recurrent.test_a_shape_that_is_filled_up_computes_the_same()


@pytest.mark.parametrize("dk, dv, columns", [(256, 64, 64), (224, 48, 16)])
def test_states_of_any_width_and_blocks_of_any_rows(
    dk: int, dv: int, columns: int, native: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, through blocks that have one part of a state or several; or all at once."""
    monkeypatch.setitem(recurrent.CASES, "wide", recurrent.delta(2, 2, dk, dv))
    layer = recurrent.CASES["wide"](cuda())
    assert recur_native._columns(layer, 1, 1) == columns
    x = recurrent.inputs(7, layer.in_cols)
    want = recurrent.in_pieces("wide", x, [7])
    sides = recurrent.Side(reference(), recurrent.CASES["wide"])
    close(want, sides.run([(-1, 0, -1, 0, -1, 0)], [7], x), 2e-5)
    for parts in (1, 2):
        monkeypatch.setattr(recur_native, "_columns", lambda *_: columns)
        monkeypatch.setattr(recur_native, "_each", lambda n, *_, each=parts: each)
        native.clear()
        same_bits(recurrent.in_pieces("wide", x, [2, *[1] * 5]), want)
        assert "decode" in native
