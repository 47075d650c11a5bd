"""How fast attention, rope and sampling run on this CPU, beside what the machine can do.

Decode reads K and V of all earlier tokens once, so it is measured against a copy of memory;
prefill is multiply-adds, so it is measured against NumPy's matrix product. Medians of rounds.

    python bench/kernels_attention.py [--threads N] [--isa auto] [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.ops import _cpu
from quire.ops.reference.kv import kv_row_bytes

PAGE_TOKENS = 32
LAYERS = 30


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


@dataclass
class Case:
    """One shape of attention over the pages of a whole model, so that no cache holds them all."""

    heads: tuple[int, int]
    dims: int
    kind: str
    context: int
    tokens: int
    sequences: int = 1
    forks: bool = False
    """Whether all sequences have the same pages, but for those of the new tokens."""

    @property
    def name(self) -> str:
        """For the table."""
        return (
            f"{self.heads[0]}/{self.heads[1]} heads x {self.dims}, {self.kind}, "
            f"{self.sequences} x {self.tokens} new of {self.context}" + ", forks" * self.forks
        )

    def build(self, cpu: _cpu.Cpu) -> Callable[[], object]:
        """A function that runs one layer after the other."""
        n_kv = self.heads[1]
        part = n_kv * PAGE_TOKENS * kv_row_bytes(self.kind, self.dims)
        pages_each = -(-self.context // PAGE_TOKENS)
        # Written: pages that were not are all one page of zeros, which every cache holds.
        memory = np.full((pages_each * self.sequences, LAYERS * 2 * part), 60, np.uint8)
        tables = np.random.default_rng(0).permutation(len(memory)).astype(np.int32)
        tables = tables.reshape(self.sequences, pages_each)
        if self.forks:
            own = -(-self.tokens // PAGE_TOKENS)
            tables[:, :-own] = tables[0, :-own]
        position = np.arange(self.context - self.tokens, self.context, dtype=np.int32)
        slots = tables[:, position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
        pages = _cpu.Pages(
            memory.ctypes.data, memory.shape[1], PAGE_TOKENS, tables,
            np.zeros(self.sequences, np.int32), np.full(self.sequences, self.context, np.int32),
            slots.ravel().astype(np.int32), np.tile(position, self.sequences),
            np.repeat(np.arange(self.sequences, dtype=np.int32), self.tokens), None,
        )  # fmt: skip
        spec = _cpu.AttentionSpec(
            *self.heads, self.dims, self.dims, self.kind, self.kind, self.dims**-0.5
        )
        freqs = 10000.0 ** (-np.arange(0, self.dims, 2) / self.dims)
        positions = np.tile(position, self.sequences)
        table = cpu.rope_table(_cpu.Rope(self.dims, freqs, True, 1.0), positions)
        cols = (self.heads[0] + 2 * n_kv) * self.dims
        values = np.random.default_rng(1).standard_normal((len(positions), cols))
        qkv = cpu.array(values.astype(np.float32))
        layer = 0

        def run() -> object:
            nonlocal layer
            layer = (layer + 1) % LAYERS
            assert memory is not None  # keeps the pages alive
            return cpu.attention(qkv, spec, pages, table, layer * 2 * part, (layer * 2 + 1) * part)

        return run

    @property
    def bytes(self) -> int:
        """Of K and V read by one layer."""
        return (
            2 * self.sequences * self.context * self.heads[1] * kv_row_bytes(self.kind, self.dims)
        )

    @property
    def flops(self) -> int:
        """Of one layer, causal."""
        seen = self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) // 2
        return 4 * self.sequences * seen * self.heads[0] * self.dims


DECODE = [Case((9, 3), 64, kind, 2048, 1) for kind in ("f32", "f16", "bf16", "q8_0", "q4_0")] + [
    Case((9, 3), 64, "f16", 128, 1),
    Case((9, 3), 64, "f16", 1024, 1, 16),
    Case((9, 3), 64, "f16", 1024, 1, 16, forks=True),
    Case((16, 8), 128, "f16", 2048, 1),
    Case((8, 8), 64, "f16", 2048, 1),
]
PREFILL = [
    Case((9, 3), 64, "f16", 512, 512),
    Case((9, 3), 64, "f16", 2048, 512),
    Case((9, 3), 64, "q8_0", 512, 512),
    Case((16, 8), 128, "f16", 512, 512),
]


def limits(seconds: float) -> tuple[float, float]:
    """GB/s of a copy (read and write) and GFLOP/s of a matrix product."""
    a = np.ones(1 << 26, np.float32)
    b = np.empty_like(a)
    copy = 2 * a.nbytes / median(lambda: np.copyto(b, a), seconds) / 1e3
    m = np.ones((1024, 1024), np.float32)
    return copy, 2 * 1024**3 / median(lambda: m @ m, seconds) / 1e3


def sampling(cpu: _cpu.Cpu, vocab: int, seconds: float) -> dict[str, float]:
    """Microseconds for one row of logits."""
    x = np.random.default_rng(0).standard_normal((1, vocab)).astype(np.float32) * 3
    x[0, :50] += 12  # a few likely tokens, as a model's logits have them
    logits = cpu.array(x)
    row, u, ids = np.zeros(1, np.int32), np.array([0.4]), np.zeros(1, np.int32)
    settings = {
        "greedy": [_cpu.Sampler(0.0)],
        "plain": [_cpu.Sampler(1.0)],
        "top_k 40, top_p 0.9": [_cpu.Sampler(0.8, 40, 0.9)],
        "top_p 0.95": [_cpu.Sampler(1.0, 0, 0.95)],
        "min_p 0.05": [_cpu.Sampler(1.0, 0, 1.0, 0.05)],
    }
    out = {
        f"sample {name}, {vocab}": median(partial(cpu.sample, logits, row, each, u), seconds)
        for name, each in settings.items()
    }
    out[f"logprobs top 5, {vocab}"] = median(partial(cpu.logprobs, logits, ids, 5), seconds)
    return out


def main() -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    args = parser.parse_args()
    cpu = _cpu.Cpu(args.threads, args.isa)
    copy, product = limits(args.seconds)
    results: dict[str, dict[str, float]] = {}
    print(f"{cpu.isa}, {cpu.threads} threads; copy {copy:.0f} GB/s, product {product:.0f} GFLOP/s")
    for case in DECODE:
        us = median(case.build(cpu), args.seconds)
        results[case.name] = {"us": us, "gb_s": case.bytes / us / 1e3}
        print(f"{case.name:54} {us:9.1f} µs {case.bytes / us / 1e3:6.1f} GB/s")
    for case in PREFILL:
        us = median(case.build(cpu), args.seconds)
        results[case.name] = {"us": us, "gflop_s": case.flops / us / 1e3}
        print(f"{case.name:54} {us:9.1f} µs {case.flops / us / 1e3:6.1f} GFLOP/s")
    for vocab in (49_152, 151_936):
        for name, us in sampling(cpu, vocab, args.seconds / 2).items():
            results[name] = {"us": us}
            print(f"{name:54} {us:9.1f} µs")
    head = {"isa": cpu.isa, "threads": cpu.threads, "copy_gb_s": copy, "product_gflop_s": product}
    print(json.dumps({**head, "results": results}))


if __name__ == "__main__":
    main()
