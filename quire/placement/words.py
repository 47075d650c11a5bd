"""Numbers as people read them."""

from __future__ import annotations


def size(n_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} GiB"


def counted(n: int, thing: str) -> str:
    """So many of a thing: 1 layer, 2 layers."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"
