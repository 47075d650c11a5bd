"""What arrays take of the budget that weights and pages are taken from too."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import BudgetError
from quire.memory.budget import Budget
from quire.ops import Ops


class ComputeBudget:
    """Follows what a device holds for arrays, and tells the budget."""

    def __init__(self, ops: Ops, budget: Budget) -> None:
        self._ops = ops
        self._budget = budget
        self._paid = 0

    def pay(self, make_room: Callable[[], bool]) -> None:
        """Pays for what arrays take now; where the budget has no room, somebody makes some."""
        while (more := self._ops.compute_bytes - self._paid) > 0:
            try:
                self._budget.reserve(more, "compute")
                self._paid += more
            except BudgetError:
                if not make_room():
                    return
        self._refund(self._paid - self._ops.compute_bytes)

    def trim(self) -> bool:
        """Gives back what no array uses; whether that made any room."""
        self._ops.trim()
        return self._refund(max(self._paid - self._ops.compute_bytes, 0))

    def close(self) -> None:
        """Pays for nothing any more."""
        self._refund(self._paid)

    def _refund(self, n_bytes: int) -> bool:
        self._budget.release(n_bytes, "compute")
        self._paid -= n_bytes
        return n_bytes > 0
