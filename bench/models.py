"""What fewer experts or fewer layers save, and what they cost.

Every variant of a model runs in the same rounds, and speeds are given as ratios to the whole
model: the best of all rounds, because whoever else computes here only makes a figure worse.
Perplexity is over windows of 512 tokens of a text, the same for all variants: as many windows as
the time allows.

    python bench/models.py --model tests/data/models/tiny-moe --experts 4 2 1 \\
        --text tests/data/models/validation.txt
    python bench/models.py --model smollm2 --layers 30 20 10
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from _machine import cpu_name
from _report import json_line, table

import quire

WINDOW = 512


class Variant:
    """The model with some of its layers and experts, and what was measured of it."""

    def __init__(self, name: str, llm: quire.LLM) -> None:
        self.name, self.llm = name, llm
        self.prefill: list[float] = []
        self.decode: list[float] = []
        self.losses: list[float] = []

    def run(self, prompt: Sequence[int], decoded: int) -> None:
        """One prompt from an empty memory, and some tokens after it."""
        self.llm.forget()
        made = self.llm.generate(list(prompt), max_tokens=decoded + 1, ignore_eos=True)
        self.prefill.append(made.timings.prefill_tokens_per_s)
        self.decode.append(made.timings.decode_tokens_per_s)

    def judge(self, window: Sequence[int]) -> None:
        """The mean negative log-likelihood of a window's tokens but the first."""
        x = self.llm.logits(window)[:-1].astype(np.float64)
        x -= x.max(-1, keepdims=True)
        chosen = x[np.arange(len(x)), list(window[1:])]
        self.losses.append(float((np.log(np.exp(x).sum(-1)) - chosen).mean()))

    def as_dict(self) -> dict[str, Any]:
        """What was measured, for the JSON line."""
        return {
            "name": self.name,
            "layers": self.llm.active.layers,
            "experts": self.llm.active.experts,
            "weight_bytes": self.llm.model.weight_bytes,
            "prefill_tokens_per_s": max(self.prefill),
            "decode_tokens_per_s": max(self.decode),
            "perplexity": math.exp(sum(self.losses) / len(self.losses)) if self.losses else None,
        }


def measure(variants: list[Variant], args: argparse.Namespace) -> int:
    """Fills the variants in rounds; returns how many windows were judged."""
    rng = np.random.default_rng(0)
    prompt = [int(t) for t in rng.integers(0, variants[0].llm.model.n_vocab, args.prompt)]
    for _ in range(args.rounds):
        for variant in variants:
            variant.run(prompt, args.decode)
    if args.text is None:
        return 0
    tokens = variants[0].llm.encode(args.text.read_text())
    stop, windows = time.monotonic() + args.seconds, 0
    while time.monotonic() < stop and (windows + 1) * WINDOW <= len(tokens):
        for variant in variants:
            variant.judge(tokens[windows * WINDOW : (windows + 1) * WINDOW])
        windows += 1
    return windows


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """The printed table: the first variant is what the others are measured against."""
    whole, out = results[0], []
    for r in results:
        speeds = [r[key] for key in ("prefill_tokens_per_s", "decode_tokens_per_s")]
        ratios = [
            f"{r[key] / whole[key]:.2f}" for key in ("prefill_tokens_per_s", "decode_tokens_per_s")
        ]
        perplexity = "" if r["perplexity"] is None else f"{r['perplexity']:.2f}"
        cells = [f"{r['weight_bytes'] / 1e6:.1f}", f"{speeds[0]:.0f}", ratios[0]]
        out.append([r["name"], str(r["layers"]), *cells, f"{speeds[1]:.0f}", ratios[1], perplexity])
    return out


def main() -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--experts", type=int, nargs="*", default=[], help="moe_n_expert values")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="n_layer_exit values")
    parser.add_argument("--text", type=Path, help="a text to compute perplexity of")
    parser.add_argument("--seconds", type=float, default=60, help="for perplexity")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    asked: list[dict[str, int]] = [{}]
    asked += [{"moe_n_expert": n} for n in args.experts] + [
        {"n_layer_exit": n} for n in args.layers
    ]
    with ExitStack() as stack:
        variants = []
        for settings in asked:
            name = ", ".join(f"{key}={value}" for key, value in settings.items()) or "whole"
            llm = stack.enter_context(
                quire.load(args.model, threads=args.threads, kv_cache_tokens=4096, **settings)
            )
            variants.append(Variant(name, llm))
        windows = measure(variants, args)
        results = [variant.as_dict() for variant in variants]
        device = variants[0].llm.ops.name
    print(f"{cpu_name()}, {device}; {Path(args.model).name}; {windows} windows of {WINDOW} tokens")
    head = ("variant", "layers", "MB", "prefill/s", "ratio", "decode/s", "ratio", "perplexity")
    print(table(head, rows(results)))
    facts = {"cpu": cpu_name(), "device": device, "model": Path(args.model).name}
    print(json_line({**facts, "windows": windows, "results": results}))


if __name__ == "__main__":
    main()
