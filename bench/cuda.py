"""How fast models of real sizes run on a GPU, with random weights: kernels alone, and eagerly.

    python bench/cuda.py [4B-BF16 4B-Q4_K …]

`graph` is a captured step from hidden states to the likeliest token: what the kernels take.
`eager` is the same launched from Python. Neither has the engine in it. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.cuda import CudaDevice
from quire.engine.runner import Runner
from quire.memory.batch import SeqTokens
from quire.memory.build import build_memory
from quire.models.loader import Kit, Rows
from quire.models.qwen3 import build
from quire.ops import Array, Matrix, Ops
from quire.weights.file import WeightFile
from quire.weights.quant import GGMLType

SIZES = {
    "4B": (36, 2560, 32, 8, 9728),
    "0.6B": (28, 1024, 16, 8, 3072),
}
"""Layers, width, heads, KV heads, width of the network; heads have 128 dimensions."""
VOCAB = 151_936


class Described(WeightFile):
    """A Qwen3 that is only described."""

    def __init__(self, size: str) -> None:
        layers, width, heads, kv_heads, ffn = SIZES[size]
        self.path, self.tensors = Path(size), {}
        self.metadata = {
            "qwen3.block_count": layers, "qwen3.embedding_length": width,
            "qwen3.vocab_size": VOCAB, "qwen3.context_length": 40_960,
            "qwen3.attention.layer_norm_rms_epsilon": 1e-6, "qwen3.attention.head_count": heads,
            "qwen3.attention.head_count_kv": kv_heads, "qwen3.attention.key_length": 128,
            "qwen3.attention.value_length": 128, "qwen3.feed_forward_length": ffn,
            "qwen3.rope.freq_base": 1e6,
        }  # fmt: skip

    def data(self, name: str) -> NDArray[np.uint8]:
        raise NotImplementedError

    def release(self, name: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class RandomLoader:
    """Makes weights up: a block of random ones, again and again."""

    def __init__(self, ops: Ops, kind: GGMLType) -> None:
        self._ops, self._kind = ops, kind
        rng = np.random.default_rng(0)
        if kind is GGMLType.BF16:
            values = (rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
            self._block = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            return
        blocks = rng.integers(0, 256, (1 << 14, kind.type_size)).astype(np.uint8)
        for at in (0, 2) if kind is GGMLType.Q4_K else (0,):
            scale = rng.uniform(1e-5, 1e-4, (len(blocks), 1)).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8)
        self._block = blocks.ravel()

    def has(self, name: str) -> bool:
        """The output is the embedding again."""
        return False

    def matrix(self, cols: int, *parts: Rows, exact: bool = False) -> Matrix:
        """Random rows."""
        return self._ops.pack([
            (int(self._kind), rows, cols, np.resize(self._block, self._kind.nbytes((rows, cols))))
            for _, rows, *_ in parts
        ])  # fmt: skip

    def vector(self, *parts: Rows) -> Array:
        """Norms of ones."""
        return self._ops.vector(np.ones(sum(rows for _, rows, *_ in parts), np.float32))


def timed(run: Callable[[], object], repeats: int = 7) -> float:
    """The median of some timings in seconds, by events around ten runs each."""
    run()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e4)
    return sorted(found)[repeats // 2]


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The same as a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(
    size: str, kind: GGMLType, cases: list[tuple[int, int, int]]
) -> list[Mapping[str, Any]]:
    """Cases are sequences, new tokens of each, and the context before them."""
    device = CudaDevice(Budget(64 << 30))
    ops: Any = device.ops
    model = build(Described(size), Kit(ops, RandomLoader(ops, kind), "f16", "f16"))
    settings = SimpleNamespace(
        page_tokens=16, type_k="f16", type_v="f16", kv_cache_tokens=None,
        kv_cache_demand_paged=True, swa_full=False,
    )  # fmt: skip
    name = {"model": size, "type": kind.name}
    return [name | _case(model, device, settings, *case) for case in cases]


def _case(
    model: Any, device: CudaDevice, settings: Any, n_seqs: int, new: int, context: int
) -> dict[str, Any]:
    """One case, eagerly and as a graph."""
    memory = build_memory(model.groups, device, settings, model.kernels)
    runner = Runner(model, device)
    for seq in range(n_seqs if context else 0):
        with memory.reserve([SeqTokens(seq, np.arange(context, dtype=np.int32))]) as lease:
            runner.run(lease.ubatch)
            lease.commit({seq: context})
    tokens = np.arange(new, dtype=np.int32) + 7
    with memory.reserve([SeqTokens(seq, tokens) for seq in range(n_seqs)]) as lease:
        step = _step(model, device.ops, runner._batch(lease.ubatch), n_seqs, new)
        seconds = {"eager": timed(step, 3), "graph": timed(captured(step))}
    memory.close()
    row: dict[str, Any] = {"sequences": n_seqs, "tokens": new, "context": context}
    row |= {f"{how} ms": round(1e3 * s, 3) for how, s in seconds.items()}
    row |= {f"{how} tokens/s": round(n_seqs * new / s) for how, s in seconds.items()}
    print(row, flush=True)
    return row


def _step(model: Any, ops: Any, batch: Any, n_seqs: int, new: int) -> Callable[[], torch.Tensor]:
    """From hidden states to the likeliest tokens; what it needs from the host is there before."""
    start = model.embed(batch).values
    last = torch.arange(n_seqs, device=start.device) * new + new - 1
    tables: dict[int, Array] = {}

    def kept(rope: Any, positions: Any) -> Array:
        if id(rope) not in tables:
            tables[id(rope)] = type(ops).rope_table(ops, rope, positions)
        return tables[id(rope)]

    def step() -> torch.Tensor:
        ops.rope_table = kept
        x = ops.new(start.clone())
        model.run(x, batch, 0, model.n_layers)
        logits = model.logits(ops.new(x.values[last]))
        del ops.rope_table
        best: torch.Tensor = logits.values.argmax(1)
        return best

    return step


DECODE = [(1, 1, 256), (16, 1, 256), (64, 1, 256)]
PROMPT = [(1, 512, 0)]
CASES = {
    "4B-BF16": [*DECODE, *PROMPT, (64, 1, 1024)],
    "4B-Q4_K": [*DECODE, *PROMPT],
    "4B-Q8_0": [DECODE[0], *PROMPT],
    "0.6B-BF16": [DECODE[0], DECODE[2], *PROMPT],
}
"""What is measured of each model: sequences, new tokens of each, context before them."""


def main() -> None:
    """Measures the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*CASES, []], default=list(CASES))
    rows: list[Mapping[str, Any]] = []
    for name in parser.parse_args().models:
        size, kind = name.split("-")
        rows += measure(size, GGMLType[kind], CASES[name])
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
