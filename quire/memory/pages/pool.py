"""Pages of one size: handed out lowest first, counted, shared, and given back to the system."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.device import Device
from quire.errors import BudgetError, PagesError
from quire.memory.groups.layout import Int32
from quire.memory.pages.commitment import Commitment

POISON = 0xFF
"""Fills pages nobody may read: NaN in f32, f16, bf16 and in the scales of q8_0 and q4_0."""


class PagePool:
    """The pages of one group: which are free, who counts as a holder, who may write where.

    A page is *live* while refs > 0. A page that is free but still backed is idle, and `trim`
    gives its bytes back; every operation of a memory that frees pages ends with `trim`. Idle
    pages that `trim` was told to keep go when anybody runs short of the budget.

    `frozen` and `appender` speak of pages with two holders or more: the slots below `frozen` are
    visible to others than the appender, and only the appender writes, from slot `frozen` on.
    A page with a single holder is that holder's to write, whatever these two say.

    `cached` says how many of a page's references are the prefix index's. `cached_only` counts
    the pages that nobody else holds, as they come and go: no page is looked at for it.
    """

    def __init__(
        self, name: str, page_bytes: int, max_pages: int, device: Device,
        demand_paged: bool = True, poison: bool = False, most_pages: int = 0,
    ) -> None:  # fmt: skip
        assert page_bytes > 0 and max_pages > 0
        self.name = name
        self.page_bytes = page_bytes
        self.max_pages = max_pages
        self.device = device
        self.budget: Budget = device.budget
        self.use = f"pages of {name}"
        self.commitment = Commitment(
            name, self.use, page_bytes, max_pages, device, demand_paged, most_pages
        )
        self.bytes = device.backings[name]
        self.refs: Int32 = np.zeros(max_pages, np.int32)
        self.frozen: Int32 = np.zeros(max_pages, np.int32)
        self.appender: Int32 = np.zeros(max_pages, np.int32)
        self.cached: Int32 = np.zeros(max_pages, np.int32)
        self.used = self.cached_pages = self.cached_only = 0
        self.expected = max_pages
        """Pages that are likely to be wanted: more are not taken ahead."""
        self._poison = poison
        self.counts = self.refs.data  # the same integers, read and written one by one faster
        self._live = bytearray(max_pages)
        self._live_array = np.frombuffer(self._live, np.uint8)
        self._cursor = 0  # no page below is free
        self._idle_from, self._idle_to = max_pages, 0  # idle pages lie in between
        self.budget.on_shortage(self.trim)

    def grow(self, max_pages: int) -> None:
        """Has at least so many pages, as far as there are addresses for them."""
        more = min(max_pages, self.commitment.most_pages) - self.max_pages
        if more <= 0:
            return
        none: Int32 = np.zeros(more, np.int32)
        for name in ("refs", "frozen", "appender", "cached"):
            setattr(self, name, np.concatenate([getattr(self, name), none]))
        self.counts = self.refs.data
        self._live = bytearray(self._live) + bytes(more)
        self._live_array = np.frombuffer(self._live, np.uint8)
        self.commitment.grow(more)
        self.max_pages += more
        if not self._idle_to:
            self._idle_from = self.max_pages

    @property
    def committed(self) -> int:
        """Bytes the pool takes from the budget: those of the system's pages under its pages."""
        return self.commitment.committed

    @property
    def live_pages(self) -> NDArray[np.intp]:
        """Ids of the pages that somebody holds."""
        return np.flatnonzero(self._live_array)

    # -- taking ---------------------------------------------------------------------------------

    def allocate(self, n: int) -> Int32:
        """The n lowest free pages, each with one reference; or an error and nothing changed."""
        if n == 1:
            return np.array([self.allocate_one()], np.int32)
        if n == 0:
            return np.empty(0, np.int32)
        ids = self._lowest_free(n)
        first, end = int(ids[0]), int(ids[-1]) + 1
        at = slice(first, end) if end - first == n else ids  # a slice is taken much faster
        if self.commitment.backed.count(1, first, end) < n or not isinstance(at, slice):
            try:
                self._back(ids)
            except BudgetError:
                self.budget.reclaim()
                self._back(ids)
        self._live_array[at] = 1
        self.refs[at] = 1
        self.frozen[at] = 0
        self.used += n
        self._cursor = end
        return ids

    @property
    def spare(self) -> int:
        """Free pages that are worth keeping backed; none where nobody uses any."""
        ahead = min(self.device.ahead, self.budget.limit // 32) // len(self.device.backings)
        return min(ahead // self.page_bytes, max(self.expected - self.used, 0)) if self.used else 0

    def back_ahead(self) -> None:
        """Backs the pages that are likely to be wanted next, where there is plenty of room."""
        n = min(self.spare, self.max_pages - self.used)
        if self.commitment.count - self.used >= n or self.budget.free < self.budget.limit // 8:
            return
        ids = self._lowest_free(n)
        with suppress(BudgetError):
            self._back(ids)
            self._note_idle(int(ids[0]), int(ids[-1]))

    def _back(self, ids: Int32) -> None:
        """Pays for those of these pages that are not backed."""
        fresh = self.commitment.unbacked(ids)
        self.commitment.back(fresh)
        if self._poison:
            self.bytes.fill(fresh, POISON)

    def allocate_one(self) -> int:
        """The lowest free page, with one reference."""
        page = self._live.find(0, self._cursor)
        if page < 0:
            raise PagesError(self._refusal(1))
        if not self.commitment.backed[page]:
            try:
                self.commitment.back_one(page)
            except BudgetError:
                self.budget.reclaim()
                self.commitment.back_one(page)
            if self._poison:
                self.bytes.fill([page], POISON)
        self._live[page] = 1
        self.counts[page] = 1
        self.frozen[page] = 0
        self.used += 1
        self._cursor = page + 1
        return page

    def has(self, n: int) -> bool:
        """Whether so many pages are free, whatever their bytes cost."""
        return n <= self.max_pages - self.used

    def price(self, n: int, enough: int) -> int:
        """Bytes that `allocate(n)` would take from the budget; a bound if that is `enough`."""
        bound = n * (self.page_bytes + 2 * self.commitment.granularity)
        if bound <= enough:
            return bound
        return self.commitment.price(self.commitment.unbacked(self._lowest_free(n)))

    def _lowest_free(self, n: int) -> Int32:
        if n > self.max_pages - self.used:
            raise PagesError(self._refusal(n))
        first = self._live.find(0, self._cursor)
        if first + n <= self.max_pages and self._live.find(1, first, first + n) < 0:
            return np.arange(first, first + n, dtype=np.int32)
        start, window, found = self._cursor, max(2 * n, 1024), np.empty(0, np.int32)
        while len(found) < n:
            more = np.flatnonzero(self._live_array[start : start + window] == 0)[: n - len(found)]
            found = np.concatenate([found, (more + start).astype(np.int32)])
            start, window = start + window, 2 * window
        return found

    def _refusal(self, n: int) -> str:
        return (
            f"{n} more {self.use} needed, {self.max_pages - self.used} of {self.max_pages} are "
            "free; free sequences or checkpoints, or raise kv_cache_tokens or memory_budget"
        )

    # -- sharing --------------------------------------------------------------------------------

    def share(self, ids: Int32, seen: Int32, appender: int) -> None:
        """Retains pages for a holder that sees the first `seen` slots of each.

        Pages that had a single holder get an appender: the one of the two that goes on writing.
        """
        if len(ids) == 0:
            return
        at = ids.astype(np.intp)  # NumPy's own index type makes each access several times faster
        counts = self.refs[at]
        assert counts.all(), "a free page cannot be shared"
        if self.cached_pages:
            self.cached_only -= int((counts == self.cached[at]).sum())
        alone = counts == 1
        self.frozen[at] = np.where(alone, seen, np.maximum(self.frozen[at], seen))
        self.appender[at[alone]] = appender
        self.refs[at] = counts + 1

    def share_full(self, ids: Int32, slots: int) -> None:
        """`share` of pages of which all slots are seen: nobody can append to them any more."""
        at = ids.astype(np.intp)
        counts = self.refs[at]
        assert counts.all(), "a free page cannot be shared"
        if self.cached_pages:
            self.cached_only -= int((counts == self.cached[at]).sum())
        self.frozen[at] = slots
        self.refs[at] = counts + 1

    def freeze(self, ids: Int32, seen: Int32) -> None:
        """A holder that was there already sees more of these pages."""
        self.frozen[ids] = np.maximum(self.frozen[ids], seen)

    def hand_over(self, ids: Int32, refs: Int32, frozen: Int32, appender: Int32) -> None:
        """Pages just allocated get all their holders at once."""
        assert (refs > 0).all(), "a page that nobody holds is free"
        self.refs[ids], self.frozen[ids], self.appender[ids] = refs, frozen, appender

    def share_one(self, page: int, seen: int, appender: int) -> None:
        """`share` of a single page."""
        count = self.counts[page]
        assert count > 0, "a free page cannot be shared"
        if self.cached_pages and count == self.cached[page]:
            self.cached_only -= 1
        if count == 1:
            self.frozen[page] = seen
            self.appender[page] = appender
        elif seen > self.frozen[page]:
            self.frozen[page] = seen
        self.counts[page] = count + 1

    def cache(self, ids: Int32, by: int) -> None:
        """The prefix index is a holder of these pages (+1), or is about to let them go (-1)."""
        at = ids.astype(np.intp)
        refs, before = self.refs[at], self.cached[at]
        after = before + by
        assert (after >= 0).all() and (after <= refs).all(), "the index holds what it has cached"
        self.cached[at] = after
        self.cached_pages += int((after > 0).sum()) - int((before > 0).sum())
        self.cached_only += int((after == refs).sum()) - int((before == refs).sum())

    def may_append(self, page: int, slot: int, holder: int) -> bool:
        """Whether this holder may write the slots from `slot` on: nobody else sees them."""
        return self.counts[page] == 1 or bool(
            self.appender[page] == holder and slot >= self.frozen[page]
        )

    # -- giving back ----------------------------------------------------------------------------

    def release(self, ids: Int32) -> None:
        """One reference less to each of these distinct pages; those without any are free."""
        if len(ids) == 0:
            return
        at = ids.astype(np.intp)
        counts = self.refs[at] - 1
        assert counts.min() >= 0, "a free page cannot be released"
        self.refs[at] = counts
        dead = at[counts == 0]
        if self.cached_pages:
            self.cached_only += int((counts == self.cached[at]).sum()) - len(dead)
        if len(dead) == 0:
            return
        self._live_array[dead] = 0
        self.used -= len(dead)
        self._note_idle(int(dead.min()), int(dead.max()))
        if self._poison:
            self.bytes.fill(dead, POISON)

    def release_one(self, page: int) -> None:
        """One reference less to a page."""
        count = self.counts[page]
        assert count > 0, "a free page cannot be released"
        self.counts[page] = count - 1
        if count > 1:
            if self.cached_pages and count - 1 == self.cached[page]:
                self.cached_only += 1
            return
        self._live[page] = 0
        self.used -= 1
        self._note_idle(page, page)
        if self._poison:
            self.bytes.fill([page], POISON)

    def trim(self, keep: int = 0) -> None:
        """Gives the bytes of idle pages, all but `keep` of them, back to the system and budget."""
        if self.commitment.count - self.used <= keep or not self.commitment.gives_back:
            return
        start, stop = self._idle_from, self._idle_to
        backed = np.frombuffer(self.commitment.backed, np.uint8)[start:stop]
        idle = np.flatnonzero(backed > self._live_array[start:stop]) + start
        self.commitment.give_back(idle[keep:])
        self._idle_from, self._idle_to = self.max_pages, 0
        if keep:
            self._note_idle(int(idle[0]), int(idle[keep - 1]))

    def close(self) -> None:
        """Gives everything back; no page may be in use, and the pool is of no use afterwards."""
        assert self.used == 0, f"{self.used} {self.use} are still referenced"
        self.budget.forget(self.trim)
        self.commitment.close()

    def _note_idle(self, low: int, high: int) -> None:
        if low < self._cursor:
            self._cursor = low
        if low < self._idle_from:
            self._idle_from = low
        if high >= self._idle_to:
            self._idle_to = high + 1

    def wipe(self) -> None:
        """Zeroes all bytes that the pool still has from the system."""
        self.bytes.fill(np.flatnonzero(np.frombuffer(self.commitment.backed, np.uint8)), 0)
