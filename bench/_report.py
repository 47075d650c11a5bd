"""What every benchmark prints with: medians, a plain table, and one JSON line at the end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PEER, OURS = "llama.cpp", "quire"


@dataclass(frozen=True)
class Spread:
    """The median of several measurements, with the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """The spread of at least one measurement."""
        values = sorted(samples)
        return cls(statistics.median(values), values[0], values[-1])

    def __format__(self, spec: str) -> str:
        """The median, and the range where there is one: `131 (127–133)`."""
        middle, low, high = (format(v, spec) for v in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


@dataclass(frozen=True)
class Row:
    """One question about one file: the samples of both engines, and what is aimed at.

    `ratio` says how many times better Quire is, so it is above 1 when Quire wins, whether more
    or less of the unit is good. `target` is a least ratio; `ceiling` a greatest value for Quire.
    `disturbed` counts samples taken while other programs used the machine.
    """

    format: str
    question: str
    unit: str
    samples: dict[str, list[float]]
    more_is_better: bool = True
    target: float | None = None
    ceiling: float | None = None
    disturbed: int = 0

    @property
    def ratio(self) -> float | None:
        """Quire against the peer, by their medians; None when only one was measured."""
        if PEER not in self.samples or OURS not in self.samples:
            return None
        peer, ours = (Spread.of(self.samples[name]).median for name in (PEER, OURS))
        return ours / peer if self.more_is_better else peer / ours

    @property
    def met(self) -> bool | None:
        """Whether the target or the ceiling is kept; None when there is nothing to judge."""
        if self.ceiling is not None and OURS in self.samples:
            return Spread.of(self.samples[OURS]).median <= self.ceiling
        if self.target is None or self.ratio is None:
            return None
        return self.ratio >= self.target

    def cells(self) -> list[str]:
        """This row of the printed table."""
        spec = ".0f" if max(map(max, self.samples.values())) >= 100 else ".1f"
        aim = f"≥ {self.target:.1f}" if self.target is not None else ""
        if self.ceiling is not None:
            aim = f"≤ {self.ceiling:.0f} {self.unit}"
        return [
            self.format,
            f"{self.question}, {self.unit}",
            *(format(Spread.of(s), spec) if s else "" for s in map(self.samples.get, (PEER, OURS))),
            "" if self.ratio is None else f"{self.ratio:.2f}",
            aim,
            {None: "", True: "yes", False: "no"}[self.met] + ("?" if self.disturbed else ""),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for the JSON line."""
        medians = {name: Spread.of(values).median for name, values in self.samples.items()}
        return {**asdict(self), "medians": medians, "ratio": self.ratio, "met": self.met}


HEAD = ("file", "question", PEER, OURS, "ratio", "target", "met")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text, the first two to the left and the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def json_line(result: dict[str, Any]) -> str:
    """Everything that was measured, on one line; always the last one of a benchmark."""
    return json.dumps(result, separators=(",", ":"), ensure_ascii=False)
