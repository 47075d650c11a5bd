"""What arrays take of the budgets that weights and pages are taken from too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.devices.device import Device
from quire.engine.room import Rank, Room
from quire.errors import BudgetError


class ComputeBudget:
    """Follows what devices hold for arrays, and tells their budgets."""

    def __init__(self, devices: Sequence[Device], forget: Callable[[], bool]) -> None:
        """`forget` has them let go of steps that they recorded."""
        self._forget = forget
        self.each = [OnDevice(device) for device in devices]

    @property
    def paid(self) -> int:
        """Bytes that budgets were told of."""
        return sum(one.paid for one in self.each)

    def pay(self, room: Room) -> None:
        """Pays for what arrays take now; where a budget has no room, some is made if possible."""
        for one in self.each:
            room.make(one.pay, None, Rank.ARRAYS)

    def trim(self) -> bool:
        """Gives back what no array uses; whether that made any room."""
        return any([one.trim() for one in self.each])

    def forget(self) -> bool:
        """Gives back what recorded steps hold too; whether that made any room."""
        return self._forget() and self.trim()

    def close(self) -> None:
        """Pays for nothing any more."""
        for one in self.each:
            one.refund(one.paid)


class OnDevice:
    """What one device holds for arrays, and what its budget was told of."""

    def __init__(self, device: Device) -> None:
        self.ops = device.ops
        self.paid = 0
        self._budget = device.budget

    def pay(self) -> bool:
        more = self.ops.compute_bytes - self.paid
        if more > self._budget.free:
            self._budget.reclaim()
        try:
            self._budget.reserve(max(more, 0), "compute")
        except BudgetError:
            return False
        self.paid += max(more, 0)
        self.refund(max(-more, 0))
        return True

    def trim(self) -> bool:
        self.ops.trim()
        return self.refund(max(self.paid - self.ops.compute_bytes, 0))

    def refund(self, n_bytes: int) -> bool:
        self._budget.release(n_bytes, "compute")
        self.paid -= n_bytes
        return n_bytes > 0
