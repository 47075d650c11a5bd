"""For tests of budgets: what they held at their most."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.devices.budget import Budget


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """The most that each budget has held."""
    found: dict[int, int] = {}
    reserve = Budget.reserve

    def noted(self: Budget, n_bytes: int, what: str) -> None:
        reserve(self, n_bytes, what)
        found[id(self)] = max(found.get(id(self), 0), self.used)

    monkeypatch.setattr(Budget, "reserve", noted)
    yield found
