"""A file mapped into memory, read-only."""

from __future__ import annotations

import mmap
import os
import stat
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.errors import FileError


class MappedFile:
    """A regular file's bytes; views of them stay valid after `close`, until the last one goes."""

    def __init__(self, path: Path, error: type[FileError], suffix: str) -> None:
        self.path = path
        self._error = error
        try:
            status = os.stat(path)  # before opening: opening a pipe would wait for its other end
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path}: not a regular file; pass the path of a {suffix} file")
            if status.st_size == 0:
                raise error(f"{path}: the file is empty; fetch it again")
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as failure:
            raise error(f"{path}: cannot be opened: {failure.strerror}") from failure
        except ValueError as failure:  # a NUL in the path, or a file that just became empty
            raise error(f"{path!r}: cannot be opened: {failure}") from failure
        self._mapping: mmap.mmap | None = mapping
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._bytes.size

    def check_open(self) -> None:
        """Refuses to go on with a file that was closed."""
        if self._mapping is None:
            raise self._error(f"{self.path}: the file was closed, its tensors cannot be read")

    def bytes(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A view of some bytes, not a copy."""
        self.check_open()
        return self._bytes[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        """Drop these bytes from this process's memory; reading them again maps them anew.

        Only pages that lie wholly inside the range go, since its neighbours share the others.
        """
        self.check_open()
        assert self._mapping is not None
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform != "win32" and last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Let go of the mapping."""
        self._mapping = None
        self._bytes = np.empty(0, dtype=np.uint8)
