"""One result whatever the batch: alone, in company, in chunks; whoever computes it, and how."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Heads
from quire.ops.cuda import prompts, recur_native
from tests.cuda.launches import recording
from tests.cuda.pages_rig import Rig, full_rope
from tests.cuda.sides import GPU, cuda, same_bits
from tests.cuda.test_cuda_recurrent import CASES as LAYERS
from tests.cuda.test_cuda_recurrent import in_pieces, inputs


def in_chunks(
    make: Rig, qkv: NDArray[np.float32], chunk: int, company: int = 0
) -> NDArray[np.float32]:
    """The outputs of sequence 0, computed in chunks, with other sequences or without."""
    given = make.heads, make.type_k, make.type_v, make.page_tokens, make.rope, make.norms
    rig = Rig(*given, align=256)  # as prompt.cu needs it
    out = []
    for i in range(0, len(qkv), chunk):
        mine = qkv[i : i + chunk]
        others = [(seq, 1 + seq % 3) for seq in range(1, company + 1)]
        step = rig.tables.add([(0, len(mine)), *others])
        extra = rig.values(sum(n for _, n in others), i + 7)
        out.append(rig.got.run(step, np.concatenate([mine, extra]))[: len(mine)])
    return np.concatenate(out)


SAME = [
    (Heads(9, 3, 64, 64, scale=0.125), "f16", "f16", 16),
    (Heads(9, 3, 64, 64, scale=0.125, window=50, softcap=20.0), "f16", "f16", 32),
    (Heads(4, 4, 40, 60, scale=0.2), "bf16", "f32", 16),
    (Heads(5, 1, 96, 32, scale=0.2), "q4_0", "q8_0", 64),
    (Heads(8, 2, 128, 128, scale=0.1), "bf16", "bf16", 16),
    (Heads(4, 4, 128, 128, scale=0.1, window=150), "f16", "f16", 32),
    (Heads(8, 8, 256, 256, scale=0.1), "f16", "q8_0", 16),
]


@pytest.mark.parametrize("case", SAME if GPU else SAME[:1])
def test_chunks_and_company_change_no_bit(case: tuple[Heads, str, str, int]) -> None:
    rig = Rig(*case, rope=full_rope(case[0].head_dim_k))
    qkv = rig.values(700 if GPU else 40)
    want = in_chunks(rig, qkv, len(qkv))
    for chunk, company in ((1, 0), (7, 3), (64, 0), (200, 2)) if GPU else ((3, 2),):
        same_bits(in_chunks(rig, qkv, chunk, company), want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [SAME[4], SAME[5], (Heads(32, 8, 128, 128, scale=0.1), "f16", "f16", 16)]
)
def test_the_language_of_prompts_changes_no_bit(case: tuple[Heads, str, str, int]) -> None:
    """Pages are poisoned behind the last token, and some tiles are not full."""
    rig, outs = Rig(*case, rope=full_rope(128)), []
    for least in (1, 1 << 30):  # blocks from which on it is CUDA C++
        with mock.patch.object(prompts, "_BLOCKS", least), recording() as launched:
            outs.append(in_chunks(rig, rig.values(333), 150, company=2))
        assert ("prompt.cu attend_prompt" in launched) == (least == 1 and cuda().machine.hopper)
    same_bits(*outs)


def test_pages_dropped_before_the_window_change_no_bit() -> None:
    outs = []
    for dropped in (0, 3):
        rig = Rig(Heads(4, 2, 64, 64, scale=0.2, window=20))
        rig.got.run(rig.tables.add([(0, 90)]), rig.values(90))
        rig.tables.tables[0] = rig.tables.tables[0][dropped:]
        rig.tables.length[0] -= 16 * dropped
        rig.tables.first[0] = 16 * dropped
        outs.append(rig.got.run(rig.tables.add([(0, 3)]), rig.values(3, 1)))
    same_bits(*outs)


def test_holes_of_others_change_no_bit() -> None:
    outs = []
    for holes in (False, True):
        rig = Rig(Heads(4, 2, 64, 64, scale=0.2))
        rig.got.run(rig.tables.add([(0, 40), (1, 30)]), rig.values(70))
        if holes:
            rig.tables.slot_positions = {1: [-1, *range(1, 60)]}
        outs.append(rig.got.run(rig.tables.add([(0, 3), (1, 2)]), rig.values(5, 1))[:3])
    same_bits(*outs)


def test_attention_without_storing_reads_what_was_stored() -> None:
    rig = Rig(Heads(4, 2, 64, 32, scale=0.2), rope=full_rope(64))
    step = rig.tables.add([(0, 20), (1, 3)])
    qkv = rig.values(23)
    want = rig.got.run(step, qkv)
    before = rig.got.bytes.read()
    same_bits(rig.got.run(step, np.ascontiguousarray(qkv[:, : 4 * 64]), store=False), want)
    np.testing.assert_array_equal(rig.got.bytes.read(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["delta", "even ssd", "large delta", "large and wide delta"])
def test_how_blocks_share_states_changes_no_bit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows at a time as fit or few; one part of a state, or all of them in a block."""
    layer = LAYERS[case](cuda())
    x = inputs(12, layer.in_cols)
    want = in_pieces(case, x, [12])
    monkeypatch.setattr(recur_native, "MANY", 2)
    for processors in (1, 1 << 20):
        columns = recur_native._columns(layer, 1, processors) if layer.dv % 16 == 0 else 16
        for all_parts in (False, True):
            with monkeypatch.context() as m:
                m.setattr(recur_native, "_columns", lambda *_, c=columns: c)
                m.setattr(recur_native, "_each", lambda n, *_, a=all_parts: n if a else 1)
                same_bits(in_pieces(case, x, [1] * 12), want)
                same_bits(in_pieces(case, x, [5, 7], company=True), want)
