"""Long prompts of a model whose first layers are on the host: computed there, or streamed.

    python bench/streaming.py [MODEL] [--n-gpu-layers 18] [--device cuda] [--tokens 512 2048]

MODEL is a path or a made-up model (see _made_up.py). For each length of a prompt, tokens per second
`waiting` for the GPU after every step; without, so that it has one chunk while the host computes
the next (both with `exact_batches=True`); and `streaming`, networks of the host's layers free to
pass through the GPU (`exact_batches=False`), with what was measured of both ways. Prompts are new
each time; medians of rounds. Then one prompt for all ways: `apart` is the most that a logit differs
from the first way's, of their range. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
from _made_up import Shared, load

WAYS = ("waiting", "overlapped", "streaming")


def wait_after_steps(llm: Any) -> None:
    """Lets the host wait for the GPU after every step."""
    import torch

    launch = llm.engine.runner.launch

    def waiting(*step: Any) -> Any:
        found = launch(*step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return found

    llm.engine.runner.launch = waiting


def measured(args: argparse.Namespace, way: str, found: list[Any]) -> list[dict[str, Any]]:
    """Prompts of each length; what is found of the last one is added to a list."""
    rng, rows = np.random.default_rng(3), []
    n_ctx = max(args.tokens) + 16
    settings = {"device": args.device, "n_gpu_layers": args.n_gpu_layers, "n_ctx": n_ctx}
    with load(args.model, exact_batches=way != "streaming", **settings) as llm:
        if way == "waiting":
            wait_after_steps(llm)
        for tokens in args.tokens:
            speeds = []
            for _ in range(args.rounds + 1):  # the first one compiles
                ids = rng.integers(5, llm.model.n_vocab, tokens).tolist()
                start = time.perf_counter()
                llm.generate(ids, max_tokens=1)
                speeds.append(tokens / (time.perf_counter() - start))
            row: dict[str, Any] = {"tokens/s": statistics.median(speeds[1:])}
            if (streaming := llm._streaming) is not None:
                row |= {
                    "host ms of a network": 1e3 * streaming.host_s * min(tokens, 512),
                    "streamed ms": 1e3 * streaming.gpu_s, "streamed": streaming.runs,
                }  # fmt: skip
            row = {name: round(value, 2) for name, value in row.items()}
            rows.append({"way": way, "tokens": tokens, **row})
            print(rows[-1], flush=True)
        found.append(logits(llm, args.tokens[0]))
    apart = np.abs(found[-1] - found[0]).max() / np.ptp(found[0])
    rows[-1]["apart"] = round(float(apart), 5)
    print(f"{way}: logits apart by {rows[-1]['apart']} of their range", flush=True)
    return rows


def logits(llm: Any, tokens: int) -> Any:
    """Behind a prompt that is the same for all ways."""
    ids = np.random.default_rng(4).integers(5, llm.model.n_vocab, tokens).tolist()
    with llm.session() as session:
        return session.append(ids).logits()


def main() -> None:
    """Each way, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="4B-Q4_K_M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--n-gpu-layers", type=int, default=18)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    found: list[Any] = []
    # the host's matrices are packed once; those that are streamed, each time
    with Shared(of="cpu") if args.device.startswith("cuda") else nullcontext():
        rows = [row for way in args.ways for row in measured(args, way, found)]
    print(json.dumps({"model": args.model, "n_gpu_layers": args.n_gpu_layers, "rows": rows}))


if __name__ == "__main__":
    main()
