"""Whole models by the reference: the same logits as on the CPU, step by step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.config import LoadConfig
from quire.devices.budget import Budget
from quire.devices.host import HostDevice
from quire.engine.runner import Runner
from quire.memory.batch import SeqTokens
from quire.memory.build import build_memory
from quire.models.registry import open_weights
from quire.ops import Ops
from quire.placement.blueprint import Blueprint
from tests.model_folders import RANDOM, TRAINED, model_folder
from tests.ops.devices import ISAS, table

STEPS = [{0: 21, 1: 3}, {0: 1, 1: 14}, {1: 40}, {0: 5}, *[{0: 1, 1: 1}] * 20]
"""New tokens by sequence: prompts, pieces of prompts, then enough of single ones to fold a log."""
CHOICES = SimpleNamespace(
    page_tokens=16, type_k="f32", type_v="f32", kv_cache_tokens=None, kv_cache_demand_paged=True,
    swa_full=False,
)  # fmt: skip


def steps(folder: Path, ops: Ops) -> list[NDArray[np.float32]]:
    """The logits of every token, step by step."""
    rng = np.random.default_rng(3)
    found = []
    with open_weights(folder) as file:
        groups = Blueprint.read(file, ops, LoadConfig()).groups
        attends = any(group.kind != "recurrent" for group in groups)
        exact = LoadConfig(type_k="f32", type_v="f32") if attends else LoadConfig()
        model = Blueprint.read(file, ops, exact).load()
        device = HostDevice(Budget(1 << 28), ops)
        memory = build_memory(model.groups, device, CHOICES, model.kernels)
        runner = Runner(model, device)
        for step in STEPS:
            work = [
                SeqTokens(seq, rng.integers(3, 4000, n).astype(np.int32)) for seq, n in step.items()
            ]
            with memory.reserve(work) as lease:
                rows = np.arange(sum(step.values()), dtype=np.int32)
                found.append(ops.numpy(runner.forward_rows(lease, rows)).copy())
                lease.commit(dict(step))
        memory.close()
    return found


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_the_reference_runs_whole_models(name: str, tmp_path: Path) -> None:
    folder = model_folder(name, tmp_path)
    wanted, got = (steps(folder, table(each)) for each in ("reference", ISAS[-1]))
    for one, other in zip(wanted, got, strict=True):
        assert one.shape == other.shape
        scale = np.abs(one - one.mean(-1, keepdims=True)).max()
        assert np.abs(one - other).max() < 2e-5 * scale
