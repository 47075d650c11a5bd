"""Copies between pages and the host, on a stream of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops.cuda.driver import Driver, DriverError, call, library

Bytes = NDArray[np.uint8]


class CudaCopy:
    """A copy that was started."""

    def __init__(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._start, self._end = start, end

    def wait(self) -> None:
        """Until it is done."""
        self._end.synchronize()

    def seconds(self) -> float | None:
        """How long it took; None while it is under way."""
        return self._start.elapsed_time(self._end) / 1e3 if self._end.query() else None


class CudaCopier:
    """One GPU's copies, one after the other, beside its kernels.

    A copy waits for what the GPU was told before, on the stream that is current, and what it is
    told after waits for the copy: so pages are neither read too early nor written too soon.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver, self._index = driver, index
        self._stream = torch.cuda.Stream(index)
        for name in ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"):
            word = ctypes.c_void_p
            getattr(library(), name).argtypes = (word, word, ctypes.c_size_t, word)
        library().cuMemHostAlloc.argtypes = (
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint,
        )  # fmt: skip
        library().cuMemFreeHost.argtypes = (ctypes.c_void_p,)

    def room(self, size: int) -> Bytes:
        """Host memory that is copied at full speed; MemoryError if there is none."""
        self._driver.enter()
        address = ctypes.c_void_p()
        try:
            call("cuMemHostAlloc", ctypes.byref(address), size, 0)
        except DriverError as error:
            raise MemoryError(str(error)) from error
        assert address.value is not None
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address.value))

    def free(self, room: Bytes) -> None:
        """Returns a room, once nothing is copied any more."""
        self._stream.synchronize()
        self._driver.enter()
        call("cuMemFreeHost", room.ctypes.data)

    def out(self, rooms: Sequence[Bytes], pages: Sequence[int]) -> CudaCopy:
        """Starts to copy pages, by their addresses, into rooms."""
        return self._start("cuMemcpyDtoHAsync_v2", [r.ctypes.data for r in rooms], pages, rooms)

    def back(self, rooms: Sequence[Bytes], pages: Sequence[int]) -> CudaCopy:
        """Starts to copy rooms into pages."""
        return self._start("cuMemcpyHtoDAsync_v2", pages, [r.ctypes.data for r in rooms], rooms)

    def _start(
        self, name: str, targets: Sequence[int], sources: Sequence[int], rooms: Sequence[Bytes]
    ) -> CudaCopy:
        self._driver.enter()
        now = torch.cuda.current_stream(self._index)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(now)
        start.record(self._stream)
        for target, source, room in zip(targets, sources, rooms, strict=True):
            call(name, target, source, room.nbytes, self._stream.cuda_stream)
        end.record(self._stream)
        now.wait_event(end)
        return CudaCopy(start, end)
