"""What memory holds, for people and programs."""

from __future__ import annotations

from typing import Any

from quire.memory.budget import Budget
from quire.memory.interface import Memory
from quire.memory.prefix import PrefixIndex
from quire.ops import Ops


class MemoryReport:
    """A look at memory as it is now; prints as a table."""

    def __init__(self, memory: Memory, prefix: PrefixIndex, budget: Budget, ops: Ops) -> None:
        self._memory = memory
        self._prefix = prefix
        self._budget = budget
        self._ops = ops

    def as_dict(self) -> dict[str, Any]:
        """Bytes by use, the budget, and the pools' counts."""
        return {
            "budget_bytes": self._budget.limit,
            "used_bytes": self._budget.used,
            "compute_bytes": self._ops.compute_bytes,
            "breakdown": self._budget.breakdown,
            "stats": self._memory.stats(),
            "prefix": self._prefix.stats(),
        }

    def audit(self) -> None:
        """Raises where the books of memory do not balance."""
        self._memory.audit()

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table("use", "value", title="memory")
        for name, value in _flatten("", self.as_dict()):
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
        return capture.get()


def _flatten(prefix: str, values: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        rows += _flatten(f"{name}.", value) if isinstance(value, dict) else [(name, value)]
    return rows
