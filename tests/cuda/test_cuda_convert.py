"""Sessions that move between a CPU's memory and a GPU's: pages are put in order, and go on."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.devices.host import HostDevice
from quire.errors import SessionFileError
from quire.memory.batch import SeqTokens
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import StateLayout
from quire.memory.memory import Memory
from quire.models.page_kernels import recurrent_group, recurrent_kernels
from quire.ops import Ops
from tests.cuda.sides import GPU, close, cuda, reference
from tests.cuda.test_cuda_recurrent import CASES, inputs

Floats = NDArray[np.float32]
LAYERS = (0, 3)


def device_of(ops: Ops) -> Device:
    """The GPU, or the host for whatever runs there."""
    if GPU and ops is cuda():
        from quire.devices.cuda import CudaDevice

        return CudaDevice(Budget(1 << 28), ops)
    return HostDevice(Budget(1 << 28), ops)


class World:
    """A memory of recurrent layers on one device, and sequences of random inputs in it."""

    def __init__(self, ops: Ops, case: str) -> None:
        self.ops, self.device = ops, device_of(ops)
        self.layers: dict[int, Any] = {i: CASES[case](ops) for i in LAYERS}
        layout = StateLayout(recurrent_group(ops, "states", self.layers))
        kernels = recurrent_kernels(ops, self.layers)
        self.memory = Memory([RecurrentGroup(layout, self.device, kernels)])

    def take(self, seq: int, tokens: int, seed: int, kept: int | None = None) -> Floats:
        """Outputs of some more tokens, in all layers."""
        ids = np.zeros(tokens, np.int32)
        with self.memory.reserve([SeqTokens(seq, ids)]) as lease:
            batch = lease.ubatch
            self.memory.run(batch.work)
            view = batch.views["states"]
            there = self.device.group("states", view, batch.positions, batch.seq_rows)
            x = inputs(tokens, self.layers[0].in_cols, seed)
            states: Any = there.pages
            out = [
                self.ops.numpy(self.ops.recur(self.ops.array(x), layer, states, *there.offsets[i]))
                for i, layer in self.layers.items()
            ]
            lease.commit({seq: tokens if kept is None else kept})
        return np.concatenate(out, 1)

    def moved_to(self, ops: Ops, case: str) -> World:
        """The same on another device, through a file."""
        file, other = BytesIO(), World(ops, case)
        self.memory.state_write(file)
        file.seek(0)
        other.memory.state_read(file)
        other.memory.audit()
        return other


@pytest.mark.parametrize("case", ["odd delta", "tiled", "odd ssd", "wide"] if GPU else ["odd ssd"])
@pytest.mark.parametrize("to_gpu", [True, False])
def test_states_and_logs_go_on_elsewhere(case: str, to_gpu: bool) -> None:
    here, there = (reference(), cuda()) if to_gpu else (cuda(), reference())
    first, plain = World(here, case), World(reference(), case)
    for world in (first, plain):
        world.take(0, 23, 1)
        world.memory.seq_cp(0, 1)
        world.take(0, 12, 2)  # a log that goes on behind a multiple of its length, on CPUs
        world.take(1, 1, 3)
        world.memory.checkpoint_save(0, "here")
    moved = first.moved_to(there, case)
    for seq, tokens, seed in ((0, 3, 4), (1, 2, 5), (0, 30, 6), (1, 16, 7)):
        close(moved.take(seq, tokens, seed), plain.take(seq, tokens, seed), 1e-4)
    for world in (moved, plain):
        world.memory.checkpoint_restore(1, "here")
    close(moved.take(1, 2, 8), plain.take(1, 2, 8), 1e-4)
    moved.memory.audit()


def test_what_cannot_be_converted_is_refused() -> None:
    world, other = World(cuda(), "odd delta"), World(reference(), "tiled")
    world.take(0, 3, 1)
    file = BytesIO()
    world.memory.state_write(file)
    for target in (other, World(cuda(), "tiled")):
        file.seek(0)
        with pytest.raises(SessionFileError, match="another layout"):
            target.memory.state_read(file)
        assert target.memory.seqs == []
