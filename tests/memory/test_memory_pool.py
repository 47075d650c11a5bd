"""The pool by itself: order, counts, bytes that are really there and really given back."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from fake_kernel import FakeOps, make_device, page_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.device import Backing, PageWork
from quire.devices.host import HostBacking, HostDevice
from quire.errors import BudgetError, PagesError
from quire.memory.audit import Holder, audit_pool
from quire.memory.pages.demand import fit_together
from quire.memory.pages.pool import POISON, PagePool

linux = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="asks /proc")
OS_PAGE = HostDevice.granularity
SIZES = [64, 192, 4096, 4160, 10_048, 65_536, 368_640]


def fits(pool: PagePool, n: int) -> bool:
    return fit_together([(pool, n)])


def make(size: int = 192, max_pages: int = 64, limit: int = 1 << 30, **how: bool) -> PagePool:
    return PagePool("test", size, max_pages, make_device(Budget(limit)), **how)


def resident(pool: PagePool) -> int:
    """Bytes of the pool's range that are in memory, according to the system."""
    base = pool.bytes.base
    first = base // OS_PAGE
    last = -(-(base + pool.max_pages * pool.page_bytes) // OS_PAGE)
    with Path("/proc/self/pagemap").open("rb") as pagemap:  # 8 bytes per page, bit 63: present
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (last - first)), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * OS_PAGE


def test_the_lowest_free_page_comes_first() -> None:
    pool = make()
    assert pool.allocate(5).tolist() == [0, 1, 2, 3, 4]
    pool.release(np.array([3, 1], np.int32))
    assert pool.allocate_one() == 1
    assert pool.allocate(3).tolist() == [3, 5, 6]
    pool.release_one(0)
    pool.trim()
    assert pool.allocate(1).tolist() == [0]


def test_pages_are_counted() -> None:
    pool = make()
    ids = pool.allocate(3)
    pool.share_full(ids[1:], 1)
    pool.release(ids)
    assert (pool.used, pool.refs[:3].tolist(), pool.live_pages.tolist()) == (2, [0, 1, 1], [1, 2])
    with pytest.raises(AssertionError, match="free page"):
        pool.share_full(ids, 1)
    with pytest.raises(AssertionError, match="free page"):
        pool.release(ids)
    with pytest.raises(AssertionError, match="free page"):
        pool.release_one(0)
    assert pool.refs[:3].tolist() == [0, 1, 1]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_too_many_pages_are_refused_whole(n: int) -> None:
    pool = make(max_pages=8)
    pool.allocate(8 - n + 1)
    before = (pool.used, pool.committed, pool.refs.tolist())
    assert not fits(pool, n) and fits(pool, n - 1)
    with pytest.raises(PagesError, match=rf"{n} more pages of test needed, {n - 1} of 8.*raise"):
        pool.allocate(n)
    assert (pool.used, pool.committed, pool.refs.tolist()) == before


@pytest.mark.parametrize("size", SIZES)
def test_too_many_bytes_are_refused_whole(size: int) -> None:
    budget = Budget(5 * size + 2 * OS_PAGE)
    pool = PagePool("test", size, 10_000, make_device(budget))
    ids = pool.allocate(4)
    pool.release(ids[1:2])
    pool.trim()
    before = (pool.used, pool.committed, budget.breakdown, pool.refs.tolist())
    n = next(n for n in range(1, 10_000) if not fits(pool, n))
    with pytest.raises(BudgetError, match="pages of test needs"):
        pool.allocate(n)
    assert (pool.used, pool.committed, budget.breakdown, pool.refs.tolist()) == before
    assert audit_pool(pool, [Holder("", 0, ids[[0, 2, 3]], ids[[0, 2, 3]])]) == []
    more = pool.allocate(n - 1)
    assert len(more) == n - 1 and more[0] == 1


@linux
@pytest.mark.parametrize("size", SIZES)
def test_committed_bytes_are_the_bytes_in_memory(size: int) -> None:
    rng = random.Random(size)
    pool = make(size, max_pages=max(40, 4 * OS_PAGE // size))
    live: list[int] = []
    for _ in range(12):
        for page in pool.allocate(rng.randint(1, pool.max_pages // 4)).tolist():
            page_bytes(pool, page)[:] = page % 251 + 1
            live.append(page)
        rng.shuffle(live)
        gone = [live.pop() for _ in range(rng.randint(len(live) // 2, len(live)))]
        pool.release(np.array(gone, np.int32))
        pool.trim()
        assert pool.committed == resident(pool) == pool.budget.used
        for page in live:  # a neighbour that was given back took nothing along
            assert (page_bytes(pool, page) == page % 251 + 1).all()
    pool.release(np.array(live, np.int32))
    pool.trim()
    assert (pool.used, pool.committed, resident(pool)) == (0, 0, 0)


@linux
def test_address_space_costs_nothing() -> None:
    pool = make(368_640, max_pages=1 << 14, limit=1 << 40)
    assert (resident(pool), pool.committed) == (0, 0)
    pool.allocate_one()
    assert pool.committed == 368_640


def test_pages_come_back_clean_after_trim() -> None:
    pool = make(10_048)
    pages = pool.allocate(6)
    for page in pages.tolist():
        page_bytes(pool, page)[:] = 7
    pool.release(pages)
    pool.trim()
    assert pool.allocate(6).tolist() == pages.tolist()
    assert not any(page_bytes(pool, page).any() for page in pages.tolist())


@linux
def test_without_demand_paging_everything_is_taken_at_once() -> None:
    pool = make(10_048, max_pages=50, demand_paged=False)
    size = -(-50 * 10_048 // OS_PAGE) * OS_PAGE
    assert pool.committed == resident(pool) == pool.budget.used == size
    ids = pool.allocate(50)
    pool.release(ids)
    pool.trim()
    assert pool.committed == resident(pool) == size
    pool.close()
    assert pool.budget.used == 0
    with pytest.raises(BudgetError, match="pages of test alone takes"):
        make(10_048, max_pages=50, limit=size - 1, demand_paged=False)


def test_free_and_fresh_pages_are_poisoned() -> None:
    pool = make(10_048, poison=True)
    one = pool.allocate_one()
    for page in (one, *pool.allocate(3)):
        assert (page_bytes(pool, int(page)) == POISON).all()
    page_bytes(pool, one)[:] = 1
    pool.release_one(one)
    assert (page_bytes(pool, one) == POISON).all()
    for kind in (np.float32, np.float16):
        assert np.isnan(page_bytes(pool, one).view(kind)).all()


def test_copying_a_page_copies_all_of_it_and_nothing_else() -> None:
    pool = make(10_048)
    a, b, c = pool.allocate(3).tolist()
    page_bytes(pool, a)[:] = np.arange(10_048) % 251
    page_bytes(pool, c)[:] = 9
    work = PageWork()
    work.copy("test", a, b)
    work.copy("of another device", b, c)
    pool.device.run(work)
    assert (page_bytes(pool, b) == page_bytes(pool, a)).all() and (page_bytes(pool, c) == 9).all()


def test_bytes_are_read_written_and_filled_page_by_page() -> None:
    pool = make(192)
    ids = pool.allocate(4)
    pool.bytes.fill(ids, 5)
    with pool.bytes.writing([2, 0]) as pages:
        pages[0][:], pages[1][:] = 2, 1
    assert [set(page.tolist()) for page in pool.bytes.read(ids)] == [{1}, {5}, {2}, {5}]


def test_a_closed_pool_leaves_nothing() -> None:
    pool = make()
    ids = pool.allocate(3)
    with pytest.raises(AssertionError, match="still referenced"):
        pool.close()
    pool.release(ids)
    pool.close()
    assert pool.budget.used == 0


def test_sharing_freezes_what_is_seen_and_leaves_one_appender() -> None:
    pool = make()
    ids = pool.allocate(2)
    assert pool.may_append(0, 0, holder=8)  # alone
    pool.share(ids, np.array([4, 2], np.int32), appender=1)
    assert (pool.frozen[:2].tolist(), pool.refs[:2].tolist()) == ([4, 2], [2, 2])
    assert [pool.may_append(1, slot, holder=1) for slot in (1, 2, 3)] == [False, True, True]
    assert not pool.may_append(1, 2, holder=2)
    pool.share(ids[1:], np.array([1], np.int32), appender=2)  # sees less, and cannot take over
    assert pool.frozen[1] == 2 and pool.appender[1] == 1
    pool.share(ids[1:], np.array([3], np.int32), appender=2)
    assert pool.frozen[1] == 3 and not pool.may_append(1, 2, holder=1)
    for _ in range(3):
        pool.release(ids[1:])
    assert pool.may_append(1, 0, holder=2)  # the last holder, whoever it is


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([64, 1344, 4160, 10_048]),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30),
)
def test_the_books_balance(size: int, steps: list[tuple[int, int, bool]]) -> None:
    pool = make(size, max_pages=32, limit=20 * size + 3 * OS_PAGE)
    held: list[int] = []
    for n, m, trims in steps:
        free = sorted(set(range(32)) - set(held))
        fit = fits(pool, n)
        try:
            ids = pool.allocate(n).tolist()
            assert fit and ids == free[:n]
            held += ids
        except (PagesError, BudgetError):
            assert not fit
        gone, held = held[:m], held[m:]
        pool.release(np.array(gone, np.int32))
        if trims:
            pool.trim()
        ids = np.array(held, np.int32)
        assert audit_pool(pool, [Holder("held", 0, ids, ids)]) == []
    pool.release(np.array(held, np.int32))
    pool.trim()
    assert pool.committed == pool.budget.used == 0


# -- cached pages ---------------------------------------------------------------------------------


def ids_of(*pages: int) -> NDArray[np.int32]:
    return np.array(pages, np.int32)


def cached(pool: PagePool) -> tuple[list[int], int, int]:
    return pool.cached[:4].tolist(), pool.cached_pages, pool.cached_only


def test_what_only_the_index_holds_is_counted_as_it_comes_and_goes() -> None:
    pool = make()
    pool.allocate(3)
    pool.share(ids_of(0, 1), ids_of(4, 4), appender=1)
    pool.cache(ids_of(0, 1), 1)  # a sequence and an entry
    assert cached(pool) == ([1, 1, 0, 0], 2, 0)
    pool.release(ids_of(0, 1, 2))  # the sequence goes
    assert cached(pool) == ([1, 1, 0, 0], 2, 2)
    pool.share_one(0, 4, appender=2)  # another begins with page 0
    assert cached(pool) == ([1, 1, 0, 0], 2, 1)
    pool.share_full(ids_of(0), 4)
    pool.cache(ids_of(0), 1)  # and is retained as well
    assert cached(pool) == ([2, 1, 0, 0], 2, 1)
    pool.release_one(0)
    assert cached(pool) == ([2, 1, 0, 0], 2, 2)
    pool.cache(ids_of(0, 1), -1)
    pool.release(ids_of(0, 1))  # the first entry goes
    assert cached(pool) == ([1, 0, 0, 0], 1, 1)
    with pytest.raises(AssertionError, match="holds what it has cached"):
        pool.cache(ids_of(0), 1)
    pool.cache(ids_of(0), -1)
    pool.release_one(0)
    assert cached(pool) == ([0, 0, 0, 0], 0, 0) and pool.used == 0


# -- what the system refuses ----------------------------------------------------------------------


class Stingy(HostBacking):
    """Backs six granules and no more."""

    def __init__(self, size: int, max_pages: int, demand_paged: bool) -> None:
        super().__init__(size, max_pages, demand_paged)
        self.given: set[int] = set()

    def back(self, low: int, high: int) -> None:
        if len(self.given) + high - low > 6:
            raise MemoryError(f"no {high - low} granules")
        assert self.given.isdisjoint(range(low, high))
        self.given |= set(range(low, high))

    def give_back(self, low: int, high: int) -> None:
        super().give_back(low, high)
        assert self.given.issuperset(range(low, high))
        self.given -= set(range(low, high))


class StingyDevice(HostDevice):
    def _backing(self, page_bytes: int, max_pages: int, demand_paged: bool) -> Backing:
        return Stingy(page_bytes, max_pages, demand_paged)


def test_what_the_system_has_not_is_refunded_and_said() -> None:
    budget = Budget(1 << 30)
    pool = PagePool("test", OS_PAGE, 64, StingyDevice(budget, FakeOps()))  # type: ignore[arg-type]
    assert isinstance(pool.bytes, Stingy)
    pool.allocate(5)
    pool.release(ids_of(1, 3))
    pool.trim()
    held = [Holder("", 0, ids_of(0, 2, 4), ids_of(0, 0, 0))]
    given, before = {*pool.bytes.given}, (pool.used, pool.committed, budget.breakdown)
    for n in (4, 5, 30):  # pages 1 and 3 can be had, what follows cannot
        with pytest.raises(BudgetError, match=r"budget allows and the system has not.*lower"):
            pool.allocate(n)
        assert (pool.used, pool.committed, budget.breakdown) == before
        assert pool.bytes.given == given and audit_pool(pool, held) == []
    assert pool.allocate(3).tolist() == [1, 3, 5]
    with pytest.raises(BudgetError, match="system has not"):
        pool.allocate_one()
    assert pool.used == 6 and budget.used == pool.committed == 6 * OS_PAGE
    everybody = [Holder("", 0, np.arange(6, dtype=np.int32), np.zeros(6, np.int32))]
    assert audit_pool(pool, everybody) == []


def test_a_range_that_the_system_refuses_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Backing:
        raise MemoryError("no addresses")

    monkeypatch.setattr(HostDevice, "_backing", refuse)
    for demand_paged in (True, False):
        budget = Budget(1 << 30)
        with pytest.raises(BudgetError, match=r"cannot be had: no addresses; lower"):
            PagePool("test", 4096, 8, make_device(budget), demand_paged)
        assert budget.used == 0


# -- pages that are backed before they are needed -------------------------------------------------


def test_pages_are_backed_ahead_while_there_is_plenty_and_somebody_uses_any() -> None:
    pool = make(OS_PAGE, max_pages=64, limit=64 * OS_PAGE)
    pool.device.ahead = 8 * OS_PAGE  # more than the budget is willing to spare: 2 pages of 64
    pool.back_ahead()
    assert (pool.spare, pool.committed) == (0, 0)  # nobody uses any
    ids = pool.allocate(3)
    pool.back_ahead()
    assert (pool.spare, pool.committed) == (2, 5 * OS_PAGE)
    pool.trim(pool.spare)
    assert pool.committed == 5 * OS_PAGE
    assert pool.allocate(2).tolist() == [3, 4] and pool.committed == 5 * OS_PAGE  # at no cost
    pool.back_ahead()
    assert fits(pool, 59) and not fits(pool, 60)  # what is kept is in nobody's way
    more = pool.allocate(58)
    pool.back_ahead()  # too little is left
    assert pool.committed == 63 * OS_PAGE
    holders = [Holder("me", 0, np.arange(63, dtype=np.int32), np.zeros(63, np.int32))]
    assert audit_pool(pool, holders) == []
    pool.release(np.concatenate([ids, [3, 4], more]).astype(np.int32))
    pool.trim(pool.spare)
    assert pool.committed == 0


def test_no_more_is_backed_ahead_than_is_expected() -> None:
    pool = make(OS_PAGE, max_pages=64, limit=64 * OS_PAGE)
    pool.device.ahead, pool.expected = 2 * OS_PAGE, 4
    for used, committed in ((1, 3), (3, 4), (4, 4), (6, 6)):
        pool.allocate(used - pool.used)
        pool.back_ahead()
        assert pool.committed == committed * OS_PAGE
    pool.release(np.arange(6, dtype=np.int32))
    pool.trim(pool.spare)
    assert pool.committed == 0
