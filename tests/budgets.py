"""For tests of memory: what is held, and what budgets held at their most."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import pytest

import quire
from quire.devices.budget import Budget

Peaks = WeakKeyDictionary[Budget, int]


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peaks]:
    """The most that each budget has held."""
    found: Peaks = WeakKeyDictionary()
    reserve = Budget.reserve

    def noted(self: Budget, n_bytes: int, what: str) -> None:
        reserve(self, n_bytes, what)
        found[self] = max(found.get(self, 0), self.used)

    monkeypatch.setattr(Budget, "reserve", noted)
    yield found


def pages(llm: quire.LLM) -> int:
    """Pages in use by what somebody still holds; nothing stays cached."""
    gc.collect()
    llm.forget()
    llm.memory.audit()
    used: int = llm.memory.as_dict()["stats"]["attention"]["pages_used"]
    return used
