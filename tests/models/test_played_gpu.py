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
from quire.ops.batch import Batch
from quire.ops.cpu import CpuOps
from tests import session_kinds
from tests.choosing import WAYS
from tests.flying import Late, draw_all

IDS = [int(i) for i in np.random.default_rng(6).integers(3, 250, 100)]


class PlayedSteps:
    """Whole steps, or the rest of them from a layer on, as a GPU is told of them."""

    seconds_per_token = 0.0
    replayed = False

    def __init__(self, device: Any, model: Any, first: int) -> None:
        self._device, self._model, self._first = device, model, first
        self.ran, self._last = 0, np.zeros(512, np.int32)

    def forget(self) -> bool:
        return False

    def run(
        self, tokens: Any, positions: Any, seq_rows: Any, views: Any, rows: Any, draws: Any,
        sources: Any, x: Any = None,
    ) -> Any:  # fmt: skip
        device, model = self._device, self._model
        before = None
        if sources is not None:
            assert not self._first, "layers elsewhere need the tokens"
            before = self._last[sources[rows]]
            tokens = np.where(sources >= 0, self._last[sources], tokens).astype(np.int32)
        groups = {name: device.group(name, view, positions, seq_rows)
                  for name, view in views.items()}  # fmt: skip
        batch = Batch(tokens, positions, groups)
        assert (x is None) == (self._first == 0)
        x = model.embed(batch) if x is None else x
        x = model.run(x, batch, self._first, model.n_layers, device.ops)
        logits = model.logits(device.ops.take_rows(x, rows))
        ids, reports = draw_all(device.ops, logits, draws, before)
        self._last[: len(ids)] = ids
        self.ran += 1
        return logits, Late(self, ids, reports)

    def read(self, ids: Any) -> Any:
        return ids


class Played(HostDevice):
    """The host's memory and kernels under the name of a GPU."""

    def __init__(self, budget: Budget, index: int = 0, exact_batches: bool = True) -> None:
        super().__init__(budget, CpuOps(1), f"cuda:{index}")

    def steps(self, model: Any, first: int = 0) -> Any:
        return PlayedSteps(self, model, first)


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
                    if one.device.kind == "cuda":  # steps are recorded from a layer on
                        assert bool(one.graphs) == (layers > 1)
                        held = llm.device.budget.breakdown["weights"]
                        assert held == sum(one.weights.values())
            assert {d.budget.used for d in llm.devices} == {0}


@pytest.mark.parametrize("kind", ["dense", "hybrid", "moe"])
def test_the_rest_of_a_step_is_the_gpus_own(kind: str, tmp_path: Path) -> None:
    """From the first layer on that is all there; what is generated is the same, drafted or not."""
    path = session_kinds.write(kind, tmp_path)
    with quire.load(path, device="cpu", threads=1) as whole:
        n = whole.model.n_layers
        wanted = whole.generate([IDS[:20], IDS[20:50]], max_tokens=12, ignore_eos=True)
        hot = whole.generate(IDS, max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
        odd = whole.generate(IDS[:20], max_tokens=12, seed=3, ignore_eos=True, **WAYS["all"])
    settings: list[dict[str, Any]] = [{"n_gpu_layers": layers} for layers in range(1, n + 2)]
    if kind == "moe":
        settings.append({"n_cpu_moe": 1})
    for each in settings:
        with quire.load(path, device="cuda", threads=1, **each) as llm:
            steps: Any = llm.engine.runner.steps
            first = llm.model.first_of(llm.ops)
            assert (steps is None) == (first == n) and llm.engine.runner.flies == (first == 0)
            found = llm.generate([IDS[:20], IDS[20:50]], max_tokens=12, ignore_eos=True)
            for one in llm.devices if first else ():  # all arrays are paid
                assert one.ops.compute_bytes == one.budget.breakdown["compute"]
            assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
            again = llm.generate(IDS, max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
            assert again.token_ids == hot.token_ids
            again = llm.generate(IDS[:20], max_tokens=12, seed=3, ignore_eos=True, **WAYS["all"])
            assert again.token_ids == odd.token_ids and again.logprobs == odd.logprobs
            for way in ("ngram", "early-exit"):
                drafted = llm.generate(IDS[:20], max_tokens=12, ignore_eos=True, speculate=way)
                assert drafted.token_ids == wanted[0].token_ids
            assert steps is None or steps.ran > 12
            llm.memory.audit()


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_budget_is_that_of_the_gpu_that_it_names(device: str, name: str, tmp_path: Path) -> None:
    path = session_kinds.write("dense", tmp_path)
    with quire.load(path, device=device, memory_budget={name: "300MiB"}, threads=1) as llm:
        assert llm.device.name == "cuda:0" and llm.budget.limit == 300 << 20
        llm.resize({"cuda:0": "400MiB"})
        assert llm.plan.device_of(Part(MIXER, 0)) == "cuda:0"


class Behind(PlayedSteps):
    """A GPU that works behind its host's back: here, when somebody asks for what it makes."""

    def __init__(self, device: Any, model: Any, first: int) -> None:
        super().__init__(device, model, first)
        self.told: list[str] = []
        self._waiting: list[Any] = []
        run = model.run

        def noted(x: Any, batch: Any, start: int, stop: int, on: Any = None) -> Any:
            self.told.append("host" if start == 0 else "GPU")
            return run(x, batch, start, stop, on)

        model.run = noted

    def run(self, *step: Any) -> Any:
        self._waiting.append(step)
        if not len(step[4]):  # rows
            return None, Late(self, np.empty(0, np.int32), {})
        *before, last = self._waiting
        self._waiting = []
        for one in before:
            super().run(*one)
        return super().run(*last)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_host_computes_a_chunk_while_the_gpu_has_the_last(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the GPU before a prompt has ended, and bits are the same."""
    path = session_kinds.write(kind, tmp_path)
    with quire.load(path, device="cpu", threads=1) as whole:
        wanted = whole.generate(IDS, max_tokens=5, ignore_eos=True).token_ids
    monkeypatch.setattr(Played, "steps", lambda self, model, first=0: Behind(self, model, first))
    with quire.load(path, device="cuda", n_gpu_layers=2, threads=1) as llm:
        llm.engine.scheduler.max_tokens = 32  # of a step
        steps: Any = llm.engine.runner.steps
        made = llm.generate(IDS, max_tokens=5, ignore_eos=True).token_ids
        chunks = steps.told.index("GPU")  # 32 + 32 + 32 + 4 tokens, or where pages are cut
        assert chunks >= 4 and steps.told[: 2 * chunks] == ["host"] * chunks + ["GPU"] * chunks
        assert made == wanted
        llm.memory.audit()


class Recorded(CpuOps):
    """Arrays of recorded steps, which only go with them."""

    kept = 0

    @property
    def compute_bytes(self) -> int:
        return self.cpu.arena_bytes + self.kept

    def trim(self) -> None:
        """All of them are used."""


class Recording(PlayedSteps):
    """Steps that hold memory once they ran."""

    forgotten = 0

    def run(self, *step: Any) -> Any:
        self._device.ops.kept = self._device.keeps
        return super().run(*step)

    def forget(self) -> bool:
        had, self._device.ops.kept = self._device.ops.kept > 0, 0
        self.forgotten += had
        return had


class Tight(Played):
    """A GPU whose recorded steps take so much."""

    keeps = 0

    def __init__(self, budget: Budget, index: int = 0, exact_batches: bool = True) -> None:
        HostDevice.__init__(self, budget, Recorded(1), f"cuda:{index}")

    def steps(self, model: Any, first: int = 0) -> Any:
        return Recording(self, model, first)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_recorded_steps_give_way_to_a_context_that_was_planned(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are recorded again; a sequence that the budget has room for never fails."""
    path = session_kinds.write(kind, tmp_path)
    monkeypatch.setattr(cuda, "CudaDevice", Tight)
    settings: dict[str, Any] = {"device": "cuda", "n_gpu_layers": 3, "threads": 1, "n_ctx": 256}
    with quire.load(path, memory_budget="256MiB", **settings) as llm:
        wanted = llm.generate(IDS, max_tokens=150, ignore_eos=True).token_ids
        used = llm.device.budget.used
        pages = sum(v for k, v in llm.device.budget.breakdown.items() if k.startswith("pages"))
    assert pages > 1 << 14
    monkeypatch.setattr(Tight, "keeps", pages * 3 // 8)
    with quire.load(path, memory_budget="256MiB", **settings) as llm:
        llm.resize({"cuda:0": used + pages // 8})
        steps: Any = llm.engine.runner.steps
        with llm.session() as session:
            session.append(IDS)
            assert session.generate(max_tokens=150, ignore_eos=True).token_ids == wanted
        assert steps.forgotten > 0
        llm.memory.audit()


def test_the_slower_of_host_and_gpu_tells_how_long_prompts_take(tmp_path: Path) -> None:
    """They work at the same time: one at a chunk, the other at the one before."""
    path = session_kinds.write("dense", tmp_path)
    with quire.load(path, device="cuda", n_gpu_layers=2, threads=1) as llm:
        runner: Any = llm.engine.runner
        llm.logits(IDS)
        llm.generate(IDS, max_tokens=1)
        host = runner.seconds_per_token
        runner.steps.seconds_per_token = host / 2
        assert runner.seconds_per_token == host > 0
        runner.steps.seconds_per_token = host * 3
        assert runner.seconds_per_token == host * 3
