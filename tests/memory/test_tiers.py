"""Pages that leave memory and come back: the same bytes, and room that is never lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_kernel import NowCopier
from fake_kinds import KINDS, append, check_seq, make_kind, snapshot, tokens_at
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.errors import TierError
from quire.memory.tiers.pinned import PinnedTier
from quire.memory.tiers.tiers import DiskTier, HostTier, Stored, Tier, Tiers

PAGE = 96
MAKERS: dict[str, Callable[[Path, int], Tier]] = {
    "host": lambda _, limit: HostTier(limit),
    "disk": lambda folder, limit: DiskTier(folder, limit),
    "pinned": lambda _, limit: PinnedTier(NowCopier(), limit),
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


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_device_copies_its_pages_by_itself(kind: str) -> None:
    memory, copier = make_kind(kind), NowCopier()
    for pool in memory.pools:
        pool.bytes.copier = copier
    tier = PinnedTier(copier, 1 << 20)
    for seq in (0, 1):
        append(memory, seq, *range(100 * seq, 100 * seq + 23))
    for _ in range(3):
        held = memory.park_bytes(0)
        memory.park(0, tier)
        assert tier.used == held == sum(room.nbytes for room in copier.rooms) > 0
        append(memory, 2, *range(300, 323))  # takes the pages that were left
        check_seq(memory, 2, tokens_at(*range(300, 323)))
        memory.seq_free(2)
        memory.unpark(0)
        assert tier.used == 0
        for seq in (0, 1):
            check_seq(memory, seq, tokens_at(*range(100 * seq, 100 * seq + 23)))
        memory.audit()
    assert tier.writing.bytes_per_s > 0 and tier.reading.bytes_per_s > 0
    tier.close()
    assert copier.rooms == []


def test_rooms_of_other_sizes_make_way() -> None:
    copier = NowCopier()
    tier = PinnedTier(copier, 10 * PAGE)
    for _ in range(3):
        for size, n in ((PAGE, 10), (5 * PAGE, 2), (3 * PAGE, 3)):
            stored = tier.store([np.full(size, 7, np.uint8)] * n)
            assert sum(room.nbytes for room in copier.rooms) <= 10 * PAGE
            with pytest.raises(TierError, match="do not fit"):
                tier.store([np.zeros(2 * PAGE, np.uint8)])
            stored.drop()
    tier.close()
    assert copier.rooms == [] and tier.used == 0


def test_a_host_that_gives_no_room_changes_nothing() -> None:
    memory, copier = make_kind("attention"), NowCopier()
    for pool in memory.pools:
        pool.bytes.copier = copier
    append(memory, 0, *range(23))
    was, real = snapshot(memory), copier.room

    def refuse(size: int) -> NDArray[np.uint8]:
        if len(copier.rooms) == 3:
            raise MemoryError("none left")
        return real(size)

    copier.room = refuse  # type: ignore[method-assign]
    tier = PinnedTier(copier, 1 << 20)
    with pytest.raises(TierError, match="none left"):
        memory.park(0, tier)
    assert snapshot(memory) == was and tier.used == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_parked_sequence_changes_places_with_a_checkpoint(kind: str) -> None:
    """What it alone saw of a page that stayed is not written over, whoever holds that page next."""
    memory, tier = make_kind(kind), HostTier(1 << 20)
    append(memory, 0, *range(21))
    memory.seq_cp(0, 1)
    append(memory, 0, *range(100, 103))  # behind what the fork sees, in a page of both
    was = tokens_at(*range(21), *range(100, 103))
    memory.park(0, tier)
    used = tier.used
    name = memory.checkpoint_take(0)
    assert memory.seq_pos_max(0) == -1 and not memory.is_parked(0) and tier.used == used
    memory.audit()
    memory.seq_cp(1, 0)
    append(memory, 0, *range(200, 204))
    memory.audit()
    memory.checkpoint_give(0, name)
    assert memory.is_parked(0) and tier.used == used and not memory.checkpoints.by_name
    memory.audit()
    memory.unpark(0)
    check_seq(memory, 0, was)
    check_seq(memory, 1, tokens_at(*range(21)))
    append(memory, 0, 104)
    memory.audit()
    for seq in (0, 1):
        memory.seq_free(seq)
    assert tier.used == 0 and not any(pool.used for pool in memory.pools)
