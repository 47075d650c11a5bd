"""What memory holds, for people and programs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from quire.config import process_memory
from quire.devices.budget import Budget
from quire.engine.loop import Loop

if TYPE_CHECKING:
    from rich.table import Table


class MemoryReport:
    """A look at memory as it is at that moment; prints as tables."""

    def __init__(self, loop: Loop, budget: Budget) -> None:
        self._loop = loop
        self._engine = loop.engine
        self._budget = budget

    def as_dict(self) -> dict[str, Any]:
        """Bytes by use, the budget, each group's figures, and what was done to make room."""
        return self._loop.call(self._as_dict)

    def _as_dict(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "budget_bytes": self._budget.limit,
            "used_bytes": self._budget.used,
            "compute_bytes": engine.ops.compute_bytes,
            "process_bytes": process_memory(),
            "breakdown": self._budget.breakdown,
            "uses": self._uses(),
            "stats": self._groups(),
            "checkpoints": self._checkpoints(),
            "prefix": engine.prefix.index.stats(),
            "tiers": engine.tiers.as_dict(),
            "preemption": dict(engine.room.counts),
        }

    def _groups(self) -> dict[str, dict[str, Any]]:
        """Figures by group, with the pages that cached prefixes hold."""
        memory, index = self._engine.memory, self._engine.prefix.index
        pinned = memory.checkpoint_pages(index.pinned_names)
        stats = memory.stats().items()
        return {name: {**figures, "pages_pinned": pinned[name]} for name, figures in stats}

    @property
    def uses(self) -> dict[str, int]:
        """Bytes by what they are held for; together they are what the process holds."""
        return self._loop.call(self._uses)

    def _uses(self) -> dict[str, int]:
        sizes: Counter[str] = Counter(weights=self._budget.breakdown.get("weights", 0))
        for parts in self._engine.memory.memory_breakdown().values():
            sizes.update(parts)
        for use, size in self._budget.breakdown.items():
            if ": " in use:  # of a model beside this one, under its name
                sizes[use] += size
        sizes["compute buffers"] = self._engine.ops.compute_bytes
        rest = process_memory() - sum(sizes.values())
        sizes["interpreter, libraries, vocabulary"] = rest
        return {use: size for use, size in sizes.items() if size}

    @property
    def checkpoints(self) -> dict[str, Any]:
        """How many there are, and how long saving, restoring and deleting one took."""
        return self._loop.call(self._checkpoints)

    def _checkpoints(self) -> dict[str, Any]:
        saved = self._engine.memory.checkpoints
        cached = self._engine.prefix.index.names
        return {
            "names": [name for name in saved.by_name if name not in cached],
            "cached": len(cached),
            "timings": {
                what: {"count": t.count, "mean_us": t.mean_us, "p99_us": t.p99_us}
                for what, t in saved.timings.items()
            },
        }

    def audit(self) -> None:
        """Raises where the books of memory do not balance."""
        self._loop.call(self._engine.memory.audit)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100)
        with console.capture() as capture:
            for table in self._tables():
                console.print(table)
        return capture.get()

    def _tables(self) -> list[Table]:
        figures = self.as_dict()
        used, limit = figures["used_bytes"], figures["budget_bytes"]
        title = f"memory: {_size(used)} of a budget of {_size(limit)}"
        uses = _table(title, "held for", "bytes")
        for use, size in figures["uses"].items():
            uses.add_row(use, _size(size))
        uses.add_section()
        uses.add_row("the process", _size(figures["process_bytes"]))
        head = ("group", "pages", "free", "shared", "cached", "tokens", "a token", "held", "waste")
        groups = _table("groups", *head)
        for name, g in figures["stats"].items():
            groups.add_row(
                name, *(f"{g[f'pages_{what}']:,}" for what in ("used", "free", "shared", "cached")),
                f"{g['tokens_used']:,}",
                _size(g["bytes_per_token"]), _size(g["bytes_held"]), f"{g['waste_percent']:.1f}%",
            )  # fmt: skip
        return [uses, groups, _prefix_table(figures), _checkpoint_table(figures)]


def _prefix_table(figures: dict[str, Any]) -> Table:
    prefix = figures["prefix"]
    table = _table("cached prefixes", "what", "count")
    table.add_row("places kept (pinned)", f"{prefix['entries']:,} ({prefix['pinned']:,})")
    table.add_row("hits", f"{prefix['hits']:,}")
    for reason, n in prefix["misses"].items():
        if n:
            table.add_row(f"misses: {reason}", f"{n:,}")
    table.add_row("tokens not computed again", f"{prefix['tokens_saved']:,}")
    table.add_row("evictions", f"{prefix['evictions']:,}")
    for name, tier in figures["tiers"].items():
        table.add_row(f"parked in {name}", _size(tier["used"]))
    for what, n in figures["preemption"].items():
        if n:
            table.add_row(f"sequences {what}", f"{n:,}")
    return table


def _checkpoint_table(figures: dict[str, Any]) -> Table:
    held = figures["checkpoints"]
    count = len(held["names"])
    table = _table(f"checkpoints: {count:,}", "operation", "count", "mean", "p99")
    for what, t in held["timings"].items():
        table.add_row(what, f"{t['count']:,}", f"{t['mean_us']:.1f} µs", f"{t['p99_us']:.1f} µs")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(first, title=title, title_justify="left")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _size(n: int) -> str:
    """Bytes in the unit that reads best."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n} B"
