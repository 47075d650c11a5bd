"""Models on a GPU that lost most of its memory to somebody else: they fit, and never run out.

    python bench/fit_cuda.py [MODEL:GIB …] [--steps 1000]

For each case this process takes the GPU's memory until so many GiB are left, and another one loads
a made-up model (see _made_up.py) with everything left open, fills the context that it was given but
for so many tokens with a prompt, and decodes the rest step by step. Prints what was planned, held
and said by the driver, and tokens per second; out of memory is an error. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from _watched import MIB, free_bytes, held, planned, tell, watch

GIB = 1 << 30
CASES = ("4B-Q4_K_M:2", "4B-Q4_K_M:4", "4B-BF16:8", "4B-BF16:16")


def child(model: str, steps: int) -> None:
    """Loads what fits, and runs it."""
    from _made_up import load

    start = time.perf_counter()
    with load(model, device="cuda") as llm:
        loaded = time.perf_counter() - start
        plan = llm.plan
        facts = {"n_gpu_layers": plan.n_gpu_layers, "n_ctx": llm.n_ctx, "notes": plan.notes,
                 "load_s": round(loaded, 1)}  # fmt: skip
        tell("loaded", planned=planned(llm), held=held(llm), **facts)
        vocab = llm.model.n_vocab
        prompt = [(7 * i + 3) % (vocab - 10) + 5 for i in range(llm.n_ctx - steps - 1)]
        start = time.perf_counter()
        with llm.session() as session:
            session.append(prompt)
            prefilled = time.perf_counter() - start
            start = time.perf_counter()
            made = session.generate(max_tokens=steps, ignore_eos=True).token_ids
            seconds = time.perf_counter() - start
            assert len(made) == steps and session.position >= llm.n_ctx - 2, session.position
            tell("ran", held=held(llm), prompt=len(prompt), prompt_s=round(prefilled, 2),
                 tokens_per_second=round(steps / seconds, 1))  # fmt: skip
        llm.memory.audit()


def case(model: str, left: float, steps: int) -> dict[str, Any]:
    """One process in what is left, from outside."""
    start = time.perf_counter()
    taken = torch.empty(free_bytes() - int(left * GIB), dtype=torch.uint8, device="cuda")
    row: dict[str, Any] = {"model": model, "left_gib": free_bytes() / GIB}
    for said, used in watch(__file__, f"{model}:{left}", "--steps", str(steps)):
        row[f"{said.pop('stage')} by the driver"] = used
        row |= said
        row["least free"] = min(row.get("least free", 1 << 60), free_bytes())
    del taken
    torch.cuda.empty_cache()
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    """Runs the cases, prints each, ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    chosen = [text.rpartition(":") for text in args.cases]
    if args.child:
        child(chosen[0][0], args.steps)
        return
    rows = []
    for model, _, left in chosen:
        row = case(model, float(left), args.steps)
        rows.append(row)
        print(
            f"{model} in {row['left_gib']:.2f} GiB: {row['n_gpu_layers']} layers, context "
            f"{row['n_ctx']:,}; planned {row['planned']['total'] / MIB:,.0f} MiB, driver "
            f"{row['ran by the driver'] / MIB:,.0f} (with a context), least free "
            f"{row['least free'] / MIB:,.0f}; prompt of {row['prompt']:,} in {row['prompt_s']} s, "
            f"{args.steps} steps at {row['tokens_per_second']} tokens/s; {row['seconds']} s\n"
            f"  {'; '.join(row['notes'])}\n  {row['held']}",
            flush=True,
        )
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
