"""Files that are either there as a whole or not at all, and reading at a place of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from errno import EEXIST, EINVAL
from pathlib import Path
from threading import Lock, RLock
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

_OPEN_FILES = "/proc/self/fd"


_SEEKING = Lock()


def seek_and_read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    """`os.preadv` where the system has none; one caller at a time, since a file has one place."""
    done = 0
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            data = os.read(descriptor, len(view))
            view[: len(data)] = data
            done += len(data)
            if len(data) < len(view):
                break
    return done


def seek_and_write(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    """`os.pwritev` where the system has none."""
    done = 0
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        for buffer in buffers:
            written = os.write(descriptor, memoryview(buffer).cast("B"))
            done += written
            if written < memoryview(buffer).nbytes:
                break
    return done


read_at: Callable[[int, Sequence[Any], int], int] = getattr(os, "preadv", seek_and_read)
"""Fills buffers, one behind the other, with a file's bytes from an offset on; how many came."""
write_at: Callable[[int, Sequence[Any], int], int] = getattr(os, "pwritev", seek_and_write)
"""The same for writing."""


class Writers:
    """One lock for each file, so that those who replace it do so one after the other."""

    def __init__(self) -> None:
        self._naming = RLock()
        self._by_path: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def of(self, path: Path) -> AbstractContextManager[object]:
        """That of a path; a handler of a signal that comes meanwhile may take it once more."""
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError):  # there is no such path; whoever writes there is told so
            real = str(path)
        with self._naming:
            found: AbstractContextManager[object] = self._by_path.setdefault(real, RLock())
            return found


def replace_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Writes a file that takes the place of the old one in one moment, once it is on the disk.

    OSError, and whatever `write` raises, leave the old file as it was. Only its owner may read the
    new one.
    """
    if "\0" in str(path):
        raise OSError(EINVAL, "a path cannot have a NUL in it", str(path))
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(EEXIST, "something is there that is not a regular file", str(path))
    unfinished = path.with_name(f".quire-{secrets.token_hex(8)}.tmp")
    try:
        _write_synced(unfinished, write)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _write_synced(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """A new file that is on the disk; where the system can, it has no name until then.

    So a process that is killed while it writes leaves nothing behind.
    """
    nameless = getattr(os, "O_TMPFILE", 0) if os.path.isdir(_OPEN_FILES) else 0
    try:
        handle = os.open(path.parent, nameless | os.O_RDWR, 0o600) if nameless else -1
    except OSError:  # not every file system has it
        handle = -1
    named = handle < 0
    if named:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with open(handle, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        if not named:
            # With a folder named, though none is looked at, the system follows the link.
            os.link(f"{_OPEN_FILES}/{file.fileno()}", path, src_dir_fd=file.fileno())


def _sync_folder(folder: Path) -> None:
    """Has the system put the new name on the disk as well, where it knows how to."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
