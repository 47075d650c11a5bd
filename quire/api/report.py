"""What memory holds, for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from quire.api.copies import Uncopied
from quire.config import process_memory
from quire.devices.device import Device
from quire.engine.loop import Loop

if TYPE_CHECKING:
    from rich.table import Table


class MemoryReport(Uncopied):
    """A look at memory as it is at that moment; prints as tables."""

    instead = "it looks at a loaded model; pass on its as_dict()"

    def __init__(self, loop: Loop, devices: Sequence[Device]) -> None:
        self._loop = loop
        self._engine = loop.engine
        self._devices = devices

    def as_dict(self) -> dict[str, Any]:
        """Bytes by use, the budget, each group's figures, and what was done to make room."""
        return self._loop.call(self._as_dict)

    def _as_dict(self) -> dict[str, Any]:
        engine = self._engine
        budgets = [device.budget for device in self._devices]
        process = process_memory()
        return {
            "budget_bytes": sum(budget.limit for budget in budgets),
            "used_bytes": sum(budget.used for budget in budgets),
            "compute_bytes": self._compute_bytes,
            "process_bytes": process,
            "breakdown": self._breakdown(),
            "devices": {device.name: _on(device) for device in self._devices},
            "uses": self._uses(process),
            "stats": self._groups(),
            "checkpoints": self._checkpoints(),
            "prefix": engine.prefix.index.stats(),
            "tiers": engine.tiers.as_dict(),
            "preemption": dict(engine.room.counts),
        }

    @property
    def _compute_bytes(self) -> int:
        return sum(device.ops.compute_bytes for device in self._devices)

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes that the budgets were told of, by use."""
        return self._loop.call(self._breakdown)

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        """Each group's pages, tokens, bytes and waste."""
        return self._loop.call(self._groups)

    def _breakdown(self) -> dict[str, int]:
        """Bytes by use, of all devices together."""
        sizes: Counter[str] = Counter()
        for device in self._devices:
            sizes.update(device.budget.breakdown)
        return dict(sizes)

    def _groups(self) -> dict[str, dict[str, Any]]:
        """Figures by group, with the pages that cached prefixes hold."""
        memory, index = self._engine.memory, self._engine.prefix.index
        pinned = memory.checkpoint_pages(index.pinned_names)
        stats = memory.stats().items()
        return {name: {**figures, "pages_pinned": pinned[name]} for name, figures in stats}

    @property
    def uses(self) -> dict[str, int]:
        """Bytes by what they are held for; together they are what the process holds."""
        return self._loop.call(lambda: self._uses(process_memory()))

    def _uses(self, process: int) -> dict[str, int]:
        breakdown = self._breakdown()
        sizes: Counter[str] = Counter(weights=breakdown.get("weights", 0))
        for parts in self._engine.memory.memory_breakdown().values():
            sizes.update(parts)
        for use, size in breakdown.items():
            if ": " in use:  # of a model beside this one, under its name
                sizes[use] += size
        sizes["compute buffers"] = self._compute_bytes
        rest = process - sum(sizes.values())
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
            for sheet in self._sheets():
                console.print(sheet.table())
        return capture.get()

    def __repr__(self) -> str:
        budgets = [device.budget for device in self._devices]
        used, limit = (
            _size(sum(each)) for each in ((b.used for b in budgets), (b.limit for b in budgets))
        )
        return f"<MemoryReport {used} of a budget of {limit}; print it>"

    def _repr_html_(self) -> str:
        return "".join(sheet.html() for sheet in self._sheets())

    def _sheets(self) -> list[Sheet]:
        figures = self.as_dict()
        used, limit = figures["used_bytes"], figures["budget_bytes"]
        uses = Sheet(f"memory: {_size(used)} of a budget of {_size(limit)}", ("held for", "bytes"))
        for use, size in figures["uses"].items():
            uses.add(use, _size(size))
        uses.add("the process", _size(figures["process_bytes"]))
        head = ("group", "pages", "free", "shared", "cached", "tokens", "a token", "held", "waste")
        groups = Sheet("groups", head)
        for name, g in figures["stats"].items():
            groups.add(
                name, *(f"{g[f'pages_{what}']:,}" for what in ("used", "free", "shared", "cached")),
                f"{g['tokens_used']:,}",
                _size(g["bytes_per_token"]), _size(g["bytes_held"]), f"{g['waste_percent']:.1f}%",
            )  # fmt: skip
        return [uses, groups, _prefixes(figures), _checkpoints(figures)]


@dataclass
class Sheet:
    """A table for people, in a terminal or a notebook."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *row: str) -> None:
        """One more row."""
        self.rows.append(row)

    def table(self) -> Table:
        """For a terminal."""
        from rich.table import Table

        table = Table(self.head[0], title=self.title, title_justify="left")
        for name in self.head[1:]:
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def html(self) -> str:
        """For a notebook."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.head)
        rows = (
            "".join(
                f'<td style="text-align:{"left" if i == 0 else "right"}">{escape(cell)}</td>'
                for i, cell in enumerate(row)
            )
            for row in self.rows
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>"


def _prefixes(figures: dict[str, Any]) -> Sheet:
    prefix = figures["prefix"]
    sheet = Sheet("cached prefixes", ("what", "count"))
    sheet.add("places kept (pinned)", f"{prefix['entries']:,} ({prefix['pinned']:,})")
    sheet.add("hits", f"{prefix['hits']:,}")
    for reason, n in prefix["misses"].items():
        if n:
            sheet.add(f"misses: {reason}", f"{n:,}")
    sheet.add("tokens not computed again", f"{prefix['tokens_saved']:,}")
    sheet.add("evictions", f"{prefix['evictions']:,}")
    for name, tier in figures["tiers"].items():
        sheet.add(f"parked in {name}", _size(tier["used"]))
    for what, n in figures["preemption"].items():
        if n:
            sheet.add(what if " parked" in what else f"sequences {what}", f"{n:,}")
    return sheet


def _checkpoints(figures: dict[str, Any]) -> Sheet:
    held = figures["checkpoints"]
    title = f"checkpoints: {len(held['names']):,}"
    sheet = Sheet(title, ("operation", "count", "mean", "p99"))
    for what, t in held["timings"].items():
        sheet.add(what, f"{t['count']:,}", f"{t['mean_us']:.1f} µs", f"{t['p99_us']:.1f} µs")
    return sheet


def _size(n: int) -> str:
    """Bytes in the unit that reads best."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n} B"


def _on(device: Device) -> dict[str, Any]:
    """What one device holds of its budget."""
    budget = device.budget
    held = {"budget_bytes": budget.limit, "used_bytes": budget.used}
    return {**held, "compute_bytes": device.ops.compute_bytes, "breakdown": budget.breakdown}
