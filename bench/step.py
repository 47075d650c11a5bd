"""What a step costs besides computing: on models so small that hardly anything else is left.

    python bench/step.py [MODEL ...] [--other-python PYTHON] [--rounds 7]

With another interpreter (one with another version of Quire) the two take turns in one run, and the
table has the ratio. Without models, a random one of two layers of 64 columns is made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BATCHES = (1, 16, 64)
STEPS = 96
_WORKER = """
import json, sys
import quire
model, n, steps, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
llm = quire.load(model, threads=1, memory_budget="1GiB", n_ctx=512)
prompts = [[first + i % 97, *range(10, 24)] for i in range(n)]
for p, prompt in enumerate(prompts):
    prompt[1] = 30 + p
done = llm.generate(prompts, max_tokens=steps + 1, ignore_eos=True)
print(json.dumps(max(d.timings.decode_s for d in done) / steps))
"""


def step_us(python: str, model: Path, batch: int, turn: int) -> float:
    """Microseconds of one step in a process of its own, through the public API."""
    command = [python, "-P", "-c", _WORKER, str(model), str(batch), str(STEPS), str(5 + turn)]
    # From elsewhere: each interpreter is to find the version that is installed with it.
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    return float(json.loads(run.stdout.splitlines()[-1])) * 1e6


def main() -> None:
    """Measures every model at every batch size, prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--other-python", help="an interpreter with another version of Quire")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pythons = {"here": sys.executable}
    if args.other_python:
        pythons["other"] = args.other_python
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models or [tiny(Path(folder))]:
            rows += measured(model.resolve(), pythons, args.rounds)
    print(json.dumps({"steps": rows}))


def tiny(folder: Path) -> Path:
    """A model in which there is hardly anything to compute."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.tiny import Tiny, write

    write(folder / "two-layers.gguf", Tiny())
    return folder / "two-layers.gguf"


def measured(model: Path, pythons: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """One row per batch size."""
    rows = []
    for batch in BATCHES:
        samples: dict[str, list[float]] = {name: [] for name in pythons}
        for turn in range(rounds):
            for name in list(pythons) if turn % 2 else list(pythons)[::-1]:
                samples[name].append(step_us(pythons[name], model, batch, turn))
        medians = {name: statistics.median(found) for name, found in samples.items()}
        row: dict[str, Any] = {"model": model.name, "sequences": batch, "us": medians}
        row["samples"] = samples
        told = ", ".join(f"{name} {us:,.0f} µs" for name, us in medians.items())
        if "other" in medians:
            row["ratio"] = medians["here"] / medians["other"]
            told += f", ratio {row['ratio']:.2f}"
        print(f"{model.name}, {batch} sequences: {told}", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
