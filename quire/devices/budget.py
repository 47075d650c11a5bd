"""One limit in bytes for everything on a device."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Protocol
from weakref import WeakSet

from quire.errors import BudgetError, RequestError


class Lender(Protocol):
    """One of several who share a budget, and can free something for the others."""

    def lend(self, up_to: int) -> bool:
        """Frees one thing of those up to a rank (`engine.room.Rank`); False: there is none."""

    def trim(self) -> bool:
        """Gives back what no array uses, which nobody misses; whether there was any."""

    def lendable(self, budget: Budget) -> int:
        """Bytes of a budget that lending all there is would free, arrays not counted."""


class Budget:
    """Who holds how many of a device's bytes. Nothing is allocated here, only accounted for."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise RequestError(f"a memory budget must be at least 1 byte, not {limit_bytes}")
        self.limit = limit_bytes
        """Bytes that all uses together may hold; `resize` changes it."""
        self.whole: Budget = self
        self.used = 0
        """Bytes held by all uses together; to read."""
        self._by_use: dict[str, int] = {}
        self._shares: WeakSet[Share] = WeakSet()
        self._savers: list[Callable[[], None]] = []
        self.lenders: list[Lender] = []
        """Those who share it."""
        self.followers: list[Callable[[], None]] = []
        """What is done when the limit has become another, for each who shares it."""
        self.passing = 0
        """How many hold some of it for a moment only, because a file is read or written: whoever
        is short of it waits for them."""
        self._lock = RLock()  # garbage that is collected in between may give some back

    @property
    def free(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit - self.used

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes by use; uses that hold nothing are left out."""
        with self._lock:
            return dict(self._by_use)

    def reserve(self, n_bytes: int, what: str) -> None:
        """Counts bytes as held by a use, or raises BudgetError and changes nothing."""
        assert n_bytes >= 0
        with self._lock:
            if n_bytes > self.limit - self.used:
                raise BudgetError(self._refusal(n_bytes, what), n_bytes)
            if n_bytes:
                self.used += n_bytes
                self._by_use[what] = self._by_use.get(what, 0) + n_bytes

    def release(self, n_bytes: int, what: str) -> None:
        """Gives bytes of a use back."""
        with self._lock:
            left = self._by_use.get(what, 0) - n_bytes
            assert n_bytes >= 0 and left >= 0, f"{what} gives back more than it holds"
            self.used -= n_bytes
            if left:
                self._by_use[what] = left
            else:
                self._by_use.pop(what, None)

    def resize(self, limit_bytes: int) -> None:
        """Changes the limit, or raises BudgetError where more than that is held."""
        with self._lock:
            if limit_bytes < self.used:
                held = ", ".join(f"{use} {size:,}" for use, size in sorted(self._by_use.items()))
                raise BudgetError(
                    f"the budget cannot become {limit_bytes:,} bytes, because {self.used:,} are "
                    f"held and cannot be moved (held: {held}); close sessions or drop marks, or "
                    f"pass at least {self.used:,}"
                )
            self.limit = limit_bytes
            for share in self._shares:
                share.limit = limit_bytes

    def on_shortage(self, give_back: Callable[[], None]) -> None:
        """Somebody who keeps bytes for later, and gives them back when others need them."""
        self._savers.append(give_back)

    def forget(self, give_back: Callable[[], None]) -> None:
        """Nothing is kept there any more."""
        self._savers.remove(give_back)

    def reclaim(self) -> None:
        """Has everybody give back what is only kept for later."""
        for give_back in self._savers:
            give_back()

    def borrow(self, me: Lender, rank: int) -> bool:
        """Has somebody else free something that ranks so low; False when nobody can."""
        return any(one.lend(rank) for one in self.lenders if one is not me)

    def _refusal(self, n_bytes: int, what: str) -> str:
        held = ", ".join(f"{use} {size:,}" for use, size in sorted(self._by_use.items()))
        if not held:  # a model that is being loaded
            return (
                f"{what} alone takes {n_bytes:,} bytes, and the budget has {self.limit:,}; raise "
                "memory_budget"
            )
        return (
            f"{what} needs {n_bytes:,} more bytes; {self.free:,} of the {self.limit:,} bytes "
            f"of the budget are free (held: {held}); free sequences or checkpoints, or raise "
            "memory_budget"
        )


class Share(Budget):
    """What one of several models on a budget holds of it; the limit is that of all together."""

    def __init__(self, whole: Budget, name: str) -> None:
        super().__init__(whole.limit)
        self.whole = whole
        self._name = name
        whole._shares.add(self)

    def resize(self, limit_bytes: int) -> None:
        """Changes the limit of all who share the budget."""
        self.whole.resize(limit_bytes)

    @property
    def free(self) -> int:
        """Bytes that can still be reserved, whoever holds the others."""
        return self.whole.free

    def reserve(self, n_bytes: int, what: str) -> None:
        """Counts bytes as held by a use, or raises BudgetError and changes nothing."""
        self.whole.reserve(n_bytes, f"{self._name}: {what}")
        super().reserve(n_bytes, what)

    def release(self, n_bytes: int, what: str) -> None:
        """Gives bytes of a use back."""
        super().release(n_bytes, what)
        self.whole.release(n_bytes, f"{self._name}: {what}")

    def on_shortage(self, give_back: Callable[[], None]) -> None:
        """Somebody who keeps bytes for later, and gives them back when others need them."""
        self.whole.on_shortage(give_back)

    def forget(self, give_back: Callable[[], None]) -> None:
        """Nothing is kept there any more."""
        self.whole.forget(give_back)

    def reclaim(self) -> None:
        """Has everybody give back what is only kept for later."""
        self.whole.reclaim()
