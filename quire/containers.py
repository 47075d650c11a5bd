"""What a container leaves to this process: the limits of its control groups, in both versions.

A process is in a group that lies within others, and every one of them may have a limit: the
smallest counts. Inside a container only a part of them can be seen, at other places than the
system says; so each ancestor of each place is looked at, where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path

_MOUNT = Path("sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 instead


def free_memory(root: Path) -> int | None:
    """Bytes that this process may still take before a limit is reached; None without one."""
    found: list[int] = []
    for folder in _folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        stat = _text(folder / "memory.stat").split()
        names = dict(zip(stat[::2], stat[1::2], strict=False))
        files = names.get("total_inactive_file", names.get("inactive_file", "0"))
        # What lies there of files goes when the memory is needed.
        found.append(max(limit - used + (int(files) if files.isdigit() else 0), 0))
    return min(found, default=None)


def cores(root: Path) -> int | None:
    """How many cores this process may use at a time, rounded up; None without a limit."""
    found: list[int] = []
    for folder in _folders(root, "cpu"):
        words = _text(folder / "cpu.max").split() or [
            _text(folder / "cpu.cfs_quota_us").strip(),
            _text(folder / "cpu.cfs_period_us").strip(),
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) > 0 for word in words):
            found.append(max(ceil(int(words[0]) / int(words[1])), 1))
    return min(found, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Where limits of this process may be told, whichever version there is."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = controllers.split(",")
        if number == "0" and not controllers:
            mounts = [_MOUNT, _MOUNT / "unified"]
        elif controller in names:
            mounts = [_MOUNT / controllers, _MOUNT / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        if ".." in inner.parts:
            inner = Path()
        for mount in mounts:
            for part in (inner, *inner.parents):
                yield root / mount / part


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
