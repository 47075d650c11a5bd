"""A file that is read through one descriptor, from the first byte of its header to its last.

What is mapped can be taken away: a file that another process cuts would end this one with a signal.
So bytes are copied, and one that ends too early is an error. One that is replaced changes nothing.
"""

from __future__ import annotations

import os
import stat
import weakref
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.errors import FileError
from quire.files import read_at

_AT_ONCE = 1 << 30
_SPARE = 4
_SPARE_BYTES = 1 << 24  # larger ones are not kept


class Stored:
    """Bytes that are still in a file: of a tensor, or a part of one."""

    def __init__(self, file: OpenFile, offset: int, size: int, what: str) -> None:
        self.size = size
        self._file, self._offset, self._what = file, offset, what

    def __getitem__(self, cut: slice) -> Stored:
        start, stop, _ = cut.indices(self.size)
        return Stored(self._file, self._offset + start, max(stop - start, 0), self._what)

    def read(self, start: int, into: NDArray[np.uint8]) -> None:
        """The bytes from one on, into an array; from any thread."""
        self._file.read_into(self._offset + start, into, self._what)

    def with_next(self, other: Stored) -> Stored | None:
        """Both as one, if the other lies right behind this."""
        if other._file is not self._file or other._offset != self._offset + self.size:
            return None
        return Stored(self._file, self._offset, self.size + other.size, self._what)


class OpenFile:
    """A regular file's bytes."""

    def __init__(self, path: Path, error: type[FileError], suffix: str) -> None:
        self.path = path
        self._error = error
        self._spare: list[bytearray] = []  # used again: fresh memory costs as much as reading
        try:
            # Looked at before opening too: opening a pipe would wait for its other end.
            for status in (os.stat, self._open):
                found = status(path)
                if not stat.S_ISREG(found.st_mode):
                    raise error(f"{path}: not a regular file; pass the path of a {suffix} file")
            if found.st_size == 0:
                raise error(f"{path}: the file is empty; fetch it again")
        except OSError as failure:
            raise error(f"{path}: cannot be opened: {failure.strerror}") from failure
        except ValueError as failure:  # a NUL in the path, or a lone surrogate
            raise error(f"{str(path)!r}: cannot be opened: {failure}") from failure
        self.size = found.st_size

    def _open(self, path: Path) -> os.stat_result:
        # It knows at any moment whether it is closed: whoever is interrupted between closing a
        # number and noting that would close it once more, when it is somebody else's already.
        self._file = FileIO(path)
        return os.fstat(self._file.fileno())

    def read(self, offset: int, nbytes: int, what: str) -> NDArray[np.uint8]:
        """A copy of some bytes; `what` is what errors call them."""
        out = self._buffer(nbytes)
        self.read_into(offset, out, what)
        return out

    def read_into(self, offset: int, out: NDArray[np.uint8], what: str) -> None:
        """Some bytes, into an array; from any thread."""
        self.check_open()
        descriptor = self._file.fileno()
        nbytes, view, done = out.nbytes, out.data, 0
        while done < nbytes:
            try:
                got = read_at(descriptor, [view[done : done + _AT_ONCE]], offset + done)
            except OSError as failure:
                raise self._error(f"{self.path}: {what}: {failure.strerror}") from failure
            if got == 0:
                raise self._error(
                    f"{self.path}: ends at {offset + done} bytes, {what} needs {offset + nbytes}; "
                    "it was cut while it was read, or is still being written"
                )
            done += got

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """An array to read into; its memory is used again once it and all views of it are gone."""
        if not 0 < nbytes <= _SPARE_BYTES:
            return np.empty(nbytes, np.uint8)
        fitting = [raw for raw in self._spare if len(raw) >= nbytes]
        raw = min(fitting, key=len) if fitting else bytearray(nbytes)
        if fitting:
            self._spare = [spare for spare in self._spare if spare is not raw]
        out = np.frombuffer(raw, np.uint8, nbytes)
        weakref.finalize(out, self._keep, raw)
        return out

    def _keep(self, raw: bytearray) -> None:
        self._spare = sorted([*self._spare, raw], key=len)[-_SPARE:]

    def check_open(self) -> None:
        """Refuses to go on with a file that was closed."""
        if self._file.closed:
            raise self._error(f"{self.path}: the file was closed, its tensors cannot be read")

    def close(self) -> None:
        """Lets go of the file; once is enough."""
        self._file.close()
        self._spare = []

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()
