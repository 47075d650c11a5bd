"""Output first against output last, for every number of layers on a GPU.

    python bench/placement.py MODEL [--device cuda] [--seconds 0.3] [--rounds 3] [--svg FILE]

MODEL is a path, or a made-up model such as 4B-Q4_K_M or hybrid-Q8_0 (see _made_up.py). Output first
is what `n_gpu_layers` does: the output, then layers from the last on. Output last puts it on the
host until all layers are on the GPU. For each: bytes on the GPU by the plan and as held, how often
activations change device, and tokens per second of one sequence (the median of rounds in turns,
each of as many tokens as take so many seconds, once steps are compiled and recorded).
Matrices stay on both sides from one load to the next, and are not packed again. Ends with one JSON
line; the chart shows speed against bytes, a dot for every N.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from _made_up import Shared, load
from _plot import Line, chart

PROMPT = list(range(5, 21))
WAYS = ("output first", "output last")
MOST = 900  # tokens of a round


def main() -> None:
    """Measures, prints a table, writes the chart, ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n-ctx", type=int, default=1024)
    parser.add_argument("--every", type=int, default=1, help="only every so many layers")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    # Matrices of the host and of its parts cannot be told apart.
    with Shared() if args.device.startswith("cuda") else nullcontext():
        with load(args.model, device="cpu", n_ctx=args.n_ctx) as llm:
            n_layers = llm.model.n_layers
        counts = sorted({*range(0, n_layers + 2, args.every), n_layers, n_layers + 1})
        print(f"{'way':<14}{'N':>4}{'planned MB':>12}{'held MB':>10}{'splits':>8}{'tokens/s':>10}")
        # All on the GPU first: later on there is nothing left to pack.
        rows = [row for n in reversed(counts) for row in measured(args, n, n_layers)]
    rows.sort(key=lambda row: (row["way"], row["n"]))
    if args.svg:
        lines = []
        for way in WAYS:
            mine = [row for row in rows if row["way"] == way]
            xs = [row["held"] / 1e9 for row in mine]
            lines.append(Line(way, xs, [row["tokens_per_second"] for row in mine]))
        chart(args.svg, args.model, "GB on the GPU", "tokens/s", lines, log_y=True)
    seconds = round(time.perf_counter() - start, 1)
    found = {"grows": grows(rows), "gains": gains(rows), "seconds": seconds}
    print(json.dumps({"model": args.model, **found, "rows": rows}))


def settings_of(args: argparse.Namespace, way: str, n: int, n_layers: int) -> dict[str, Any]:
    """How to load with n layers on the GPU, the output counted as one."""
    settings: dict[str, Any] = {"device": args.device, "n_gpu_layers": n, "n_ctx": args.n_ctx}
    if way == "output last" and 0 < n <= n_layers:
        settings |= {"n_gpu_layers": n + 1, "override_tensor": [r"^output\.=cpu"]}
    return settings


def measured(args: argparse.Namespace, n: int, n_layers: int) -> list[dict[str, Any]]:
    """Both ways with n layers, in turns; they are one where there is nothing or all on the GPU."""
    ways = WAYS if 0 < n <= n_layers else WAYS[:1]
    found: dict[str, dict[str, Any]] = {}
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            with load(args.model, **settings_of(args, way, n, n_layers)) as llm:
                speeds[way].append(speed(llm, args.seconds))
                there = [d for d in llm.plan.devices[:-1] if d.parts]
                names = {d.device.name for d in there}
                found[way] = {
                    "way": way, "n": n, "splits": llm.plan.splits,
                    "planned": sum(d.total for d in there),
                    "held": sum(d.budget.used for d in llm.devices if d.name in names),
                }  # fmt: skip
    rows = [{**row, "tokens_per_second": statistics.median(speeds[way])}
            for way, row in found.items()]  # fmt: skip
    if len(ways) == 1:
        rows.append(rows[0] | {"way": WAYS[1]})
    for row in rows:
        print(
            f"{row['way']:<14}{row['n']:>4}{row['planned'] / 1e6:>12.1f}{row['held'] / 1e6:>10.1f}"
            f"{row['splits']:>8}{row['tokens_per_second']:>10.1f}",
            flush=True,
        )
    return rows


def speed(llm: Any, seconds: float) -> float:
    """Tokens per second, with a short prompt of which most is there already."""
    generated(llm, 4)  # compiles, records, replays
    tokens, took = 8, generated(llm, 8)
    while took < seconds and tokens < MOST:
        tokens = min(round(1.1 * tokens * seconds / took) + 1, MOST)
        took = generated(llm, tokens)
    return tokens / min(took, generated(llm, tokens))  # the first may still have compiled


def generated(llm: Any, tokens: int) -> float:
    """Seconds of so many tokens."""
    start = time.perf_counter()
    llm.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
    return time.perf_counter() - start


def grows(rows: list[dict[str, Any]]) -> bool:
    """Whether output first takes more bytes of the GPU with every N."""
    sizes = [row["planned"] for row in rows if row["way"] == WAYS[0]]
    return all(a < b for a, b in pairwise(sizes))


def gains(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times faster output first is with the same N, at the median and at best.

    And at equal bytes: against the fastest output last that holds no more, at the median.
    """
    first, last = ([row for row in rows if row["way"] == way] for way in WAYS)
    by_n = {row["n"]: row["tokens_per_second"] for row in last}
    ratios = sorted(row["tokens_per_second"] / by_n[row["n"]] for row in first)
    equal = []
    for row in first:
        others = [o["tokens_per_second"] for o in last if o["held"] <= row["held"]]
        if row["n"] and others:
            equal.append(row["tokens_per_second"] / max(others))
    return {
        "median": statistics.median(ratios), "most": ratios[-1],
        "median at equal bytes": statistics.median(equal) if equal else 1.0,
    }  # fmt: skip


if __name__ == "__main__":
    main()
