"""How fast matrix products run on this CPU, beside what the machine can do.

With one token a product reads its weights once, so it is measured against a streaming read, over
more weights than any cache holds. With many it is arithmetic: two operations per weight and token.
The best of several rounds, because whoever else computes here only makes a figure worse.

    python bench/kernels_matmul.py [--threads N] [--isa auto] [--formats Q4_1] [--rows R --cols C]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _machine import Bandwidth, cpu_name
from numpy.typing import NDArray

from quire.ops import _cpu
from quire.weights.quant import GGMLType

FORMATS = "Q4_0,Q4_1,Q5_0,Q8_0,Q4_K,Q5_K,Q6_K,IQ4_XS,F16"
TOKENS = (1, 2, 4, 8, 16, 512)
READ_BYTES = 256 << 20


def weights(kind: GGMLType, rows: int, cols: int) -> NDArray[np.uint8]:
    """Bytes that are small numbers in every format: speed does not depend on the values."""
    data = np.full(kind.nbytes((rows, cols)), 0x11, np.uint8)
    data[: kind.nbytes((1, cols))] = 0x12
    return data


def best(run: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(cpu: Any, kind: GGMLType, rows: int, cols: int, rounds: int) -> dict[str, float]:
    """GB/s packed and read with one token, and GOP/s by number of tokens."""
    data = weights(kind, rows, cols)
    part = (int(kind), rows, cols, data)
    figures = {"pack_gb_s": data.nbytes / best(lambda: cpu.pack([part]), rounds) / 1e9}
    matrix = cpu.pack([part])
    matrices = [matrix] + [cpu.pack([part]) for _ in range(READ_BYTES // matrix.nbytes)]
    for n in TOKENS:
        x = cpu.array(np.random.default_rng(0).standard_normal((n, cols)).astype(np.float32))
        used = matrices if n < 64 else matrices[:2]

        def run(x: Any = x, used: list[Any] = used) -> None:
            for w in used:
                cpu.linear(x, w)

        seconds = best(run, rounds) / len(used)
        figures[f"gop_s_{n}"] = 2 * n * rows * cols / seconds / 1e9
        if n == 1:
            figures["read_gb_s"] = matrix.nbytes / seconds / 1e9
    return figures


def main() -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cpu = _cpu.Cpu(args.threads, args.isa)
    with tempfile.TemporaryDirectory() as folder:
        limit = Bandwidth(Path(folder), args.threads).measure(READ_BYTES) / 1e9
    head = {"cpu": cpu_name(), "isa": cpu.isa, "threads": cpu.threads, "read_limit_gb_s": limit}
    shape = f"{args.rows} x {args.cols}"
    print(f"{head['cpu']}, {cpu.isa}, {cpu.threads} threads, {shape}; reads {limit:.1f} GB/s")
    columns = "".join(f"{n:>7}" for n in TOKENS)
    print(f"{'':8}{'pack GB/s':>10}{'read GB/s':>10}   GOP/s by tokens:{columns}")
    results: dict[str, dict[str, float]] = {}
    for name in args.formats.split(","):
        figures = measure(cpu, GGMLType[name], args.rows, args.cols, args.rounds)
        results[name] = figures
        speeds = "".join(f"{figures[f'gop_s_{n}']:7.0f}" for n in TOKENS)
        pack, read = figures["pack_gb_s"], figures["read_gb_s"]
        print(f"{name:8}{pack:10.1f}{read:10.1f}{'':19}{speeds}", flush=True)
    print(json.dumps({**head, "rows": args.rows, "cols": args.cols, "results": results}))


if __name__ == "__main__":
    main()
