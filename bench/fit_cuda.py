"""Models on a GPU that lost most of its memory to somebody else: they fit, and never run out.

    python bench/fit_cuda.py [MODEL:GIB …] [--steps 1000] [--seconds 150]

For each case this process takes the GPU's memory until so many GiB are left, and another one loads
a made-up model (see _made_up.py) with everything left open, fills the context that it was given but
for so many tokens with a prompt, and decodes the rest step by step. Prints what was planned, held
and said by the driver, and tokens per second; out of memory is an error, and so is a case that
needs more than so many seconds: most of them go to layers that found no room on the GPU. Ends with
one JSON line.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from _watched import MIB, free_bytes, held, planned, tell, watch

GIB = 1 << 30
CASES = ("4B-BF16:16", "4B-BF16:8", "4B-Q4_K_M:4", "4B-Q4_K_M:2")
PROMPT, DECODED, EVERY = 2048, 50, 10
"""Tokens of a prompt, and of an answer, between looks at the clock; seconds between reports."""


def child(model: str, steps: int, seconds: float) -> None:
    """Loads what fits, and runs it."""
    from _made_up import load

    faulthandler.dump_traceback_later(seconds + 60, exit=True)
    start = time.perf_counter()
    with load(model, device="cuda") as llm:
        loaded = time.perf_counter() - start
        plan = llm.plan
        facts = {"n_gpu_layers": plan.n_gpu_layers, "n_ctx": llm.n_ctx, "notes": plan.notes,
                 "load_s": round(loaded, 1)}  # fmt: skip
        tell("loaded", planned=planned(llm), held=held(llm), **facts)
        vocab, stop = llm.model.n_vocab, start + seconds
        prompt = [(7 * i + 3) % (vocab - 10) + 5 for i in range(llm.n_ctx - steps - 1)]
        with llm.session() as session:

            def add(at: int, count: int) -> None:
                session.append(prompt[at : at + count])

            def decode(at: int, count: int) -> None:
                made = session.generate(max_tokens=count, ignore_eos=True).token_ids
                assert len(made) == count, made

            filled, prefill = pieces(model, "of the prompt", len(prompt), PROMPT, stop, add)
            done, decoding = pieces(model, "steps", steps, DECODED, stop, decode)
            assert done < steps or session.position >= llm.n_ctx - 2, session.position
            tell("ran", held=held(llm), prompt=filled, prompt_s=round(prefill, 2), steps=done,
                 tokens_per_second=round(done / decoding, 1))  # fmt: skip
        llm.memory.audit()


def pieces(
    model: str, what: str, n: int, size: int, stop: float, run: Callable[[int, int], None]
) -> tuple[int, float]:
    """Runs n tokens piece by piece, as long as there is time: how many, and seconds."""
    start = said = time.perf_counter()
    at = 0
    while at < n and time.perf_counter() < stop:
        count = min(size, n - at)
        run(at, count)
        at += count
        if time.perf_counter() - said > EVERY or at == n:
            said = time.perf_counter()
            print(f"  {model}: {at:,} of {n:,} {what}, {said - start:.1f} s", flush=True)
    return at, max(time.perf_counter() - start, 1e-9)


def case(model: str, left: float, steps: int, seconds: float) -> dict[str, Any]:
    """One process in what is left, from outside."""
    start = time.perf_counter()
    taken = torch.empty(free_bytes() - int(left * GIB), dtype=torch.uint8, device="cuda")
    row: dict[str, Any] = {"model": model, "left_gib": free_bytes() / GIB, "steps": 0}
    given = f"{model}:{left}", "--steps", str(steps), "--seconds", str(seconds)
    try:
        for said, used in watch(__file__, *given):
            row[f"{said.pop('stage')} by the driver"] = used
            row |= said
            row["least free"] = min(row.get("least free", 1 << 60), free_bytes())
    except SystemExit as error:
        row["error"] = str(error)
    del taken
    torch.cuda.empty_cache()
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def show(row: dict[str, Any]) -> None:
    """What came of a case."""
    if "error" in row or "ran by the driver" not in row:
        print(f"{row['model']} in {row['left_gib']:.2f} GiB: FAILED: {row}", flush=True)
        return
    print(
        f"{row['model']} in {row['left_gib']:.2f} GiB: {row['n_gpu_layers']} layers, context "
        f"{row['n_ctx']:,}; planned {row['planned']['total'] / MIB:,.0f} MiB, driver "
        f"{row['ran by the driver'] / MIB:,.0f} (with a context), least free "
        f"{row['least free'] / MIB:,.0f}; prompt of {row['prompt']:,} in {row['prompt_s']} s, "
        f"{row['steps']} steps at {row['tokens_per_second']} tokens/s; {row['seconds']} s\n"
        f"  {'; '.join(row['notes'])}\n  {row['held']}",
        flush=True,
    )


def main() -> None:
    """Runs the cases, prints each, ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    chosen = [text.rpartition(":") for text in args.cases]
    if args.child:
        child(chosen[0][0], args.steps, args.seconds)
        return
    rows = []
    for model, _, left in chosen:
        rows.append(case(model, float(left), args.steps, args.seconds))
        show(rows[-1])
    print(json.dumps({"rows": rows}))
    short = [f"{row['model']}:{row['left_gib']:.0f}" for row in rows if row["steps"] < args.steps]
    if short:
        raise SystemExit(f"no {args.steps} steps: {', '.join(short)}")


if __name__ == "__main__":
    main()
