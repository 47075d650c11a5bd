"""What arrays take of the budget that weights and pages are taken from too."""

from __future__ import annotations

from quire.devices.budget import Budget
from quire.engine.room import Rank, Room
from quire.errors import BudgetError
from quire.ops import Ops


class ComputeBudget:
    """Follows what a device holds for arrays, and tells the budget."""

    def __init__(self, ops: Ops, budget: Budget) -> None:
        self._ops = ops
        self._budget = budget
        self.paid = 0

    def pay(self, room: Room) -> None:
        """Pays for what arrays take now; where the budget has no room, some is made if possible."""
        room.make(self._paid_up, None, Rank.ARRAYS)

    def _paid_up(self) -> bool:
        more = self._ops.compute_bytes - self.paid
        try:
            self._budget.reserve(max(more, 0), "compute")
        except BudgetError:
            return False
        self.paid += max(more, 0)
        self._refund(max(-more, 0))
        return True

    def trim(self) -> bool:
        """Gives back what no array uses; whether that made any room."""
        self._ops.trim()
        return self._refund(max(self.paid - self._ops.compute_bytes, 0))

    def close(self) -> None:
        """Pays for nothing any more."""
        self._refund(self.paid)

    def _refund(self, n_bytes: int) -> bool:
        self._budget.release(n_bytes, "compute")
        self.paid -= n_bytes
        return n_bytes > 0
