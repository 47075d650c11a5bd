"""Whole models: the logits of the reference, and the same ones however tokens are batched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.config import LoadConfig
from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.devices.host import HostDevice
from quire.engine.runner import Runner
from quire.memory.batch import SeqTokens
from quire.memory.build import build_memory
from quire.models.registry import open_weights
from quire.placement.blueprint import Blueprint
from tests.cuda.sides import GPU, cuda, reference, same_bits

MODELS = Path(__file__).parents[1] / "data" / "models"
TRAINED = sorted(path.parent.name for path in MODELS.glob("*/golden.json"))
STEPS = [{0: 21, 1: 3}, {0: 1, 1: 14}, {1: 40}, {0: 5}, *[{0: 1, 1: 1}] * 20]
"""New tokens by sequence: prompts, pieces of prompts, then enough of single ones to fold a log."""
Logits = dict[int, NDArray[np.float32]]


def device(where: str) -> Device:
    """The reference on the host, or the GPU with its own memory."""
    if where == "reference":
        return HostDevice(Budget(1 << 28), reference(), "reference")
    if not GPU:
        return HostDevice(Budget(1 << 28), cuda(), "interpreted")
    from quire.devices.cuda import CudaDevice

    return CudaDevice(Budget(1 << 31), cuda(), granule=2 << 20)


def logits(name: str, where: str, steps: list[dict[int, int]], kind: str) -> Logits:
    """The logits of each sequence's tokens, one after the other."""
    rng = np.random.default_rng(3)
    texts = {seq: rng.integers(3, 4000, 100).astype(np.int32) for seq in range(4)}
    done = {seq: 0 for seq in texts}
    found: dict[int, list[NDArray[np.float32]]] = {seq: [] for seq in texts}
    here = device(where)
    settings = SimpleNamespace(
        page_tokens=16, type_k=kind, type_v=kind, kv_cache_tokens=None, kv_cache_demand_paged=True,
        swa_full=False,
    )  # fmt: skip
    with open_weights(MODELS / name) as file:
        chosen = {} if name == "tiny-recurrent" else {"type_k": kind, "type_v": kind}
        model = Blueprint.read(file, here.ops, LoadConfig(**chosen)).load()
        memory = build_memory(model.groups, here, settings, model.kernels)
        runner = Runner(model, here)
        for step in steps:
            work = [
                SeqTokens(seq, texts[seq][done[seq] : done[seq] + n]) for seq, n in step.items()
            ]
            with memory.reserve(work) as lease:
                rows = np.arange(sum(step.values()), dtype=np.int32)
                out = here.ops.numpy(runner.forward_rows(lease, rows))
                lease.commit(dict(step))
            at = 0
            for seq, n in step.items():
                found[seq].append(out[at : at + n].copy())
                done[seq] += n
                at += n
        memory.close()
    return {seq: np.concatenate(parts) for seq, parts in found.items() if parts}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_logits_are_the_references(name: str, kind: str) -> None:
    if name == "tiny-recurrent" and kind == "f16":
        pytest.skip("has no K and V")
    got, want = (logits(name, where, STEPS, kind) for where in ("cuda", "reference"))
    for seq, theirs in want.items():
        scale = np.abs(theirs - theirs.mean(-1, keepdims=True)).max()
        errors = np.sort(np.abs(got[seq] - theirs).max(-1) / scale)
        middle, worst = errors[len(errors) // 2], errors[-1]
        print(f"{name} {kind} sequence {seq}: median {middle:.1e}, worst {worst:.1e} of the range")
        # A router may choose another expert where two are close: single tokens differ more then.
        assert middle < 5e-3 and worst < (0.2 if name == "tiny-moe" else 2e-2)
        assert (got[seq].argmax(-1) == theirs.argmax(-1)).mean() > 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAINED)
def test_batches_and_chunks_change_no_bit(name: str) -> None:
    kind = "f32" if name == "tiny-recurrent" else "f16"
    alone = logits(name, "cuda", [{0: 60}], kind)[0]
    same_bits(logits(name, "cuda", [{0: 1}] * 60, kind)[0], alone)
    mixed = [{0: 21, 1: 3}, {0: 1, 2: 14}, {0: 5, 3: 70}, *[{0: 1, 1: 1}] * 20, {0: 13}]
    same_bits(logits(name, "cuda", mixed, kind)[0], alone)


def test_one_small_model_runs() -> None:
    """Where there is no GPU, the interpreter shows that all operations fit together."""
    kind = "f32"
    got, want = (logits("tiny-dense", w, [{0: 3}, {0: 1}], kind)[0] for w in ("cuda", "reference"))
    scale = np.abs(want - want.mean(-1, keepdims=True)).max()
    assert np.abs(got - want).max() < 2e-2 * scale
