"""How fast models of real sizes run on a GPU through the public API, with random weights.

    python bench/cuda.py [4B-BF16 4B-Q8_0 4B-Q4_K_M 0.6B-BF16 …]

Each case is tokens per second of `llm.generate`, Python included. `kernels` are the same steps as
the GPU alone takes them (their captured graphs, replayed), and `unhidden` what a step takes longer:
Python that the GPU does not hide. Weights are made up in memory; all else is what users run.
Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import _made_up
import numpy as np
import torch

import quire
from quire.ops.cuda.stage import DEPTH

VOCAB = 151_936
BUDGET = 100 << 30


def load(name: str, **settings: Any) -> quire.LLM:
    """A made-up model, loaded as any other."""
    return _made_up.load(name, device="cuda", memory_budget=BUDGET, n_ctx=16_384, **settings)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


FEW, MANY = 32, 160
REST = 2.0
"""Seconds before prompts: they take a GPU to its power limit, and slower if it comes from there."""


def decode(llm: quire.LLM, n: int, context: int, rounds: int = 3) -> dict[str, Any]:
    """Tokens per second of n sequences around a context, and of the GPU alone."""
    rng = np.random.default_rng(n)
    prompts = rng.integers(1, VOCAB, (n, context - (FEW + MANY) // 2)).tolist()

    def run(count: int) -> None:
        llm.generate(prompts, max_tokens=count, ignore_eos=True)

    run(MANY)  # compiles, captures, and leaves the prompts in the cache
    run(MANY)
    seconds = sorted((timed(lambda: run(MANY)) - timed(lambda: run(FEW))) for _ in range(rounds))
    step = seconds[rounds // 2] / (MANY - FEW)
    alone = passed_through(llm, prompts)
    return {
        "sequences": n, "context": context, "tokens/s": round(n / step),
        "kernels tokens/s": round(n / alone), "unhidden us": round(1e6 * (step - alone), 1),
    }  # fmt: skip


def passed_through(llm: quire.LLM, prompts: list[list[int]], points: int = 4) -> float:
    """Seconds of the GPU alone: the mean over the steps that were timed, at some points of them."""
    streams = [llm.stream(p, max_tokens=MANY + 8, ignore_eos=True) for p in prompts]
    for stream in streams:
        next(stream)
    apart = (MANY - FEW) // points
    found = []
    for at in range(1, MANY):
        next(streams[0])  # a step for all of them
        if at >= FEW and (at - FEW) % apart == apart // 2:
            found.append(replayed(llm))
    for stream in streams:
        stream.close()
    return sum(found) / len(found)


def replayed(llm: quire.LLM, rounds: int = 5) -> float:
    """Seconds of the step that ran last, by the GPU's own clock; its pages are still there.

    Whole rounds of the slots that a graph reads, so that it goes on where it was.
    """
    repeats = rounds * DEPTH
    steps: Any = llm.engine.runner.steps
    graph = next(s.graph for s in reversed(steps._steps._known.values()) if s.graph)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def prompt(llm: quire.LLM, tokens: int = 512, rounds: int = 61) -> dict[str, Any]:
    """Tokens per second of prompts that nobody has seen, one after the other."""
    rng = np.random.default_rng(7)
    time.sleep(REST)

    def run() -> float:
        ids = rng.integers(1, VOCAB, tokens).tolist()
        return timed(lambda: llm.generate(ids, max_tokens=1))

    for _ in range(3):
        run()  # compiles and captures
    seconds = sorted(run() for _ in range(rounds))[rounds // 2]
    alone = replayed(llm)
    return {
        "prompt": tokens, "tokens/s": round(tokens / seconds), "ms": round(1e3 * seconds, 2),
        "kernels ms": round(1e3 * alone, 2),
    }  # fmt: skip


Case = tuple[str, int, int]
CASES: dict[str, list[Case]] = {
    "4B-BF16": [("decode", 1, 256), ("decode", 16, 256), ("decode", 64, 256),
                ("decode", 64, 1024), ("prompt", 1, 512)],
    "4B-Q8_0": [("decode", 1, 256)],
    "4B-Q4_K_M": [("decode", 1, 256), ("decode", 16, 256), ("decode", 64, 256),
                  ("prompt", 1, 512)],
    "4B-BF16-fast": [("prompt", 1, 512)],
    "4B-Q4_K_M-fast": [("prompt", 1, 512)],
    "0.6B-BF16": [("decode", 1, 256), ("decode", 64, 256)],
}  # fmt: skip
"""What is measured of each model; `fast` is without exact_batches."""


def measure(name: str, only: str) -> list[dict[str, Any]]:
    """The rows of one model."""
    rows = []
    start = time.perf_counter()
    fast = name.endswith("-fast")
    with load(name.removesuffix("-fast"), exact_batches=not fast) as llm:
        print(f"{name}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        for kind, n, tokens in CASES[name]:
            if only in kind:
                found = decode(llm, n, tokens) if kind == "decode" else prompt(llm, tokens)
                rows.append({"model": name, **found})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measures the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--only", default="", choices=["", "decode", "prompt"])
    chosen = parser.parse_args()
    rows = [row for name in chosen.models for row in measure(name, chosen.only)]
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
