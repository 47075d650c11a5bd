"""Long prompts of a model whose first layers are on the host: computed there, or streamed.

    python bench/streaming.py [MODEL] [--n-gpu-layers 18] [--device cuda] [--tokens 512 2048]

MODEL is a path or a made-up model (see _made_up.py). For each length of a prompt: tokens per second
with the networks of the host's layers computed there (`exact_batches=True`), and with them free to
pass through the GPU (`exact_batches=False`), and what was measured of both ways. Prompts are new
each time; medians of rounds. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
from _made_up import load


def measured(args: argparse.Namespace, exact: bool) -> list[dict[str, Any]]:
    """Prompts of each length."""
    rng, rows = np.random.default_rng(3), []
    n_ctx = max(args.tokens) + 16
    settings = {"device": args.device, "n_gpu_layers": args.n_gpu_layers, "n_ctx": n_ctx}
    with load(args.model, exact_batches=exact, **settings) as llm:
        for tokens in args.tokens:
            speeds = []
            for _ in range(args.rounds + 1):  # the first one compiles
                ids = rng.integers(5, llm.model.n_vocab, tokens).tolist()
                start = time.perf_counter()
                llm.generate(ids, max_tokens=1)
                speeds.append(tokens / (time.perf_counter() - start))
            row = {"tokens": tokens, "exact": exact, "tokens/s": statistics.median(speeds[1:])}
            if (streaming := llm._streaming) is not None:
                row |= {
                    "host ms of a network": 1e3 * streaming.host_s * min(tokens, 512),
                    "streamed ms": 1e3 * streaming.gpu_s, "streamed": streaming.runs,
                }  # fmt: skip
            rows.append({name: round(value, 2) for name, value in row.items()})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Both ways, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="4B-Q4_K_M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--n-gpu-layers", type=int, default=18)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = [row for exact in (True, False) for row in measured(args, exact)]
    print(json.dumps({"model": args.model, "n_gpu_layers": args.n_gpu_layers, "rows": rows}))


if __name__ == "__main__":
    main()
