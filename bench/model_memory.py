"""Bytes that one sequence holds as it grows, on every kind of model.

Full attention grows with every token; a window stops at its width; a state never grows.

    python bench/model_memory.py [--models tests/data/models] [--tokens 1900] [--out bench/out]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _plot import Line, chart
from _report import json_line, table

import quire

STEP = 100


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    """Bytes held by length: all groups of a model together, and each alone at the end."""
    lengths: list[int] = []
    held: list[int] = []
    with quire.load(folder) as llm, llm.session() as session:
        while session.position < tokens:
            session.append([5 + (7 * i) % 900 for i in range(STEP)])
            llm.forget()
            groups = llm.memory.as_dict()["stats"]
            lengths.append(session.position)
            held.append(sum(group["bytes_held"] for group in groups.values()))
        ends = {name: group["bytes_held"] for name, group in groups.items()}
    return {"model": folder.name, "lengths": lengths, "held": held, "groups": ends}


def main() -> None:
    """Prints a table, draws the plot, ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("tests/data/models"))
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    args = parser.parse_args()
    folders = sorted(path.parent for path in args.models.glob("*/config.json"))
    results = [measure(folder, args.tokens) for folder in folders]
    rows = [
        [r["model"], *(f"{r['held'][at] / 1024:,.0f}" for at in (0, len(r["held"]) // 2, -1)),
         ", ".join(f"{name} {size / 1024:,.0f}" for name, size in r["groups"].items())]
        for r in results
    ]  # fmt: skip
    lengths = results[0]["lengths"]
    middle = lengths[len(lengths) // 2]
    head = ("model", f"KiB at {lengths[0]}", f"at {middle}", f"at {lengths[-1]}", "by group then")
    print(table(head, rows))
    lines = [
        Line(r["model"], [float(n) for n in r["lengths"]], [h / 1024 for h in r["held"]])
        for r in results
    ]
    title = "Bytes of one sequence as it grows"
    chart(args.out / "model_memory.svg", title, "tokens", "KiB", lines)
    print(json_line({"results": results}))


if __name__ == "__main__":
    main()
