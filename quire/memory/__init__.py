"""What sequences remember: pages, tables over them, and one budget in bytes."""

from quire.memory.build import build_memory

__all__ = ["build_memory"]
