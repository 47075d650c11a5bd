"""A GPU that the host plays: what is said of devices by name holds where there is no real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.devices import cuda
from quire.devices.budget import Budget
from quire.devices.host import HostDevice
from quire.models.loader import MIXER, OUTPUT, Part
from quire.ops.cpu import CpuOps
from tests import session_kinds

IDS = [int(i) for i in np.random.default_rng(6).integers(3, 250, 100)]


class Played(HostDevice):
    """The host's memory and kernels under the name of a GPU."""

    def __init__(self, budget: Budget, index: int = 0, exact_batches: bool = True) -> None:
        super().__init__(budget, CpuOps(1), f"cuda:{index}")


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda, "CudaDevice", Played)
    monkeypatch.setattr(cuda, "free_bytes", lambda index=0: (8 << 30, 8 << 30, False))


@pytest.mark.parametrize("kind", ["dense", "hybrid", "moe"])
def test_every_number_of_layers(kind: str, tmp_path: Path) -> None:
    """With names short and long, and a long prompt whose weights may pass through."""
    path = session_kinds.write(kind, tmp_path)
    with quire.load(path, device="cpu", threads=1) as whole:
        wanted, n = whole.logits(IDS), whole.model.n_layers
    for layers in range(n + 2):
        for device, exact in (("cuda", True), ("cuda:0", False)):
            settings: dict[str, Any] = {"device": device, "exact_batches": exact, "threads": 1}
            with quire.load(path, n_gpu_layers=layers, **settings) as llm:
                assert np.array_equal(llm.logits(IDS), wanted)
                assert np.array_equal(llm.logits(IDS), wanted)
                plan = llm.plan
                assert {d.name for d in llm.devices} == {
                    one.device.name for one in plan.devices if one.parts
                }
                if layers:
                    assert plan.device_of(Part(OUTPUT)) == llm.device.name == "cuda:0"
                for one in plan.devices:
                    if one.device.kind == "cuda":  # only a device with the whole model records
                        assert bool(one.graphs) == (layers == n + 1)
                        held = llm.device.budget.breakdown["weights"]
                        assert held == sum(one.weights.values())
            assert {d.budget.used for d in llm.devices} == {0}


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_budget_is_that_of_the_gpu_that_it_names(device: str, name: str, tmp_path: Path) -> None:
    path = session_kinds.write("dense", tmp_path)
    with quire.load(path, device=device, memory_budget={name: "300MiB"}, threads=1) as llm:
        assert llm.device.name == "cuda:0" and llm.budget.limit == 300 << 20
        llm.resize({"cuda:0": "400MiB"})
        assert llm.plan.device_of(Part(MIXER, 0)) == "cuda:0"
