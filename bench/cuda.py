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
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

import quire
from quire import config
from quire.api import llm as api
from quire.ops.cuda.stage import DEPTH
from quire.weights.file import WeightFile
from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray

SIZES = {"4B": (36, 2560, 32, 8, 9728), "0.6B": (28, 1024, 16, 8, 3072)}
"""Layers, width, heads, KV heads, width of the network; heads have 128 dimensions."""
VOCAB = 151_936
BUDGET = 100 << 30


class Facts(NamedTuple):
    """What is known of a made-up tensor."""

    type: GGMLType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return self.type.nbytes(self.shape)


class MadeUp(WeightFile):
    """A Qwen3 whose tensors are a block of random weights, again and again."""

    def __init__(self, size: str, mix: str) -> None:
        layers, width, heads, kv_heads, ffn = SIZES[size]
        self.path, self.asked = Path(f"{size}-{mix}.gguf"), set()
        self.metadata = {
            "general.architecture": "qwen3", "qwen3.block_count": layers,
            "qwen3.embedding_length": width, "qwen3.vocab_size": VOCAB,
            "qwen3.context_length": 40_960, "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
            "qwen3.attention.head_count": heads, "qwen3.attention.head_count_kv": kv_heads,
            "qwen3.attention.key_length": 128, "qwen3.attention.value_length": 128,
            "qwen3.feed_forward_length": ffn, "qwen3.rope.freq_base": 1e6,
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": _strings([f"t{i}" for i in range(VOCAB)]),
            "tokenizer.ggml.token_type": np.ones(VOCAB, np.int32),
            "tokenizer.ggml.merges": _strings([]),
            "tokenizer.ggml.eos_token_id": 0,
        }  # fmt: skip
        q, kv = heads * 128, kv_heads * 128
        shapes = {"attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width),
                  "attn_output": (width, q), "ffn_gate": (ffn, width), "ffn_up": (ffn, width),
                  "ffn_down": (width, ffn)}  # fmt: skip
        norms = {"attn_norm": width, "ffn_norm": width, "attn_q_norm": 128, "attn_k_norm": 128}
        self.tensors = {"output_norm.weight": Facts(GGMLType.F32, (width,))}
        self.tensors["token_embd.weight"] = Facts(_type(mix, "token_embd", 0, 1), (VOCAB, width))
        for i in range(layers):
            for name, shape in shapes.items():
                facts = Facts(_type(mix, name, i, layers), shape)
                self.tensors[f"blk.{i}.{name}.weight"] = facts
            for name, count in norms.items():
                self.tensors[f"blk.{i}.{name}.weight"] = Facts(GGMLType.F32, (count,))
        self._blocks: dict[GGMLType, NDArray[np.uint8]] = {}

    def data(self, name: str) -> NDArray[np.uint8]:
        """Random bytes that make sense as weights."""
        type, shape = self.tensors[name]
        if type is GGMLType.F32:
            return np.ones(shape, np.float32).view(np.uint8).ravel()
        if type not in self._blocks:
            self._blocks[type] = _block(type)
        return np.resize(self._blocks[type], type.nbytes(shape))

    def samples(self, name: str) -> Iterator[bytes]:
        """Nobody saves what such a model remembers."""
        yield name.encode()

    def close(self) -> None:
        """Nothing to do."""


def _strings(texts: list[str]) -> StringArray:
    """Texts as a file holds them."""
    parts = [struct.pack("<Q", len(text)) + text.encode() for text in texts]
    starts = np.cumsum([0] + [len(part) for part in parts], dtype=np.int64)[:-1]
    return StringArray(np.frombuffer(b"".join(parts), np.uint8), starts)


def _type(mix: str, name: str, layer: int, layers: int) -> GGMLType:
    """The type of a tensor; of Q4_K_M as llama.cpp's tools choose it."""
    if mix != "Q4_K_M":
        return GGMLType[mix]
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    fine = name == "token_embd" or (name in ("attn_v", "ffn_down") and more)
    return GGMLType.Q6_K if fine else GGMLType.Q4_K


def _block(type: GGMLType) -> NDArray[np.uint8]:
    rng = np.random.default_rng(0)
    if type is GGMLType.BF16:
        values = (rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (1 << 14, type.type_size)).astype(np.uint8)
    at = {GGMLType.Q4_K: (0, 2), GGMLType.Q6_K: (208,)}.get(type, (0,))
    for start in at:
        scale = rng.uniform(1e-5, 1e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8)
    return blocks.ravel()


def load(size: str, mix: str, **settings: Any) -> quire.LLM:
    """A made-up model, loaded as any other."""
    chosen = config.LoadConfig(device="cuda", memory_budget=BUDGET, n_ctx=16_384, **settings)
    with mock.patch.object(api, "open_weights", lambda _: MadeUp(size, mix)):
        return quire.LLM(Path(f"{size}-{mix}.gguf"), chosen)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


FEW, MANY = 32, 160


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


def prompt(llm: quire.LLM, tokens: int = 512, rounds: int = 9) -> dict[str, Any]:
    """Tokens per second of prompts that nobody has seen, one after the other."""
    rng = np.random.default_rng(7)

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
    size, mix, *how = name.split("-")
    with load(size, mix, exact_batches=not how) as llm:
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
