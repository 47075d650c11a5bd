"""Memory of the host that a device copies from and to by itself, while the host goes on.

    store   device ──▶ rooms     behind all that the device was told before
    load    rooms  ──▶ device    and before all that it is told after

So a page may be given away as soon as its copy has started: whoever writes it comes after. Rooms
are of one page each and serve again; all copies are done one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.devices.copier import Bytes, Copier, Copy
from quire.devices.device import Ids
from quire.errors import TierError
from quire.memory.pages.pool import PagePool
from quire.memory.tiers.tiers import Stored, Tier


class PinnedTier(Tier):
    """Rooms for the pages of one device."""

    def __init__(self, copier: Copier, limit: int) -> None:
        super().__init__("host memory", limit)
        self._copier = copier
        self._idle: dict[int, list[Bytes]] = {}
        self._held = 0

    def take(self, pool: PagePool, pages: Ids) -> Stored:
        if pool.bytes.copier is not self._copier:
            return super().take(pool, pages)
        n_bytes = len(pages) * pool.page_bytes
        rooms = self._rooms(pool.page_bytes, len(pages))
        copy = self._copier.out(rooms, _addresses(pool, pages))
        self.writing.add(n_bytes, copy.seconds)
        self.used += n_bytes
        return _InRooms(self, rooms, n_bytes, copy)

    def store(self, pages: Sequence[Bytes]) -> Stored:
        rooms: list[Bytes] = []
        for page in pages:
            rooms += self._rooms(page.nbytes, 1)
            rooms[-1][:] = page
        n_bytes = sum(room.nbytes for room in rooms)
        self.used += n_bytes
        return _InRooms(self, rooms, n_bytes, None)

    def give(self, rooms: Sequence[Bytes], pool: PagePool, pages: Ids) -> Copy | None:
        """Starts to copy rooms into pages; None where that was done at once."""
        if pool.bytes.copier is not self._copier:
            with pool.bytes.writing(pages) as arrays:
                for array, room in zip(arrays, rooms, strict=True):
                    array[:] = room
            return None
        copy = self._copier.back(rooms, _addresses(pool, pages))
        self.reading.add(len(rooms) * pool.page_bytes, copy.seconds)
        return copy

    def give_back(self, rooms: Sequence[Bytes]) -> None:
        """Rooms serve again: whatever is copied next comes behind what is under way."""
        for room in rooms:
            self._idle.setdefault(room.nbytes, []).append(room)
        self.used -= sum(room.nbytes for room in rooms)

    def close(self) -> None:
        for room in [room for idle in self._idle.values() for room in idle]:
            self._free(room)
        self._idle = {}

    def _rooms(self, size: int, n: int) -> list[Bytes]:
        """Rooms of one size, idle ones first; TierError, and nothing changed, if there are none."""
        self.check(size * n)
        found: list[Bytes] = []
        try:
            for _ in range(n):
                idle = self._idle.get(size)
                found.append(idle.pop() if idle else self._made(size))
        except BaseException:
            for room in found:
                self._idle.setdefault(size, []).append(room)
            raise
        return found

    def _made(self, size: int) -> Bytes:
        """A new room; idle ones of other sizes make way for it."""
        for idle in self._idle.values():
            while idle and self._held + size > self.limit:
                self._free(idle.pop())
        try:
            room = self._copier.room(size)
        except MemoryError as error:
            raise TierError(f"{self.name} gives no {size:,} bytes: {error}") from error
        self._held += size
        return room

    def _free(self, room: Bytes) -> None:
        self._held -= room.nbytes
        self._copier.free(room)


def _addresses(pool: PagePool, pages: Ids) -> list[int]:
    return [pool.bytes.base + int(page) * pool.page_bytes for page in pages]


class _InRooms(Stored):
    def __init__(
        self, tier: PinnedTier, rooms: list[Bytes], n_bytes: int, copy: Copy | None
    ) -> None:
        self.tier, self.n_bytes = tier, n_bytes
        self._pinned, self._rooms, self._copy = tier, rooms, copy

    def load(self, pages: Sequence[Bytes]) -> None:
        if self._copy is not None:
            self._copy.wait()
        for page, room in zip(pages, self._rooms, strict=True):
            page[:] = room

    def bring(self, pool: PagePool, pages: Ids) -> None:
        if self._copy is not None and pool.bytes.copier is None:
            self._copy.wait()
        self._copy = self._pinned.give(self._rooms, pool, pages) or self._copy

    def drop(self) -> None:
        self._pinned.give_back(self._rooms)
        self._rooms = []
