"""What requests ask of their samples, and what it costs on a GPU: penalties, bias, logprobs.

    python bench/choices_cuda.py [4B-Q4_K_M] [--check] [--kernels]

Tokens per second of 1 and 64 sequences through the public API, Python included. `--check` first
generates the same in steps that fly, in steps that wait, and with tokens chosen behind the step,
and stops unless all say the same. `--kernels` times what chooses tokens alone, of 151,936.
Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import _made_up
import numpy as np
import torch

import quire

VOCAB = 151_936
BIASED = {int(i): 2.0 for i in np.random.default_rng(1).integers(1, VOCAB, 100)}
HOT = {"temperature": 0.8}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "hot": HOT, "top-k": HOT | {"top_k": 40},
    "top-k, top-p": HOT | {"top_k": 40, "top_p": 0.95}, "penalties": HOT | PENALTIES,
    "bias": {"logit_bias": BIASED}, "logprobs": {"logprobs": 0}, "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "all": HOT | PENALTIES | {"top_p": 0.95, "logit_bias": BIASED, "logprobs": 5},
}  # fmt: skip


def prompts(llm: quire.LLM, n: int) -> list[list[int]]:
    """Prompts of 32 tokens."""
    rng = np.random.default_rng(n)
    return rng.integers(1, llm.engine.n_vocab, (n, 32)).tolist()


def speed(llm: quire.LLM, n: int, way: dict[str, Any], steps: int) -> float:
    """Tokens per second of n sequences, once their graphs are recorded."""
    sampling = quire.Sampling(max_tokens=steps + 40, ignore_eos=True, seed=1, **way)
    streams = [llm.stream(prompt, sampling) for prompt in prompts(llm, n)]
    for stream in streams:
        next(stream)
    for _ in range(10):
        next(streams[0])
    start = time.perf_counter()
    for _ in range(steps):
        next(streams[0])  # a step for all of them
    seconds = time.perf_counter() - start
    for stream in streams:
        stream.close()
    return n * steps / seconds


def said(llm: quire.LLM, way: dict[str, Any], count: int = 20) -> list[Any]:
    """What three sequences say, one of them without all this."""
    ways = [way, way, {}]
    streams = [
        llm.stream(prompt, quire.Sampling(max_tokens=count + i, ignore_eos=True, seed=i, **each))
        for i, (prompt, each) in enumerate(zip(prompts(llm, 3), ways, strict=True))
    ]
    for stream in streams:
        list(stream)
    return [(s.completion.token_ids, s.completion.logprobs) for s in streams]


def check(llm: quire.LLM) -> None:
    """Steps that fly say what others say."""
    from quire.engine import engine
    from quire.engine.generation import Generation

    real = Generation.__init__

    def chosen_behind(self: Generation, *given: Any) -> None:
        real(self, *given)
        self.plain = False

    for name, way in WAYS.items():
        flown = said(llm, way)
        with mock.patch.object(engine.Flight, "of", lambda *_: None):
            assert said(llm, way) == flown, f"{name}: waiting steps say something else"
        with mock.patch.object(Generation, "__init__", chosen_behind):
            assert said(llm, way) == flown, f"{name}: behind the step it is something else"
    print("check: all say the same", flush=True)


def kernels(n: int) -> dict[str, float]:
    """Microseconds of what chooses tokens of n rows."""
    from quire.ops import Draw
    from quire.ops.cuda import CudaOps, Machine, drawing

    ops, found = CudaOps(Machine(0)), {}
    biased = np.array(list(BIASED), np.int32), np.ones(len(BIASED), np.float32)
    samplers = {
        "greedy": ops.sampler(0.0), "hot": ops.sampler(0.8), "top-k": ops.sampler(0.8, 40),
        "top-p": ops.sampler(0.8, 0, 0.95), "top-k, top-p": ops.sampler(0.8, 40, 0.95),
        "penalties": ops.sampler(0.0, repetition_penalty=1.1, frequency_penalty=0.2),
        "bias": ops.sampler(0.0, bias_ids=biased[0], bias_values=biased[1]),
    }  # fmt: skip
    samplers["penalties"].observe(np.arange(1000, dtype=np.int32))
    logits = (3 * np.random.default_rng(0).standard_normal((n, VOCAB))).astype(np.float32)
    x = ops.machine.upload(logits)
    ids = torch.zeros(n, dtype=torch.int32, device="cuda")
    for name, one in samplers.items():
        draws = [Draw(one, 0.3)] * n
        choice = drawing.Choice.of(draws)
        columns = drawing.columns_of(ops.machine, draws, choice, n, VOCAB)
        chances, edits = choice.given([ops.machine.upload(column) for column in columns])

        def run(choice: Any = choice, chances: Any = chances, edits: Any = edits) -> None:
            if edits is not None:
                drawing.edit(x, edits, ids)
            drawing.drawing(ops.machine, x, choice, chances, ids)

        found[name] = replayed(run)
    for told in (0, 8, 32):
        found[f"told {told}"] = replayed(
            lambda told=told: drawing.report(ops.machine, x, ids, told)
        )
    return found


def replayed(run: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of one run, recorded as a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) * 1e3 / (3 * repeats), 1)


def main() -> None:
    """Checks and measures one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="4B-Q4_K_M")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--steps", type=int, default=48)
    asked = parser.parse_args()
    found: dict[str, Any] = {"model": asked.model}
    start = time.perf_counter()
    with _made_up.load(asked.model, device="cuda", memory_budget=20 << 30, n_ctx=1024) as llm:
        print(f"loaded in {time.perf_counter() - start:.1f} s", flush=True)
        if asked.check:
            check(llm)
        for n in (1, 64):
            for name, way in WAYS.items():
                rate = round(speed(llm, n, way, asked.steps))
                found.setdefault(name, []).append(rate)
                print(f"{n:3} {name:14} {rate:7} tokens/s", flush=True)
    if asked.kernels:
        one, many = found["microseconds"] = kernels(1), kernels(64)
        for name in one:
            print(f"{name:14} {one[name]:8} µs of 1 row {many[name]:8} of 64", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
