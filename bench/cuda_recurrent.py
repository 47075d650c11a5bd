"""What a decode step of recurrent layers takes on a GPU, and what a checkpoint of them does.

The shape is that of Qwen3.5-27B: 48 layers of 16/48 heads of 128, 151 MB of state for each
sequence. A step is timed as a captured graph of all layers, convolutions included, beside the same
step with an update of the states in place, by the best of three sizes of blocks. Its `mean` is the
step on a log of 8 entries plus a sixteenth of a fold of 16. A checkpoint is beside copies of a
state's bytes to and from the host, as an engine makes that keeps states there. Medians of several
replays; every figure is in microseconds.

    python bench/cuda_recurrent.py [--batches 1 16 64 256] [--layers 48] [--seconds 0.2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _in_place import DIM, HEADS, K_HEADS, InPlace, in_place_kernel

from quire.devices.budget import Budget
from quire.devices.cuda import CudaDevice
from quire.devices.device import GroupKernels
from quire.memory.batch import SeqTokens
from quire.memory.groups.recurrent import RecurrentGroup
from quire.memory.groups.state_layout import RecurrentSpec, StateLayout
from quire.memory.groups.views import StateView
from quire.memory.memory import Memory
from quire.ops.cuda import CudaOps, Machine, recur_native
from quire.ops.cuda.recurrent_layer import CudaLayer, Places
from quire.ops.cuda.recurrent_rows import fold

LOG = 16
WIDTH = 4
CHANNELS = 2 * K_HEADS * DIM + HEADS * DIM


class Rig:
    """Layers with states and logs of some sequences, filled at random."""

    def __init__(self, batch: int, n_layers: int) -> None:
        self.ops, self.batch = CudaOps(Machine(0)), batch
        rng = np.random.default_rng(0)

        def some(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        self.layers: list[Any] = [
            self.ops.delta_net(
                K_HEADS, HEADS, DIM, DIM, some(CHANNELS, WIDTH), None, -np.exp(some(HEADS)),
                some(HEADS),
            )
            for _ in range(n_layers)
        ]  # fmt: skip
        layer = self.layers[0]
        spec = RecurrentSpec("delta", tuple(range(n_layers)), layer.state_bytes, layer.log_bytes)
        self.layout = StateLayout(spec)
        # A step writes log pages that it reads: they are as many as the sequences. Folds and
        # scans write other states: one more, which all of them write, stands for those.
        self.states = torch.empty(batch + 1, self.layout.state_page_bytes // 4, device="cuda")
        self.logs = torch.empty(batch + 1, self.layout.log_page_bytes // 4, device="cuda")
        for each in (*self.states, *self.logs):
            each.normal_(0, 0.05)

    def view(self, length: int, scan: int = 0) -> StateView:
        """A log of this length for each sequence; `scan`: all but so many go into a state."""
        pages = np.arange(self.batch, dtype=np.int32)
        none, same = np.full_like(pages, -1), np.full_like
        out = same(pages, self.batch)
        sizes = self.layout.state_page_bytes, self.layout.log_page_bytes, self.layout.log_stride
        log_in = pages if length else none
        return StateView(
            self.layout, *sizes, pages, out if scan else none, log_in, same(pages, length),
            out if scan else pages, same(pages, scan), none, same(pages, LOG),
        )  # fmt: skip

    def inputs(self, tokens: int) -> Any:
        """Random raw inputs."""
        return self.ops.new(torch.randn(tokens, self.layers[0].in_cols, device="cuda"))

    def step(self, length: int, tokens: int, scan: int = 0) -> Callable[[], None]:
        """All layers over new tokens of each sequence."""
        rows = np.repeat(np.arange(self.batch, dtype=np.int32), tokens)
        bases = self.states.data_ptr(), self.logs.data_ptr()
        states = self.ops.states(self.view(length, scan), *bases, rows)
        x = self.inputs(len(rows))

        def run() -> None:
            for layer, places in zip(self.layers, self.layout.offsets, strict=True):
                self.ops.recur(x, layer, states, *places)

        return run

    def step_in_place(self, columns: int) -> Callable[[], None]:
        """All layers over one token of each sequence, by updating states; rows of a block."""
        kernel, x = in_place_kernel(columns), self.inputs(self.batch)
        out, mixes = torch.empty(self.batch, HEADS * DIM, device="cuda"), self.mixing(x)

        def run() -> None:
            for layer, (at, log_at) in zip(self.layers, self.layout.offsets, strict=True):
                mixed = mixes(layer, at, log_at)
                tensors = x.values, mixed, layer.a, layer.dt_bias, out, self.states
                sizes = self.layout.state_page_bytes // 4, at // 4 + layer.tail_words
                given = InPlace(*(t.data_ptr() for t in tensors), *sizes, layer.in_cols, CHANNELS)
                grid = HEADS * DIM // columns, self.batch, 1
                kernel.launch(
                    recur_native.native(mixed.device).stream, grid, columns * DIM * 4, given
                )

        return run

    def only_mixing(self) -> Callable[[], None]:
        """The convolutions of all layers, which are a part of every step."""
        mixes = self.mixing(self.inputs(self.batch))

        def run() -> None:
            for layer, places in zip(self.layers, self.layout.offsets, strict=True):
                mixes(layer, *places)

        return run

    def mixing(self, x: Any) -> Callable[[CudaLayer, int, int], torch.Tensor]:
        """The convolution of a step, as `recur` runs it."""
        rows = np.arange(self.batch, dtype=np.int32)
        bases = self.states.data_ptr(), self.logs.data_ptr()
        states: Any = self.ops.states(self.view(0), *bases, rows)
        mixed = torch.empty(self.batch, CHANNELS, device="cuda")

        def run(layer: CudaLayer, state_at: int, log_at: int) -> torch.Tensor:
            told = recur_native.arguments(layer, states, state_at, log_at, x.values, mixed, mixed)
            recur_native.mix(self.ops.machine, layer, told)
            return mixed

        return run

    def fold(self) -> Callable[[], None]:
        """Full logs of all sequences into states."""
        pages = np.arange(self.batch, dtype=np.int32)
        # Pages that are written must differ: the state of the next sequence is as good as any.
        out, layout = (pages + 1).astype(np.int32), self.layout
        columns = self.ops.machine.upload_all([pages, pages, np.full_like(pages, LOG), out])
        offsets = self.ops._uploaded(layout.offsets)
        bases = self.states.data_ptr(), layout.state_page_bytes, self.logs.data_ptr()
        places = Places(*bases, layout.log_page_bytes, layout.log_stride, LOG)
        machine = self.ops.machine
        return lambda: fold(machine, self.layers[0], places, offsets, columns)


def timed(run: Callable[[], None], seconds: float) -> float:
    """Microseconds of a captured run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 5:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def steps(batch: int, n_layers: int, seconds: float) -> dict[str, float]:
    """Times of all kinds of steps of one batch."""
    rig = Rig(batch, n_layers)
    in_place = [timed(rig.step_in_place(columns), seconds) for columns in (128, 64, 32)]
    found = {"in place": min(in_place)}
    for length in (0, 8, 15):
        found[f"log of {length}"] = timed(rig.step(length, 1), seconds)
    found["convolution"] = timed(rig.only_mixing(), seconds)
    found["fold of 16"] = timed(rig.fold(), seconds)
    found["verify 8"] = timed(rig.step(8, 8), seconds)
    found["mean"] = found["log of 8"] + found["fold of 16"] / LOG
    found["of in place"] = found["mean"] / found["in place"]
    return {name: round(value, 3) for name, value in found.items()}


def prompts(n_layers: int, seconds: float) -> dict[str, float]:
    """Times of prompts."""
    rig = Rig(1, n_layers)
    return {f"prompt of {n}": round(timed(rig.step(0, n, LOG), seconds), 1) for n in (512, 2048)}


def count_moves(device: CudaDevice) -> list[int]:
    """Bytes of every page that is copied, read or written from now on."""
    moved: list[int] = []
    ops: Any = device.ops
    copy = ops.copy_pages

    def counted(base: int, size: int, sources: Any, targets: Any) -> None:
        moved.append(size * len(sources))
        copy(base, size, sources, targets)

    ops.copy_pages = counted
    for pool, backing in device.backings.items():
        each: Any = backing
        for name in ("read", "writing"):
            real, size = getattr(each, name), device._page_bytes[pool]

            def through(pages: Any, real: Any = real, size: int = size) -> Any:
                moved.append(size * len(pages))
                return real(pages)

            setattr(each, name, through)
    return moved


def checkpoints(n_layers: int) -> dict[str, float]:
    """What memory takes for a checkpoint, and copies of the same bytes to the host."""
    rig = Rig(1, n_layers)
    spec, ops = rig.layout.spec, rig.ops
    device = CudaDevice(Budget(2 << 30), ops)

    def fold(states: int, logs: int, layout: Any, *columns: Any) -> None:
        sizes = states, layout.state_page_bytes, logs, layout.log_page_bytes, layout.log_stride
        ops.fold(rig.layers, layout.offsets, *sizes, *columns)

    memory = Memory([RecurrentGroup(StateLayout(spec), device, GroupKernels(fold=fold))])
    for n in (40, 1):
        with memory.reserve([SeqTokens(0, np.arange(n, dtype=np.int32))]) as lease:
            device.run(lease.ubatch.work)
            lease.commit({0: n})
    found: dict[str, list[float]] = {"save": [], "restore": [], "delete": []}
    moved = count_moves(device)
    for i in range(500):
        for name, deed in (
            ("save", lambda i=i: memory.checkpoint_save(0, f"{i}")),
            ("restore", lambda i=i: memory.checkpoint_restore(0, f"{i}")),
            ("delete", lambda i=i: memory.checkpoint_delete(f"{i}")),
        ):
            start = time.perf_counter()
            deed()
            found[name].append((time.perf_counter() - start) * 1e6)
    result = {name: round(statistics.median(times), 2) for name, times in found.items()}
    result["bytes moved"] = float(sum(moved))
    page = rig.states[0]
    result["bytes of a state"] = float(page.nbytes)
    for name, pinned in (("pinned", True), ("pageable", False)):
        host = torch.empty(page.shape, pin_memory=pinned)
        host.fill_(0)  # so that its pages are there
        result[f"to {name} host"] = copied(host, page)
        result[f"from {name} host"] = copied(page, host)
    return result


def copied(to: torch.Tensor, source: torch.Tensor) -> float:
    """Microseconds of a copy."""
    times: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(source)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(times), 1)


def main() -> None:
    """Prints a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=0.2)
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "layers": args.layers}
    result["checkpoint"] = checkpoints(args.layers)
    result["prompt"] = prompts(args.layers, args.seconds)
    result["step"] = {}
    for batch in args.batches:
        found = result["step"][batch] = steps(batch, args.layers, args.seconds)
        if batch == args.batches[0]:
            print("batch | " + " | ".join(found))
        print(f"{batch} | " + " | ".join(f"{value:,.2f}" for value in found.values()), flush=True)
        torch.cuda.empty_cache()
    for name in ("checkpoint", "prompt"):
        print(", ".join(f"{key}: {value:,}" for key, value in result[name].items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
