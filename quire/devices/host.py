"""The host's own memory: one anonymous mapping per pool, taken and given back page by page."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from quire.devices.budget import Budget
from quire.devices.device import Backing, Bytes, Device, Ids
from quire.ops import Ops

_LINUX = sys.platform == "linux"
_MAP_NORESERVE = 0x4000  # Linux; Python 3.11 does not name it
_GRANULE = mmap.PAGESIZE


class HostBacking(Backing):
    """A virtual range. The system hands memory out on the first write to one of its own pages.

    Where the system takes nothing back, what was written once stays until the range is closed.
    """

    def __init__(self, page_bytes: int, max_pages: int, demand_paged: bool) -> None:
        self.gives_back = _LINUX and demand_paged
        self._page_bytes = page_bytes
        size = -(-max_pages * page_bytes // _GRANULE) * _GRANULE
        self._map = self._mapping(size)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.base = self._bytes.ctypes.data
        if not demand_paged:
            self._bytes[::_GRANULE] = 0

    def _mapping(self, size: int) -> mmap.mmap:
        try:
            if not _LINUX:
                return mmap.mmap(-1, size)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            area = mmap.mmap(-1, size, flags=flags | (_MAP_NORESERVE if self.gives_back else 0))
        except (OSError, OverflowError) as error:
            raise MemoryError(f"the system refuses {size:,} bytes of addresses: {error}") from error
        if self.gives_back:
            # A huge page would be held whole for the sake of a few kilobytes in use.
            area.madvise(mmap.MADV_NOHUGEPAGE)
        return area

    def back(self, low: int, high: int) -> None:
        """Nothing to do: the first write is what takes memory."""

    def give_back(self, low: int, high: int) -> None:
        self._map.madvise(mmap.MADV_DONTNEED, low * _GRANULE, (high - low) * _GRANULE)

    def read(self, pages: Ids) -> list[Bytes]:
        size = self._page_bytes
        return [self._bytes[int(page) * size : (int(page) + 1) * size] for page in pages]

    @contextmanager
    def writing(self, pages: Ids) -> Iterator[list[Bytes]]:
        yield self.read(pages)  # the host writes where pages lie

    def fill(self, pages: Ids, byte: int) -> None:
        for page in self.read(pages):
            page[:] = byte

    def close(self) -> None:
        """The range is unmapped as soon as nobody holds a view of it."""
        self._bytes = np.empty(0, np.uint8)
        del self._map


class HostDevice(Device):
    """The host: with the CPU's operations, or with those of the reference."""

    granularity = _GRANULE
    capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def __init__(self, budget: Budget, ops: Ops, name: str = "cpu") -> None:
        super().__init__(name, budget, ops)

    def _backing(self, page_bytes: int, max_pages: int, demand_paged: bool) -> Backing:
        return HostBacking(page_bytes, max_pages, demand_paged)
