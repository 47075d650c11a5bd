"""What every attempt is held to: only QuireError comes out, within limits of time and memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.errors import QuireError


@contextmanager
def within(seconds: float, megabytes: float) -> Iterator[None]:
    """Fails if the processor time or the memory that Python sees goes past a limit."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    start = time.process_time()
    try:
        yield
        took = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()
    assert took < seconds, f"{took:.1f} seconds"
    assert peak < megabytes * 1e6, f"{peak / 1e6:.0f} megabytes"


def attempt(use: Callable[[], object]) -> bool:
    """Whether it was accepted; a refusal must say something (of a file, every missing tensor)."""
    try:
        use()
    except QuireError as error:
        assert 10 < len(str(error)) < 1_000_000, str(error)[:500]
        return False
    return True
