"""Whole steps give what plain ones give: filled up, one behind the other, sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.devices.host import HostDevice
from quire.memory.batch import SeqTokens
from quire.memory.build import build_memory
from quire.models.registry import open_weights
from quire.ops import Draw
from quire.ops.cuda import steps
from quire.ops.cuda.stage import DEPTH, Drawn, Stage
from quire.placement.blueprint import Blueprint
from tests import tiny
from tests.cuda.sides import GPU, cuda, same_bits

PROMPTS = {0: 5, 1: 3, 2: 2}
"""Sequences, and the tokens that each begins with."""


def device() -> Device:
    """The GPU, or the host with the GPU's operations, interpreted."""
    if GPU:
        from quire.devices.cuda import CudaDevice

        return CudaDevice(Budget(1 << 30))
    return HostDevice(Budget(1 << 28), cuda())


class World:
    """A small model with a memory of its own."""

    def __init__(self, path: Path) -> None:
        from quire.config import LoadConfig
        from quire.engine.runner import Runner

        settings = LoadConfig(n_ctx=64)
        self.device = device()
        with open_weights(path) as file:
            self.model = Blueprint.read(file, self.device.ops, settings).load(None)
        groups, kernels = self.model.groups, self.model.kernels
        self.memory = build_memory(groups, self.device, settings, kernels, 64)
        self.runner = Runner(self.model, self.device)
        self.steps = steps.Steps(self.model, self.device.ops)

    def plain(self, tokens: dict[int, list[int]]) -> Any:
        """Logits of all rows of a step."""
        with self.lease(tokens) as lease:
            rows = np.arange(len(lease.tokens), dtype=np.int32)
            found = self.device.ops.numpy(self.runner.forward_rows(lease, rows)).copy()
            lease.commit({seq: len(ids) for seq, ids in tokens.items()})
        return found

    def whole(
        self, tokens: dict[int, list[int]], rows: list[int], sources: list[int] | None = None,
        how: tuple[float, int, float] = (0.0, 0, 1.0),
    ) -> tuple[Any, Any]:  # fmt: skip
        """The same by a whole step, and the tokens that follow, as if they were chosen after it."""
        ops: Any = self.device.ops
        samplers = [ops.sampler(*how) for _ in rows]
        uniforms = 0.1 * (1 + np.arange(len(rows)))
        with self.lease(tokens) as lease:
            groups = {}
            for name, view in lease.views.items():
                bound = self.device.bound(name)
                groups[name] = steps.Group(view, bound.bases, bound.layout.by_layer)
            found = self.steps.run(
                lease.tokens, lease.positions, lease.seq_rows, groups, np.array(rows, np.int32),
                [Draw(*each) for each in zip(samplers, uniforms.tolist(), strict=True)],
                None if sources is None else np.array(sources, np.int32),
            )  # fmt: skip
            assert found is not None
            logits, drawn = found
            lease.commit({seq: len(ids) for seq, ids in tokens.items()})
            ids = drawn.read()
            after = ops.sample(logits, np.arange(len(rows), dtype=np.int32), samplers, uniforms)
            assert ids.tolist() == after.tolist()
            return ops.numpy(logits)[: len(rows)].copy(), ids

    def lease(self, tokens: dict[int, list[int]]) -> Any:
        """Room for a step."""
        entries = [SeqTokens(seq, np.array(ids, np.int32)) for seq, ids in tokens.items()]
        return self.memory.reserve(entries)


@pytest.mark.parametrize("how", [(0.0, 0, 1.0), (0.8, 0, 1.0), (0.8, 9, 0.9)])
def test_whole_steps_are_plain_ones(tmp_path: Path, how: tuple[float, int, float]) -> None:
    path = tmp_path / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=128))
    want, got = World(path), World(path)
    prompts = {seq: [3 + seq + i for i in range(n)] for seq, n in PROMPTS.items()}
    plain = want.plain(prompts)
    last = (np.cumsum(list(PROMPTS.values())) - 1).tolist()
    logits, ids = got.whole(prompts, last, how=how)
    same_bits(logits, plain[last])
    if how[0] == 0:
        assert ids.tolist() == plain[last].argmax(-1).tolist()
    # Three steps, each with the tokens that the one before chose; one sequence drops out.
    going = list(PROMPTS)
    sources = list(range(len(going)))
    for round in range(3 if GPU else 2):
        known = {seq: [int(ids[row])] for seq, row in zip(going, sources, strict=True)}
        plain = want.plain(known)
        unread = {seq: [0] for seq in going}
        rows = list(range(len(going)))
        logits, ids = got.whole(unread, rows, sources, how)
        same_bits(logits, plain)
        sources = list(range(len(going)))
        if round == 0:
            going, sources = going[1:], sources[1:]


def test_what_passes_to_and_from_steps_is_each_ones_own() -> None:
    """More launches than there are slots, each read after the next one was launched."""
    machine: Any = cuda().machine
    stage = Stage(machine, 1500, 7)
    last = torch.zeros(64, dtype=torch.int32, device=machine.device)
    late = None
    for turn in range(2 * DEPTH + 1):
        columns = [np.arange(1000, dtype=np.int32) + turn, np.full((5, 50), turn, np.int64)]
        stage.put(columns)
        stage.take()
        last.copy_(stage.block[turn : turn + 64])
        stage.give(last)
        found = Drawn(*stage.launched(5), None)
        if GPU:
            torch.cuda.synchronize()
        assert stage.block.cpu().numpy()[1000:].view(np.int64).tolist() == [turn] * 250
        if late is not None:
            assert late.read().tolist() == [2 * (turn - 1) + i for i in range(5)]
        late = found


@pytest.mark.parametrize("layers", [1, 2])
def test_the_rest_of_a_step_is_a_step(tmp_path: Path, layers: int) -> None:
    """Of a model whose first layers are on the host: the bits of plain steps on both devices."""
    from quire.config import LoadConfig
    from quire.engine.runner import Runner
    from quire.models.loader import Part, Place
    from quire.ops.cpu import CpuOps

    path, here = tmp_path / "tiny.gguf", device()
    tiny.write(path, tiny.Tiny(context=128, layers=3))
    host = HostDevice(Budget(1 << 28), CpuOps(1), "host")
    here.name = "gpu"

    def place(part: Part) -> Place:
        first = part.kind == "embedding" or 0 <= part.layer < 3 - layers
        device = host if first else here
        return Place(device.name, device.ops)

    settings = LoadConfig(n_ctx=64)
    with open_weights(path) as file:
        model = Blueprint.read(file, here.ops, settings, place).load(None)
    away = {name: host for name in model.kernels if name.endswith("host")}
    memory = build_memory(model.groups, here, settings, model.kernels, 64, away)
    runner = Runner(model, here, host, elsewhere=away)
    assert runner._first == 3 - layers and not runner.flies
    rest = steps.Steps(model, here.ops, runner._first)
    ids = list(range(3, 12))
    found: dict[str, list[Any]] = {"plain": [], "rest": []}
    for way in found:
        memory.clear(True)
        for at, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
            entry = SeqTokens(0, np.array(ids[at:end], np.int32))
            with memory.reserve([entry]) as lease:
                rows = np.arange(end - at, dtype=np.int32)
                if way == "plain":
                    logits: Any = runner.forward_rows(lease, rows)
                else:
                    ubatch = lease.ubatch
                    x = runner._enter(ubatch)
                    bound = {name: here.bound(name) for name in ubatch.views if name not in away}
                    groups = {
                        name: steps.Group(ubatch.views[name], each.bases, each.layout.by_layer)
                        for name, each in bound.items()
                    }
                    made = rest.run(
                        ubatch.tokens, ubatch.positions, ubatch.seq_rows, groups, rows,
                        [None] * len(rows), None, x,
                    )  # fmt: skip
                    assert made is not None
                    logits = made[0]
                found[way].append(here.ops.numpy(logits)[: end - at].copy())
                lease.commit({0: end - at})
    for plain, whole in zip(found["plain"], found["rest"], strict=True):
        same_bits(plain, whole)
