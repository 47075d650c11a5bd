"""How fast a mixture of experts runs, beside a dense network that reads or computes as much.

A token uses a few of many experts. With one token the work is reading their weights, so it is
measured against a dense gated network of just that many bytes; with many tokens it is arithmetic,
measured against the same network, which does as many operations per token. Tokens are random, so
their experts differ; layers alternate, so that decoding reads from memory.

    python bench/kernels_experts.py [--threads N] [--experts 32 --used 8 --width 2048 --ffn 768]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from _machine import cpu_name
from _report import json_line, table
from kernels_matmul import best, weights

from quire.ops import SILU_MUL, _cpu
from quire.weights.quant import GGMLType

EPS = 1e-6


class Layers:
    """Some layers of experts and of their dense counterpart, all with the same weights."""

    def __init__(self, cpu: Any, args: argparse.Namespace) -> None:
        kind = GGMLType[args.format]
        rng = np.random.default_rng(0)

        def pack(count: int, rows: int, cols: int) -> Any:
            part = (int(kind), rows, cols, weights(kind, rows, cols))
            return cpu.pack([part] * count)

        n, width, ffn = args.experts, args.width, args.ffn
        chosen = rng.standard_normal((n, width)).astype(np.float32)
        router = cpu.pack([(int(GGMLType.F32), n, width, chosen.view(np.uint8).reshape(-1))])
        sparse = [(pack(2 * n, ffn, width), pack(n, width, ffn)) for _ in range(args.layers)]
        wide = args.used * ffn
        dense = [(pack(2, wide, width), pack(1, width, wide)) for _ in range(args.layers)]
        norm = cpu.array(np.ones((1, width), np.float32))
        self.active_bytes = sum(m.nbytes for m in dense[0])

        def experts(x: Any) -> None:
            for gate_up, down in sparse:
                cpu.experts(x, router, gate_up, down, args.used, norm, EPS, True, 1.0, into=x)

        def one(x: Any) -> None:
            for gate_up, down in dense:
                middle = cpu.linear(x, gate_up, norm, EPS)
                cpu.linear(middle, down, act=SILU_MUL, into=x)

        self.runs: dict[str, Callable[[Any], None]] = {"experts": experts, "dense": one}


def measure(cpu: Any, layers: Layers, args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of one layer by number of tokens, for both; rounds alternate between them."""
    results = []
    for n in args.tokens:
        x = np.random.default_rng(n).standard_normal((n, args.width)).astype(np.float32)
        seconds = {name: float("inf") for name in layers.runs}
        for _ in range(args.rounds):
            for name, run in layers.runs.items():
                rows = cpu.array(x)
                once = best(lambda run=run, rows=rows: run(rows), 3 if n < 16 else 1)
                seconds[name] = min(seconds[name], once / args.layers)
        results.append({"tokens": n, **seconds, "ratio": seconds["experts"] / seconds["dense"]})
    return results


def main() -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--format", default="Q4_0")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--used", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 512])
    args = parser.parse_args()
    cpu = _cpu.Cpu(args.threads, args.isa)
    layers = Layers(cpu, args)
    results = measure(cpu, layers, args)
    shape = f"{args.used} of {args.experts} experts of {args.ffn}, width {args.width}"
    print(f"{cpu_name()}, {cpu.isa}, {cpu.threads} threads; {shape}, {args.format}")
    print(f"{layers.active_bytes / 1e6:.1f} MB of weights per token and layer")
    head = ("tokens", "weights", "experts µs", "dense µs", "tokens/s", "time ratio")
    rows = [
        (
            f"{r['tokens']:.0f}",
            args.format,
            f"{r['experts'] * 1e6:.0f}",
            f"{r['dense'] * 1e6:.0f}",
            f"{r['tokens'] / r['experts']:.0f}",
            f"{r['ratio']:.2f}",
        )
        for r in results
    ]
    print(table(head, rows))
    facts = {**vars(args), "cpu": cpu_name(), "isa": cpu.isa}
    print(json_line({**facts, "active_bytes": layers.active_bytes, "results": results}))


if __name__ == "__main__":
    main()
