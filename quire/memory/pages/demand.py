"""Pages that are wanted of several pools at once, which may share a budget."""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory.pages.pool import PagePool

Demand = list[tuple[PagePool, int]]
"""Pages that are wanted of pools."""


def by_pool(demand: Demand) -> Demand:
    """Each pool once, with all that is wanted of it."""
    whole: dict[int, tuple[PagePool, int]] = {}
    for pool, n in demand:
        whole[id(pool)] = (pool, n + whole.get(id(pool), (pool, 0))[1])
    return list(whole.values())


def fit_together(demand: Iterable[tuple[PagePool, int]]) -> bool:
    """Whether so many pages of each of these pools could be allocated now, budget by budget."""
    by_budget: dict[int, Demand] = {}
    for pool, n in demand:
        if n > pool.max_pages - pool.used:
            return False
        if n:
            by_budget.setdefault(id(pool.budget.whole), []).append((pool, n))
    return all(_fits_budget(wanted) for wanted in by_budget.values())


def fit_alone(demand: Demand) -> bool:
    """Whether pools might have so many pages if nobody held any of theirs, budget by budget."""
    left = {id(pool.budget.whole): pool.budget.free for pool, _ in demand}
    for pool, n in demand:
        if n > pool.max_pages:
            return False
        left[id(pool.budget.whole)] += pool.committed - n * pool.page_bytes
    return all(n_bytes >= 0 for n_bytes in left.values())


def _fits_budget(demand: Demand) -> bool:
    budget = demand[0][0].budget
    enough = budget.free // len(demand)
    if sum(pool.price(n, enough) for pool, n in demand) <= budget.free:
        return True
    budget.reclaim()
    return sum(pool.price(n, 0) for pool, n in demand) <= budget.free
