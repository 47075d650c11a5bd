"""Pages that leave memory and come back: the same bytes, and room that is never lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.errors import TierError
from quire.memory.tiers.tiers import DiskTier, HostTier, Stored, Tier, Tiers

PAGE = 96
MAKERS: dict[str, Callable[[Path, int], Tier]] = {
    "host": lambda _, limit: HostTier(limit),
    "disk": lambda folder, limit: DiskTier(folder, limit),
}


def pages(n: int, seed: int) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 256, (n, PAGE), np.uint8))


@pytest.mark.parametrize("kind", sorted(MAKERS))
@example(steps=[(True, 0, 0), (True, 5, 0), (True, 3, 0), (False, 0, 0), (False, 0, 0)])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700), st.integers(0, 99)), max_size=30))
def test_whatever_stays_stays_the_same(
    kind: str, tmp_path: Path, steps: list[tuple[bool, int, int]]
) -> None:
    limit = 1000 * PAGE
    tier = MAKERS[kind](tmp_path, limit)
    held: list[tuple[Stored, list[NDArray[np.uint8]]]] = []
    for seed, (adds, n, which) in enumerate(steps):
        if adds or not held:
            data = pages(n, seed)
            used = sum(stored.n_bytes for stored, _ in held)
            try:
                held.append((tier.store(data), data))
            except TierError as error:
                assert used + n * PAGE > limit or "one piece" in str(error)
        else:
            held.pop(which % len(held))[0].drop()
        assert tier.used == sum(stored.n_bytes for stored, _ in held)
        for stored, data in held:
            back = [np.empty(PAGE, np.uint8) for _ in data]
            stored.load(back)
            assert all(np.array_equal(a, b) for a, b in zip(back, data, strict=True))
    for stored, _ in held:
        stored.drop()
    assert tier.used == 0
    tier.store(pages(1000, 0))  # all of it is free again, in one piece
    tier.close()


def test_the_first_with_room_takes_it(tmp_path: Path) -> None:
    host, disk = HostTier(3 * PAGE), DiskTier(tmp_path, 10 * PAGE)
    tiers = Tiers(host, disk)
    assert tiers.for_bytes(3 * PAGE) is host
    assert tiers.for_bytes(4 * PAGE) is disk
    assert tiers.for_bytes(11 * PAGE) is None and tiers.seconds(11 * PAGE) == float("inf")
    assert tiers.seconds(6 * PAGE) > tiers.seconds(4 * PAGE) > 0
    tiers.close()


def test_a_file_that_fails_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(TierError, match="cannot be written"):
        DiskTier(blocked / "below", 10 * PAGE).store(pages(1, 0))
    tier = DiskTier(tmp_path, 10 * PAGE)
    stored = tier.store(pages(3, 0))
    assert tier._file is not None
    tier._file.truncate(PAGE)
    with pytest.raises(TierError, match="ends before"):
        stored.load([np.empty(PAGE, np.uint8) for _ in range(3)])
    tier.close()
    assert list(tmp_path.iterdir()) == [blocked]
