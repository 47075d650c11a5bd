"""Where pages go when memory is short: memory of the host, then a file; whole pages, both ways.

    pool ──store──▶ host ─┐
      ▲             disk ─┤ (the first with room)
      └──────load─────────┘

A tier measures how fast it writes and reads, so that whoever makes room can tell whether it is
quicker to fetch pages back or to compute them again.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from quire.devices.device import Ids
from quire.errors import TierError
from quire.files import read_at, write_at
from quire.memory.pages.pool import PagePool

Bytes = NDArray[np.uint8]
_BUFFERS = 512  # as many pages as one system call is given
_GUESS = 1e9  # bytes per second, before anything was measured


class Speed:
    """Bytes per second, as measured; what was long ago counts for less and less."""

    def __init__(self) -> None:
        self._bytes, self._seconds = 0.0, 0.0
        self._under_way: deque[tuple[int, Callable[[], float | None]]] = deque(maxlen=64)

    @contextmanager
    def measure(self, n_bytes: int) -> Iterator[None]:
        """Times the moving of so many bytes."""
        start = perf_counter()
        yield
        self._bytes = self._bytes / 2 + n_bytes
        self._seconds = self._seconds / 2 + perf_counter() - start

    def add(self, n_bytes: int, seconds: Callable[[], float | None]) -> None:
        """Moving so many bytes was started, and will tell how long it took."""
        self._under_way.append((n_bytes, seconds))

    @property
    def bytes_per_s(self) -> float:
        """The speed, or a guess where nothing was measured yet."""
        while self._under_way and (took := self._under_way[0][1]()) is not None:
            n_bytes, _ = self._under_way.popleft()
            self._bytes = self._bytes / 2 + n_bytes
            self._seconds = self._seconds / 2 + took
        return self._bytes / self._seconds if self._seconds > 0 else _GUESS


class Stored(ABC):
    """Pages in a tier."""

    tier: Tier
    n_bytes: int

    @abstractmethod
    def load(self, pages: Sequence[Bytes]) -> None:
        """Copies all of them back, in the order they were stored."""

    def bring(self, pool: PagePool, pages: Ids) -> None:
        """Copies all of them into pages of a pool, in the order they were stored."""
        with pool.bytes.writing(pages) as arrays:
            self.load(arrays)

    @abstractmethod
    def drop(self) -> None:
        """Gives their room in the tier back."""


class Tier(ABC):
    """Room for pages outside the pools, up to a limit in bytes."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self.writing, self.reading = Speed(), Speed()

    def has(self, n_bytes: int) -> bool:
        """Whether there is room."""
        return self.used + n_bytes <= self.limit

    def take(self, pool: PagePool, pages: Ids) -> Stored:
        """Copies pages of a pool here; TierError, and nothing changed, if it cannot."""
        return self.store(pool.bytes.read(pages))

    @abstractmethod
    def store(self, pages: Sequence[Bytes]) -> Stored:
        """Copies bytes here; TierError, and nothing changed, if it cannot."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""

    def check(self, n_bytes: int) -> None:
        """Raises TierError if there is no room."""
        if not self.has(n_bytes):
            raise TierError(
                f"{n_bytes:,} bytes of pages do not fit {self.name}, which holds {self.used:,} of "
                f"{self.limit:,}; raise swap_space"
            )


class HostTier(Tier):
    """Memory of the host, for devices that have their own."""

    def __init__(self, limit: int) -> None:
        super().__init__("host memory", limit)

    def store(self, pages: Sequence[Bytes]) -> Stored:
        n_bytes = sum(page.nbytes for page in pages)
        self.check(n_bytes)
        with self.writing.measure(n_bytes):
            copies = [page.copy() for page in pages]
        self.used += n_bytes
        return _OnHost(self, copies, n_bytes)

    def close(self) -> None:
        """Nothing is held but what callers hold."""


class _OnHost(Stored):
    def __init__(self, tier: HostTier, copies: list[Bytes], n_bytes: int) -> None:
        self.tier, self.n_bytes = tier, n_bytes
        self._copies = copies

    def load(self, pages: Sequence[Bytes]) -> None:
        with self.tier.reading.measure(self.n_bytes):
            for page, copy in zip(pages, self._copies, strict=True):
                page[:] = copy

    def drop(self) -> None:
        self.tier.used -= self.n_bytes
        self._copies = []


class DiskTier(Tier):
    """A file without a name, made on first use: whatever ends the process, nothing is left."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__("the swap file", limit)
        self._folder = folder
        self._file: BinaryIO | None = None
        self._free: list[tuple[int, int]] = [(0, limit)]  # (offset, bytes), in order, apart

    def store(self, pages: Sequence[Bytes]) -> Stored:
        n_bytes = sum(page.nbytes for page in pages)
        self.check(n_bytes)
        offset = self._take(n_bytes)
        try:
            with self.writing.measure(n_bytes):
                self._move(write_at, pages, offset)
        except OSError as error:
            self._give(offset, n_bytes)
            raise TierError(
                f"{self.name} in {self._folder} cannot be written: {error}; free some space"
            ) from error
        self.used += n_bytes
        return _OnDisk(self, offset, n_bytes)

    def load(self, offset: int, n_bytes: int, pages: Sequence[Bytes]) -> None:
        """Reads pages from where they were stored."""
        try:
            with self.reading.measure(n_bytes):
                self._move(read_at, pages, offset)
        except OSError as error:
            raise TierError(f"{self.name} in {self._folder} cannot be read: {error}") from error

    def drop(self, offset: int, n_bytes: int) -> None:
        """Frees a part of the file."""
        self._give(offset, n_bytes)
        self.used -= n_bytes
        if self.used == 0 and self._file is not None:
            self._file.truncate(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _move(self, call: object, pages: Sequence[Bytes], offset: int) -> None:
        """Writes or reads all pages, one behind the other; OSError where the system stops short."""
        assert callable(call)
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        for at in range(0, len(pages), _BUFFERS):
            buffers = [page.data for page in pages[at : at + _BUFFERS]]
            while buffers:
                done = call(self._file.fileno(), buffers, offset)
                if done <= 0:
                    raise OSError("the file ends before the pages do")
                offset += done
                while buffers and done >= buffers[0].nbytes:
                    done -= buffers.pop(0).nbytes
                if done:
                    buffers[0] = buffers[0][done:]

    def _take(self, n_bytes: int) -> int:
        """The first part of the file that is free and large enough."""
        if n_bytes == 0:
            return 0
        for i, (offset, size) in enumerate(self._free):
            if size >= n_bytes:
                self._free[i : i + 1] = [(offset + n_bytes, size - n_bytes)] * (size > n_bytes)
                return offset
        raise TierError(f"{self.name} has no {n_bytes:,} bytes free in one piece; raise swap_space")

    def _give(self, offset: int, n_bytes: int) -> None:
        joined: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, *[(offset, n_bytes)] * (n_bytes > 0)]):
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined


class _OnDisk(Stored):
    def __init__(self, tier: DiskTier, offset: int, n_bytes: int) -> None:
        self.tier, self.n_bytes = tier, n_bytes
        self._disk, self._offset = tier, offset

    def load(self, pages: Sequence[Bytes]) -> None:
        self._disk.load(self._offset, self.n_bytes, pages)

    def drop(self) -> None:
        self._disk.drop(self._offset, self.n_bytes)


class Tiers:
    """The tiers in order: the first with room takes what comes."""

    def __init__(self, *tiers: Tier) -> None:
        self.tiers = tiers

    def for_bytes(self, n_bytes: int) -> Tier | None:
        """The tier that would take so many bytes."""
        return next((tier for tier in self.tiers if tier.has(n_bytes)), None)

    def seconds(self, n_bytes: int) -> float:
        """How long it takes to store so many bytes and to load them again; infinity: no room."""
        tier = self.for_bytes(n_bytes)
        if tier is None:
            return float("inf")
        return n_bytes / tier.writing.bytes_per_s + n_bytes / tier.reading.bytes_per_s

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Bytes used and the limit of each tier."""
        return {tier.name: {"used": tier.used, "limit": tier.limit} for tier in self.tiers}

    def close(self) -> None:
        """Gives everything back."""
        for tier in self.tiers:
            tier.close()
