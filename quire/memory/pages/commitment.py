"""Which pages of a pool are paid for: the books between pages and a device's granules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.devices.device import Backing, Device
from quire.errors import BudgetError
from quire.memory.groups.layout import Int32


class Commitment:
    """A page is *backed* while its bytes are paid for.

    Pages need not be multiples of the device's granules, so neighbours can share one at their
    edge. `committed` counts every granule that lies under some backed page, once; `_alone` finds
    those that lie under a run of pages and under no other backed page.

    Without demand paging, and on devices that take nothing back, a page stays backed for good.
    """

    def __init__(
        self, pool: str, use: str, page_bytes: int, max_pages: int, device: Device,
        demand_paged: bool, most_pages: int = 0,
    ) -> None:  # fmt: skip
        self.use = use
        self.page_bytes = page_bytes
        self.budget = device.budget
        self.committed = 0
        self.count = 0
        """How many pages are backed."""
        # One byte per page: a bytearray scans fastest in Python. The array is a view of it.
        self.backed = bytearray(max_pages)
        self._backed = np.frombuffer(self.backed, np.uint8)
        self._pool, self._device = pool, device
        self.granularity = device.granularity
        self.most_pages = max_pages
        """Pages that there are addresses for."""
        if demand_paged:
            self._backing = self._widest(max_pages, most_pages)
        else:
            self._take_all(max_pages)
        self.gives_back = self._backing.gives_back

    def _widest(self, max_pages: int, most_pages: int) -> Backing:
        """Addresses for more pages than there are now, where the system gives as many."""
        if most_pages > max_pages:
            try:
                made = self._range(most_pages, True)
            except BudgetError:
                pass
            else:
                self.most_pages = most_pages
                return made
        return self._range(max_pages, True)

    def grow(self, more: int) -> None:
        """So many more pages, none of them backed."""
        self.backed = bytearray(self.backed) + bytes(more)
        self._backed = np.frombuffer(self.backed, np.uint8)

    def _take_all(self, max_pages: int) -> None:
        """Everything at once; it fails before it is taken."""
        size = -(-max_pages * self.page_bytes // self.granularity) * self.granularity
        self.budget.reserve(size, self.use)
        try:
            self._backing = self._range(max_pages, False)
        except BaseException:
            self.budget.release(size, self.use)
            raise
        self._backed[:] = 1
        self.committed, self.count = size, max_pages

    def _range(self, max_pages: int, demand_paged: bool) -> Backing:
        try:
            return self._device.backing(self._pool, self.page_bytes, max_pages, demand_paged)
        except MemoryError as error:
            raise BudgetError(
                f"{self.use} cannot be had: {error}; lower memory_budget or kv_cache_tokens"
            ) from error

    def unbacked(self, ids: Int32) -> Int32:
        """Those of the pages that are not backed."""
        fresh: Int32 = ids[self._backed[ids] == 0]
        return fresh

    def price(self, fresh: Int32) -> int:
        """Bytes it takes to back these ascending, not yet backed pages."""
        granules = self._mark(fresh)
        self._backed[fresh] = 0
        return sum(high - low for low, high in granules) * self.granularity

    def bytes_under(self, pages: NDArray[np.intp]) -> int:
        """Bytes that stay paid for when only these ascending pages are backed."""
        if not self.gives_back:
            return self.committed
        size, granule, granules, end = self.page_bytes, self.granularity, 0, 0
        for first, last in _runs(pages):
            low = max(first * size // granule, end)
            end = -(-last * size // granule)
            granules += end - low
        return granules * granule

    def back(self, fresh: Int32) -> None:
        """Pays for these ascending, not yet backed pages: all, or BudgetError and none."""
        granules = self._mark(fresh)
        try:
            self._pay(granules)
        except BaseException:
            self._backed[fresh] = 0
            raise
        self.count += len(fresh)

    def back_one(self, page: int) -> None:
        """Pays for one page that is not backed."""
        low, high = self._alone(page, page + 1)
        if high > low:
            self._pay([(low, high)])
        self.backed[page] = 1
        self.count += 1

    def _pay(self, granules: list[tuple[int, int]]) -> None:
        price = sum(high - low for low, high in granules) * self.granularity
        self.budget.reserve(price, self.use)
        done: list[tuple[int, int]] = []
        try:
            for low, high in granules:
                self._backing.back(low, high)
                done.append((low, high))
        except BaseException as error:
            for low, high in done:
                self._backing.give_back(low, high)
            self.budget.release(price, self.use)
            if isinstance(error, MemoryError):
                raise BudgetError(
                    f"{self.use} need {price:,} more bytes, which the budget allows and the "
                    f"system has not ({error}); lower memory_budget"
                ) from error
            raise
        self.committed += price

    def give_back(self, ids: NDArray[np.intp]) -> None:
        """Returns the bytes of these ascending pages to the system and to the budget."""
        freed = 0
        for first, last in _runs(ids):
            self._backed[first:last] = 0
            low, high = self._alone(first, last)
            if high > low:
                self._backing.give_back(low, high)
                freed += (high - low) * self.granularity
        self.count -= len(ids)
        self.committed -= freed
        self.budget.release(freed, self.use)

    def close(self) -> None:
        """Returns everything."""
        self.budget.release(self.committed, self.use)
        self.committed = self.count = 0
        self._device.drop_backing(self._pool)

    def _mark(self, fresh: Int32) -> list[tuple[int, int]]:
        """Marks pages as backed and returns the granules that takes."""
        granules = []
        for first, last in _runs(fresh):
            low, high = self._alone(first, last)
            if high > low:
                granules.append((low, high))
            self._backed[first:last] = 1
        return granules

    def _alone(self, first: int, last: int) -> tuple[int, int]:
        """Granules [low, high) under pages [first, last) and under no other backed page."""
        size, granule = self.page_bytes, self.granularity
        low = first * size // granule
        high = -(-last * size // granule)
        if self.backed.find(1, low * granule // size, first) >= 0:
            low += 1
        if self.backed.find(1, last, -(-high * granule // size)) >= 0:
            high -= 1
        return low, high


def _runs(ids: NDArray[np.int32] | NDArray[np.intp]) -> list[tuple[int, int]]:
    """Ascending ids as half-open ranges without gaps."""
    if len(ids) == 0:
        return []
    if int(ids[-1]) - int(ids[0]) == len(ids) - 1:
        return [(int(ids[0]), int(ids[-1]) + 1)]
    cuts = np.flatnonzero(np.diff(ids) != 1)
    starts = ids[np.concatenate([[0], cuts + 1])]
    ends = ids[np.concatenate([cuts, [len(ids) - 1]])] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
