"""A plan for people: a table, and a bar for each device."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.table import Table

from quire.placement.plan import DevicePlan, Outlook, Plan
from quire.placement.words import counted, size

_COLUMNS = 80
_WIDTH = 42
_MARKS = {
    "weights": "#", "memory": "=", "draft": "d", "compute": "+", "libraries and graphs": "~",
    "reserve": ".",
}  # fmt: skip


def shown(plan: Plan) -> str:
    """All of a plan, in lines that fit a terminal."""
    used = [one for one in plan.devices if one.parts]
    console = Console(width=max(_COLUMNS, 23 + 12 * len(used)))
    with console.capture() as capture:
        console.print(_table(used))
    lines = [*map(_bar, used), *_legend(used), *_lines(plan)]
    return "\n".join([title(plan), capture.get().rstrip(), *lines]) + "\n"


def title(plan: Plan) -> str:
    """What was planned, and whether it fits."""
    many = counted(plan.load.sequences, "sequence")
    fits = "fits" if plan.fits else "does not fit"
    return f"{plan.model.name}: {many} of {plan.load.n_ctx:,} tokens, {fits}"


def _table(used: list[DevicePlan]) -> Table:
    table = Table()
    table.add_column("")
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


def _uses(one: DevicePlan) -> dict[str, int]:
    return {
        "weights": sum(one.weights.values()), "memory": sum(one.memory.values()),
        "draft": one.draft, "compute": one.compute + one.streaming,
        "libraries and graphs": one.libraries + one.graphs, "reserve": one.device.margin,
    }  # fmt: skip


def _bar(one: DevicePlan) -> str:
    whole = max(one.device.free, one.total + one.device.margin, 1)
    bar, done = "", 0
    for use, n_bytes in _uses(one).items():
        done += n_bytes
        bar += _MARKS[use] * (round(done / whole * _WIDTH) - len(bar))
    share = 100 * one.total / max(one.device.free, 1)
    return f"{one.device.name:<10}[{bar:<{_WIDTH}}] {share:>3.0f}% of {size(one.device.free)}"


def _legend(used: list[DevicePlan]) -> list[str]:
    """The marks that there are."""
    shown = [use for use in _MARKS if any(_uses(one)[use] for one in used)]
    whole = (f"{_MARKS[use]} {use}".replace(" ", "\xa0") for use in shown)  # each on one line
    lines = _wrapped("  ".join(whole), " " * 11, " " * 11)
    return [line.replace("\xa0", " ") for line in lines]


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=first, subsequent_indent=rest,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _lines(plan: Plan) -> list[str]:
    lines = [f"note: {note}" for note in plan.notes]
    if look := plan.outlook:
        lines.append(
            f"largest context: {counted(look.longest_context, 'token')}; sequences of "
            f"{plan.load.n_ctx:,} tokens at once: {look.most_sequences:,}"
        )
        lines.append(_speed(look))
        lines += [f"one more GiB on {name}: {what}" for name, what in look.next_gib.items()]
    return [part for line in lines for part in _wrapped(line)]


def _speed(look: Outlook) -> str:
    if not look.tokens_per_second:
        return "expected tokens/s: not known, a device is only described"
    low, middle, high = look.tokens_per_second
    return (
        f"expected: at most {middle:.1f} tokens/s ({low:.1f} to {high:.1f}), one sequence, context "
        "half full: by measured speed of reading weights; arithmetic is not counted"
    )
