"""A plan for people: a table, and a bar for each device."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from quire.placement.plan import DevicePlan, Plan

_WIDTH = 60
_MARKS = {
    "weights": "#", "memory": "=", "draft": "d", "compute": "+", "libraries and graphs": "~",
    "reserve": ".",
}  # fmt: skip


def size(n_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} GiB"


def shown(plan: Plan) -> str:
    """All of a plan."""
    console = Console(width=100)
    with console.capture() as capture:
        console.print(_table(plan))
        for one in plan.devices:
            if one.parts:
                console.print(_bar(one), highlight=False, markup=False)
        console.print(_legend(), highlight=False, markup=False)
        for line in _lines(plan):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return capture.get()


def _table(plan: Plan) -> Table:
    load = plan.load
    table = Table(
        title=f"{plan.model.name}: {load.sequences} x {load.n_ctx:,} tokens, "
        f"{'fits' if plan.fits else 'does not fit'}"
    )
    table.add_column("")
    used = [one for one in plan.devices if one.parts]
    for one in used:
        table.add_column(one.device.name, justify="right")
    table.add_row("layers", *(str(one.layers) for one in used))
    for kind in dict.fromkeys(kind for one in used for kind in one.weights):
        table.add_row(f"weights: {kind}", *(_cell(one.weights.get(kind, 0)) for one in used))
    for pool in dict.fromkeys(pool for one in used for pool in one.memory):
        table.add_row(f"memory: {pool}", *(_cell(one.memory.get(pool, 0)) for one in used))
    for name in ("draft", "compute", "streaming", "graphs", "libraries"):
        if any(getattr(one, name) for one in used):
            table.add_row(name, *(_cell(getattr(one, name)) for one in used))
    table.add_row("total", *(size(one.total) for one in used), end_section=True)
    table.add_row("reserve", *(_cell(one.device.margin) for one in used))
    table.add_row("left", *(size(one.left) for one in used))
    return table


def _cell(n_bytes: int) -> str:
    return size(n_bytes) if n_bytes else "-"


def _bar(one: DevicePlan) -> str:
    whole = max(one.device.free, one.total + one.device.margin, 1)
    sizes = {
        "weights": sum(one.weights.values()), "memory": sum(one.memory.values()),
        "draft": one.draft, "compute": one.compute + one.streaming,
        "libraries and graphs": one.libraries + one.graphs, "reserve": one.device.margin,
    }  # fmt: skip
    bar, done = "", 0
    for use, n_bytes in sizes.items():
        done += n_bytes
        bar += _MARKS[use] * (round(done / whole * _WIDTH) - len(bar))
    share = 100 * one.total / max(one.device.free, 1)
    name = f"{one.device.name:<12}"
    return f"{name}[{bar:<{_WIDTH}}] {share:.0f}% of {size(one.device.free)}"


def _legend() -> str:
    return " " * 13 + "  ".join(f"{mark} {use}" for use, mark in _MARKS.items())


def _lines(plan: Plan) -> list[str]:
    lines = [f"note: {note}" for note in plan.notes]
    look = plan.outlook
    if look is None:
        return lines
    lines.append(
        f"largest context: {look.longest_context:,} tokens; sequences of {plan.load.n_ctx:,} "
        f"tokens at once: {look.most_sequences:,}"
    )
    if look.tokens_per_second:
        low, middle, high = look.tokens_per_second
        lines.append(
            f"expected: at most {middle:.1f} tokens/s ({low:.1f} to {high:.1f}), one sequence, "
            "context half full: by measured speed of reading weights; arithmetic is not counted"
        )
    else:
        lines.append("expected tokens/s: not known, a device is only described")
    lines += [f"one more GiB on {name}: {what}" for name, what in look.next_gib.items()]
    return lines
