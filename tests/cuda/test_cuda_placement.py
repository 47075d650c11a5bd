"""Models partly on a GPU: what is planned is what is held, and what is computed is the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.config import LoadConfig
from quire.convert import FORMATS, convert
from quire.devices import cuda
from quire.errors import BudgetError
from quire.models.loader import DOWN, EXPERTS, Part
from quire.models.registry import open_weights
from quire.ops import Heads, Refused
from quire.placement.blueprint import Blueprint
from quire.placement.cuda_arrays import RehearsedCuda
from quire.placement.cuda_sizes import DescribedCuda, packed_bytes
from quire.placement.kernels import Step
from tests import random_hybrids
from tests.model_folders import MODELS, RANDOM, TRAINED, model_folder

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


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_memory_without_a_gpu_is_that_with_one(name: str, tmp_path: Path) -> None:
    """Logs of GPUs have what is derived of each token beside its inputs."""
    from quire.ops.cuda import CudaOps, Machine

    with open_weights(model_folder(name, tmp_path)) as file:
        told = [
            Blueprint.read(file, ops, LoadConfig()).memory
            for ops in (DescribedCuda(1), CudaOps(Machine(None)))
        ]
    assert told[0] == told[1]


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_stacked_matrices_are_planned_as_they_are_packed(name: str, tmp_path: Path) -> None:
    """Also where rows of two tensors share a tile: loading asserts it of every matrix."""
    from quire.ops.cuda import CudaOps, Machine

    path = tmp_path / "m.gguf"
    with open_weights(model_folder(name, tmp_path)) as file:
        convert(file, path, FORMATS["q8_0"])
    with open_weights(path) as file:
        model = Blueprint.read(file, CudaOps(Machine(None)), LoadConfig()).load()
    with open_weights(path) as file:
        assert (
            model.weight_bytes == Blueprint.read(file, DescribedCuda(1), LoadConfig()).weight_bytes
        )


def test_spans_without_a_gpu_are_those_with_one() -> None:
    """That prompts attend to in parallel, each of which takes memory."""
    from quire.ops.cuda.attention import spans_at_once, triton_tile
    from quire.ops.cuda.machine import power_of_two
    from quire.ops.cuda.paged import KINDS, Layer, PageShape

    rehearsed: Any = RehearsedCuda(None, hopper=False)
    shapes = ((32, 8), (16, 4), (9, 3), (1, 1), (64, 2))
    kinds = tuple(product(KINDS, KINDS))
    for counts, dim, types in product(shapes, (64, 128, 256), kinds):
        heads = Heads(*counts, dim, dim, scale=1.0)
        layer = Layer(heads, *(KINDS[kind] for kind in types), None, None, 1e-6)
        rehearsed.heads(heads, *types)
        for tokens, sequences, context in product((16, 48, 384, 512), (1, 3), (500, 2048, 40_960)):
            pages = power_of_two(-(-context // 16), 32)
            n = tokens * sequences
            shape = PageShape(n, sequences, pages, 16, 0, single=False, holes=0)
            programs = shape.tiles(triton_tile(layer)) * heads.n_kv_heads
            rehearsed.step = Step(tokens, sequences, context)
            assert rehearsed._spans(heads) == spans_at_once(programs, shape.spans)


def held(llm: quire.LLM) -> int:
    """Bytes of the GPU that the model has, whoever counts them."""
    return sum(d.budget.used for d in llm.devices if d.name.startswith("cuda"))


def close(found: Any, wanted: Any) -> None:
    """Rounding apart: a router may choose another expert for single tokens where two are close."""
    scale = np.abs(wanted - wanted.mean(-1, keepdims=True)).max()
    errors = np.abs(found - wanted).max(-1) / scale
    print(f"median {np.median(errors):.1e}, worst {errors.max():.1e} of the range")
    assert np.median(errors) < 0.015 and (errors < 0.02).mean() > 0.95, np.sort(errors)[-8:]


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
            close(found, wanted)
            with llm.session() as session:
                session.append(PROMPT[:31]).append(PROMPT[31:64])
                assert np.array_equal(session.logits(), found[-1])
            made = llm.generate(PROMPT, max_tokens=32, ignore_eos=True).token_ids
            for way in ("ngram", "early-exit"):
                again = llm.generate(PROMPT, max_tokens=32, ignore_eos=True, speculate=way)
                assert again.token_ids == made
            mine = [d for d in llm.plan.devices if d.device.kind == "cuda"]
            planned = sum(d.total for d in mine)
            assert abs(planned - held(llm)) <= max(0.02 * planned, SLACK)
            weights = sum(sum(d.weights.values()) for d in mine)
            assert weights >= before
            before = weights
            llm.memory.audit()
        assert {d.budget.used for d in llm.devices} == {0}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "away", ["_exps=cpu", "ffn_down_exps=cpu", "ffn_(gate|up|gate_up)_exps=cpu"]
)
def test_experts_on_the_host(away: str, tmp_path: Path) -> None:
    """All of them, or their first matrices, or their last one."""
    config = random_hybrids.settings("Qwen3_5Moe")
    path = random_hybrids.write(tmp_path / "m", config, random_hybrids.tensors(config))
    ids = PROMPT[:40]
    with quire.load(path, device="cpu") as whole:
        wanted = whole.logits(ids)
    with quire.load(path, device="cuda", override_tensor=away, memory_budget="4GiB") as llm:
        places = [llm.plan.device_of(Part(kind, 0)) for kind in (EXPERTS, DOWN)]
        assert places == [
            "cuda:0" if "down" in away else "cpu",
            "cuda:0" if "gate" in away else "cpu",
        ]
        close(llm.logits(ids), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid", "tiny-window"])
def test_a_session_moves_between_plans(name: str, tmp_path: Path) -> None:
    """Pages and states of CPU and GPU, put together anew; what follows differs by rounding."""
    path, settings = MODELS / name, {"memory_budget": "4GiB", "n_ctx": 256}
    with quire.load(path, device="cpu", **settings) as whole:
        wanted, n = whole.logits(PROMPT[:100]), whole.model.n_layers
    for before in range(n + 2):
        with quire.load(path, device="cuda", n_gpu_layers=before, **settings) as llm:
            session = llm.session().append(PROMPT[:77])
            session.checkpoint("mark")
            session.append(PROMPT[77:90])
            session.save(tmp_path / f"{before}.quire")
    for after in range(n + 2):
        with quire.load(path, device="cuda", n_gpu_layers=after, **settings) as llm:
            for before in range(n + 2):
                with llm.open(tmp_path / f"{before}.quire") as session:
                    assert session.exact == (before == after)
                    run = llm.engine.runner.tokens_run
                    close(session.append(PROMPT[90:100]).logits()[None], wanted[-1:])
                    assert llm.engine.runner.tokens_run == run + 10  # nothing computed again
                    session.rewind("mark")
                    close(session.append(PROMPT[77:100]).logits()[None], wanted[-1:])
                    llm.memory.audit()


@pytest.mark.gpu
def test_weights_pass_through_for_long_prompts(tmp_path: Path) -> None:
    """Layers of the host run on the GPU, but for rounding with the same logits."""
    settings: dict[str, Any] = {"device": "cuda", "n_gpu_layers": 2, "memory_budget": "4GiB"}
    for name in ("tiny-dense", "tiny-moe"):
        with quire.load(MODELS / name, device="cpu", memory_budget="2GiB") as whole:
            wanted = whole.logits(PROMPT[:400])
        with quire.load(MODELS / name, exact_batches=False, **settings) as llm:
            found = llm._streaming
            assert found is not None
            found.host_s = 1.0  # so it is worth trying
            close(llm.logits(PROMPT[:400]), wanted)
            assert found.runs > 0
            llm.memory.audit()
        assert {d.budget.used for d in llm.devices} == {0}


_ARENA = """
import random, torch
from quire.placement.cuda_arrays import TorchArena
torch.empty(1, device="cuda")
torch.cuda.empty_cache()
rng, arena, live = random.Random(SEED), TorchArena(), {}
for key in range(600):
    if live and rng.random() < 0.48:
        gone = rng.choice(list(live))
        arena.give(gone)
        del live[gone]
    floats = int(10 ** rng.uniform(1, 7))
    live[key] = torch.empty(floats, device="cuda")
    arena.take(key, floats)
    assert arena.held == torch.cuda.memory_reserved(), (key, floats, arena.held)
"""


@pytest.mark.gpu
def test_memory_is_taken_as_torch_takes_it() -> None:
    """Segment by segment, in processes that have nothing else."""
    for seed in range(3):
        script = _ARENA.replace("SEED", str(seed))
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.gpu
def test_the_driver_says_what_was_planned() -> None:
    """In processes of their own, the context and the code of kernels included."""
    script = Path(__file__).parents[2] / "bench" / "placement_bytes.py"
    cases = [f"{MODELS / name}:every" for name in TRAINED]
    ran = subprocess.run(
        [sys.executable, script, *cases, "--check"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.mark.gpu
def test_resizing_moves_what_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less: cached prefixes go, then sessions give way. What the driver has free follows."""
    slab = 2 << 20
    real = cuda.CudaMachine.__init__
    monkeypatch.setattr(cuda.CudaMachine, "__init__", lambda self, i, _: real(self, i, slab))
    kinds: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
    with quire.load(MODELS / "tiny-dense", device="cuda", memory_budget="1GiB", **kinds) as llm:
        resized(llm, "cuda:0", slab, lambda: int(torch.cuda.mem_get_info()[0]))


def resized(llm: quire.LLM, name: str, slab: int, free: Callable[[], int]) -> None:
    """Sessions of two slabs each, and as many cached prefixes, in less and less room."""
    prompts = [[(i * 7 + j) % 900 + 5 for j in range(1900)] for i in range(8)]
    sessions = [llm.session().append(ids) for ids in prompts[:3]]
    wanted = [session.logits() for session in sessions]
    for ids in prompts[3:]:
        llm.generate(ids, max_tokens=1, ignore_eos=True)
    assert llm.generate(prompts[7], max_tokens=1, ignore_eos=True).cached_tokens > 1800
    budget, full, before = llm.devices[0].budget, llm.devices[0].budget.used, free()
    pages = full - budget.breakdown["weights"] - budget.breakdown["compute"]
    llm.resize({name: full - pages * 4 // 8})  # the prefixes' share
    assert budget.used <= full - pages * 4 // 8
    assert free() - before >= pages * 4 // 8 - slab  # the driver has it back
    run = llm.engine.runner.tokens_run
    for session, logits in zip(sessions, wanted, strict=True):
        assert np.array_equal(session.logits(), logits)
    assert llm.engine.runner.tokens_run == run  # sessions did not give way to prefixes
    assert llm.generate(prompts[3], max_tokens=1, ignore_eos=True).cached_tokens == 0
    llm.forget()
    llm.resize({name: full - pages + 3 * slab})  # room for one
    assert free() - before >= pages - 4 * slab
    for _ in range(2):
        for session, logits in zip(sessions, wanted, strict=True):
            session.rewind(-1)
            session.append(prompts[sessions.index(session)][-1:])
            assert np.array_equal(session.logits(), logits)
        llm.memory.audit()
    with pytest.raises(BudgetError):
        llm.resize({name: budget.breakdown["weights"] + 1000})
    llm.resize({name: full})
    for session, logits in zip(sessions, wanted, strict=True):
        assert np.array_equal(session.logits(), logits)
        session.close()
    llm.memory.audit()


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
