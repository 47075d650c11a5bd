"""The pool by itself: order, counts, bytes that are really there and really given back."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import BudgetError, PagesError
from quire.memory.audit import Holder, audit_pool
from quire.memory.backing import OS_PAGE
from quire.memory.budget import Budget
from quire.memory.pool import POISON, PagePool, fit_together

linux = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="asks /proc")
SIZES = [64, 192, 4096, 4160, 10_048, 65_536, 368_640]


def fits(pool: PagePool, n: int) -> bool:
    return fit_together([(pool, n)])


def make(page_bytes: int = 192, max_pages: int = 64, limit: int = 1 << 30, **how: bool) -> PagePool:
    return PagePool("test", page_bytes, max_pages, Budget(limit), **how)


def resident(pool: PagePool) -> int:
    """Bytes of the pool's range that are in memory, according to the system."""
    first = pool.address // OS_PAGE
    last = -(-(pool.address + pool.max_pages * pool.page_bytes) // OS_PAGE)
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


@pytest.mark.parametrize("page_bytes", SIZES)
def test_too_many_bytes_are_refused_whole(page_bytes: int) -> None:
    budget = Budget(5 * page_bytes + 2 * OS_PAGE)
    pool = PagePool("test", page_bytes, 10_000, budget)
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
@pytest.mark.parametrize("page_bytes", SIZES)
def test_committed_bytes_are_the_bytes_in_memory(page_bytes: int) -> None:
    rng = random.Random(page_bytes)
    pool = make(page_bytes, max_pages=max(40, 4 * OS_PAGE // page_bytes))
    live: list[int] = []
    for _ in range(12):
        for page in pool.allocate(rng.randint(1, pool.max_pages // 4)).tolist():
            pool.view(page)[:] = page % 251 + 1
            live.append(page)
        rng.shuffle(live)
        gone = [live.pop() for _ in range(rng.randint(len(live) // 2, len(live)))]
        pool.release(np.array(gone, np.int32))
        pool.trim()
        assert pool.committed == resident(pool) == pool.budget.used
        for page in live:  # a neighbour that was given back took nothing along
            assert (pool.view(page) == page % 251 + 1).all()
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
        pool.view(page)[:] = 7
    pool.release(pages)
    pool.trim()
    assert pool.allocate(6).tolist() == pages.tolist()
    assert not any(pool.view(page).any() for page in pages.tolist())


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
    with pytest.raises(BudgetError, match="pages of test needs"):
        make(10_048, max_pages=50, limit=size - 1, demand_paged=False)


def test_free_and_fresh_pages_are_poisoned() -> None:
    pool = make(10_048, poison=True)
    one = pool.allocate_one()
    for page in (one, *pool.allocate(3)):
        assert (pool.view(int(page)) == POISON).all()
    pool.view(one)[:] = 1
    pool.release_one(one)
    assert (pool.view(one) == POISON).all()
    for kind in (np.float32, np.float16):
        assert np.isnan(pool.view(one).view(kind)).all()


def test_copying_a_page_copies_all_of_it_and_nothing_else() -> None:
    pool = make(10_048)
    a, b, c = pool.allocate(3).tolist()
    pool.view(a)[:] = np.arange(10_048) % 251
    pool.view(c)[:] = 9
    pool.copy_page(a, b)
    assert (pool.view(b) == pool.view(a)).all() and (pool.view(c) == 9).all()


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
    page_bytes=st.sampled_from([64, 1344, 4160, 10_048]),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30),
)
def test_the_books_balance(page_bytes: int, steps: list[tuple[int, int, bool]]) -> None:
    pool = make(page_bytes, max_pages=32, limit=20 * page_bytes + 3 * OS_PAGE)
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
