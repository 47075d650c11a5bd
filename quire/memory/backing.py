"""The memory behind a pool's pages: address space for all, bytes only for those in use."""

from __future__ import annotations

import mmap
import sys

import numpy as np
from numpy.typing import NDArray

from quire.errors import BudgetError
from quire.memory.budget import Budget
from quire.memory.layout import Int32

_LINUX = sys.platform == "linux"
_MAP_NORESERVE = 0x4000  # Linux; Python 3.11 does not name it

OS_PAGE = mmap.PAGESIZE
"""What the system hands out and takes back: bytes of one of its own pages."""


class HostBacking:
    """One virtual range for all pages. A page is *backed* while its bytes are paid for.

    Pages need not be multiples of the system's pages, so neighbours can share one at their edge.
    `committed` counts every system page that lies under some backed page, once; `_alone` finds
    those that lie under a run of pages and under no other backed page.

    Without demand paging, and on systems that take nothing back, a page stays backed for good.
    """

    def __init__(
        self, use: str, page_bytes: int, max_pages: int, budget: Budget, demand_paged: bool
    ) -> None:
        self.use = use
        self.page_bytes = page_bytes
        self.budget = budget
        self.committed = 0
        self.count = 0
        """How many pages are backed."""
        self.gives_back = _LINUX and demand_paged
        # One byte per page: a bytearray scans fastest in Python. The array is a view of it.
        self.backed = bytearray(max_pages)
        self._backed = np.frombuffer(self.backed, np.uint8)
        size = -(-max_pages * page_bytes // OS_PAGE) * OS_PAGE
        if not demand_paged:
            budget.reserve(size, use)  # before mapping: fail early
        self._map = self._mapping(size)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        if not demand_paged:
            self.bytes[::OS_PAGE] = 0  # the system hands memory out on the first write
            self._backed[:] = 1
            self.committed, self.count = size, max_pages

    def _mapping(self, size: int) -> mmap.mmap:
        try:
            if not _LINUX:
                return mmap.mmap(-1, size)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            area = mmap.mmap(-1, size, flags=flags | (_MAP_NORESERVE if self.gives_back else 0))
        except (OSError, OverflowError) as error:
            raise BudgetError(
                f"{self.use} need {size:,} bytes of address space, which the system refuses "
                f"({error}); lower memory_budget or kv_cache_tokens"
            ) from error
        if self.gives_back:
            # A huge page would be held whole for the sake of a few kilobytes in use.
            area.madvise(mmap.MADV_NOHUGEPAGE)
        return area

    def unbacked(self, ids: Int32) -> Int32:
        """Those of the pages that are not backed."""
        fresh: Int32 = ids[self._backed[ids] == 0]
        return fresh

    def price(self, fresh: Int32) -> int:
        """Bytes it takes to back these ascending, not yet backed pages."""
        total = self._mark(fresh)
        self._backed[fresh] = 0
        return total

    def back(self, fresh: Int32) -> None:
        """Pays for these ascending, not yet backed pages: all, or BudgetError and none."""
        price = self._mark(fresh)
        try:
            self.budget.reserve(price, self.use)
        except BudgetError:
            self._backed[fresh] = 0
            raise
        self.committed += price
        self.count += len(fresh)

    def back_one(self, page: int) -> None:
        """Pays for one page that is not backed."""
        low, high = self._alone(page, page + 1)
        price = max(high - low, 0) * OS_PAGE
        self.budget.reserve(price, self.use)
        self.committed += price
        self.backed[page] = 1
        self.count += 1

    def give_back(self, ids: NDArray[np.intp]) -> None:
        """Returns the bytes of these ascending pages to the system and to the budget."""
        freed = 0
        for first, last in _runs(ids):
            self._backed[first:last] = 0
            low, high = self._alone(first, last)
            if high > low:
                self._map.madvise(mmap.MADV_DONTNEED, low * OS_PAGE, (high - low) * OS_PAGE)
                freed += (high - low) * OS_PAGE
        self.count -= len(ids)
        self.committed -= freed
        self.budget.release(freed, self.use)

    def close(self) -> None:
        """Returns everything; the range is unmapped as soon as nobody holds a view of it."""
        self.budget.release(self.committed, self.use)
        self.committed = self.count = 0
        self.bytes = np.empty(0, np.uint8)
        del self._map

    def _mark(self, fresh: Int32) -> int:
        """Marks pages as backed and returns what they cost."""
        price = 0
        for first, last in _runs(fresh):
            low, high = self._alone(first, last)
            price += max(high - low, 0) * OS_PAGE
            self._backed[first:last] = 1
        return price

    def _alone(self, first: int, last: int) -> tuple[int, int]:
        """System pages [low, high) under pages [first, last) and under no other backed page."""
        size = self.page_bytes
        low = first * size // OS_PAGE
        high = -(-last * size // OS_PAGE)
        if self.backed.find(1, low * OS_PAGE // size, first) >= 0:
            low += 1
        if self.backed.find(1, last, -(-high * OS_PAGE // size)) >= 0:
            high -= 1
        return low, high


def _runs(ids: NDArray[np.int32] | NDArray[np.intp]) -> list[tuple[int, int]]:
    """Ascending ids as half-open ranges without gaps."""
    if len(ids) == 0:
        return []
    cuts = np.flatnonzero(np.diff(ids) != 1)
    starts = ids[np.concatenate([[0], cuts + 1])]
    ends = ids[np.concatenate([cuts, [len(ids) - 1]])] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
