"""How fast recurrent layers run on this CPU: prompts, decode steps and folds.

A token changes the whole state of a layer, so a walk over the state per token is what there is to
do. Decoding reads the state once from memory and then walks it once more per token in the log;
`gb_s` is the bytes of all walks over time, beside copies in memory and in the L2 cache. Medians.

    python bench/kernels_recurrent.py [--threads N] [--isa auto] [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.ops.cpu import CpuOps

LAYERS = 24
LOG = 16


def median(run: Callable[[], object], seconds: float) -> float:
    """Median time of one call, in microseconds."""
    run()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def weights(channels: int, heads: int) -> tuple[Any, Any, Any]:
    """Convolution, ssm_a and dt_bias."""
    rng = np.random.default_rng(0)
    conv = rng.standard_normal((channels, 4)).astype(np.float32)
    return conv, -np.ones(heads, np.float32), np.zeros(heads, np.float32)


def qwen3_next(ops: CpuOps) -> Any:
    """A linear attention layer of Qwen3-Next."""
    conv, a, dt_bias = weights(2 * 16 * 128 + 32 * 128, 32)
    return ops.delta_net(16, 32, 128, 128, conv, None, a, dt_bias)


def mamba2(ops: CpuOps) -> Any:
    """A layer of Mamba-2 130M."""
    conv, a, dt_bias = weights(24 * 64 + 2 * 128, 24)
    return ops.ssd(24, 1, 64, 128, conv, np.zeros(len(conv), np.float32), a, dt_bias, dt_bias)


def lfm2(ops: CpuOps) -> Any:
    """A convolution layer of LFM2 1.2B."""
    return ops.short_conv(weights(2048, 1)[0][:, :3])


class Bench:
    """States of a whole model, so that no cache holds them all, and one layer's weights."""

    def __init__(self, ops: CpuOps, layer: Any) -> None:
        self.ops, self.layer = ops, layer
        state = -(-layer.state_bytes // 64) * 64
        log = -(-LOG * layer.log_bytes // 64) * 64
        self.offsets = [(i * state, i * log) for i in range(LAYERS)]
        self.states = np.zeros((2, LAYERS * state // 64), "V64")
        self.logs = np.zeros(LAYERS * log // 64, "V64")
        self.bytes = {
            "state_page_bytes": LAYERS * state,
            "log_page_bytes": LAYERS * log,
            "log_stride": layer.log_bytes,
        }
        self.turn = 0

    def step(self, tokens: int, log_length: int, scan: bool) -> Callable[[], object]:
        """A function that takes new tokens into one layer after the other."""
        x = np.random.default_rng(1).standard_normal((tokens, self.layer.in_cols))
        values = self.ops.array(x.astype(np.float32))
        log = 0 if log_length else -1
        columns = (0, 1, log, log_length, -1, 0) if scan else (0, -1, log, log_length, 0, 0)
        names = ("state_in", "state_out", "log_in", "log_length", "log_out", "tail")
        view: Any = SimpleNamespace(
            **self.bytes, layout=SimpleNamespace(log_tokens=LOG),
            **{n: np.array([each], np.int32) for n, each in zip(names, columns, strict=True)},
        )  # fmt: skip
        bases = self.states.ctypes.data, self.logs.ctypes.data
        states = self.ops.states(view, *bases, np.zeros(tokens, np.int32))

        def run() -> object:
            self.turn = (self.turn + 1) % LAYERS
            return self.ops.recur(values, self.layer, states, *self.offsets[self.turn])

        return run

    def fold(self) -> object:
        """Folds a full log, in all layers."""
        bytes_ = self.bytes
        return self.ops.fold(
            [self.layer] * LAYERS, self.offsets, self.states.ctypes.data,
            bytes_["state_page_bytes"], self.logs.ctypes.data, bytes_["log_page_bytes"],
            bytes_["log_stride"], *(np.array([each], np.int32) for each in (0, 0, LOG, 1)),
        )  # fmt: skip

    def figures(self, seconds: float) -> dict[str, dict[str, float]]:
        """Microseconds in one layer, and GB/s of state that was walked."""
        found = {}
        for tokens in (64, 512):
            us = median(self.step(tokens, 0, scan=True), seconds)
            found[f"scan {tokens}"] = {"us": us, "tokens_s": tokens / us * 1e6, "walks": tokens}
        for length in (0, LOG - 1):
            us = median(self.step(1, length, scan=False), seconds)
            found[f"decode, log of {length}"] = {"us": us, "walks": 1 + length}
        us = median(self.fold, seconds) / LAYERS
        found[f"fold {LOG}"] = {"us": us, "walks": LOG}
        for each in found.values():
            each["gb_s"] = each.pop("walks") * self.layer.state_bytes / each["us"] / 1e3
        return found


def copies(seconds: float) -> tuple[float, float]:
    """GB/s read by a copy in memory and by one in the L2 cache."""
    found = []
    for floats in (1 << 26, 1 << 15):
        a = np.ones(floats, np.float32)
        b = np.empty_like(a)
        found.append(a.nbytes / median(lambda a=a, b=b: np.copyto(b, a), seconds) / 1e3)
    return found[0], found[1]


def main() -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    args = parser.parse_args()
    ops = CpuOps(args.threads, isa=args.isa)
    memory, cache = copies(args.seconds)
    print(f"{ops.name}; a copy reads {memory:.0f} GB/s in memory, {cache:.0f} GB/s in cache")
    results: dict[str, dict[str, float]] = {}
    for name, make in {"qwen3-next": qwen3_next, "mamba-2 130m": mamba2, "lfm2": lfm2}.items():
        for what, each in Bench(ops, make(ops)).figures(args.seconds).items():
            results[f"{name}, {what}"] = each
            rate = f"{each['tokens_s']:9.0f} tokens/s" if "tokens_s" in each else ""
            print(f"{name + ', ' + what:36} {each['us']:9.1f} µs {each['gb_s']:6.1f} GB/s {rate}")
    head = {
        "isa": ops.cpu.isa,
        "threads": ops.cpu.threads,
        "copy_gb_s": memory,
        "cache_gb_s": cache,
    }
    print(json.dumps({**head, "results": results}))


if __name__ == "__main__":
    main()
