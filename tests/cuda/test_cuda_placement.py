"""Models partly on a GPU: what is planned is what is held, and what is computed is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.errors import BudgetError
from quire.models.loader import EXPERTS, Part
from quire.ops import Refused
from quire.placement.cuda_sizes import DescribedCuda, packed_bytes
from tests import random_hybrids
from tests.model_folders import TRAINED, model_folder

torch = pytest.importorskip("torch")
PROMPT = [(7 * i + 3) % 900 + 5 for i in range(600)]
SLACK = 50 << 20


def test_sizes_without_a_gpu_are_those_with_one() -> None:
    """Of every type, in rows that fill units and in rows that do not."""
    from quire.ops.cuda import matrices
    from quire.ops.cuda.formats import FORMATS

    for kind in FORMATS:
        for rows, cols in ((1, 256), (96, 512), (259, 768), (64, 1024)):
            try:
                told = packed_bytes(kind, rows, cols)
            except Refused:
                pytest.fail(f"type {kind} is not known without a GPU")
            assert told == FORMATS[kind].nbytes(rows, cols), (kind, rows, cols)
    several = [(12, 40, 256), (12, 24, 256), (14, 8, 256), (30, 5, 256)]
    assert DescribedCuda(1).packed_bytes(several) == matrices.packed_bytes(several)


def held(llm: quire.LLM) -> int:
    """Bytes of the GPU that the model has, whoever counts them."""
    return sum(d.budget.used for d in llm.devices if d.name.startswith("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAINED)
def test_every_number_of_layers(name: str, tmp_path: Path) -> None:
    """Logits but for rounding, equal bits within a plan, and bytes within 2% or 50 MiB."""
    path = model_folder(name, tmp_path)
    with quire.load(path, device="cpu", memory_budget="2GiB") as whole:
        wanted, n = whole.logits(PROMPT[:64]), whole.model.n_layers
    before = 0
    for layers in range(n + 2):
        settings: dict[str, Any] = {"memory_budget": "4GiB", "n_ctx": 1024}
        with quire.load(path, device="cuda", n_gpu_layers=layers, **settings) as llm:
            found = llm.logits(PROMPT[:64])
            assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()
            with llm.session() as session:
                session.append(PROMPT[:31]).append(PROMPT[31:64])
                assert np.array_equal(session.logits(), found[-1])
            made = llm.generate(PROMPT, max_tokens=32, ignore_eos=True).token_ids
            for way in ("ngram", "early-exit"):
                again = llm.generate(PROMPT, max_tokens=32, ignore_eos=True, speculate=way)
                assert again.token_ids == made
            planned = sum(d.total for d in llm.plan.devices if d.device.kind == "cuda")
            assert abs(planned - held(llm)) <= max(0.02 * planned, SLACK)
            weights = sum(
                sum(d.weights.values()) for d in llm.plan.devices if d.device.kind == "cuda"
            )
            assert weights >= before
            before = weights
            llm.memory.audit()
        assert {d.budget.used for d in llm.devices} == {0}


@pytest.mark.gpu
def test_experts_on_the_host(tmp_path: Path) -> None:
    config = random_hybrids.settings("Qwen3_5Moe")
    path = random_hybrids.write(tmp_path / "m", config, random_hybrids.tensors(config))
    with quire.load(path, device="cpu") as whole:
        wanted = whole.logits(PROMPT[:40] if whole.model.n_vocab > 900 else [5] * 40)
    with quire.load(path, device="cuda", n_cpu_moe=99, memory_budget="4GiB") as llm:
        assert llm.plan.device_of(Part(EXPERTS, 0)) == "cpu"
        found = llm.logits(PROMPT[:40] if llm.model.n_vocab > 900 else [5] * 40)
        assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.gpu
def test_two_budgets_on_one_gpu_and_resizing(tmp_path: Path) -> None:
    """A GPU that lost most of its memory to somebody else: it loads, runs and is resized."""
    path = model_folder("tiny-dense", tmp_path)
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(max(free - (3 << 30), 0), dtype=torch.uint8, device="cuda")
    try:
        with quire.load(path, device="cuda") as llm:
            for _ in range(3):
                llm.generate(PROMPT[:200], max_tokens=300, ignore_eos=True)
            used = llm.budget.used
            with pytest.raises(BudgetError):
                llm.resize({llm.device.name: 1000})
            llm.resize({llm.device.name: used + (256 << 20)})
            llm.generate(PROMPT[:200], max_tokens=50, ignore_eos=True)
            llm.memory.audit()
    finally:
        del taken
        torch.cuda.empty_cache()
