"""Threads for what may take long or recurse deeply; the process ends without waiting for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
DEEP = 256 << 20
"""Bytes of a stack for deep recursion: of address space, and of memory only what is used."""
_STARTING = threading.Lock()  # the size of stacks is the whole process's


def begun(do: Callable[[], T], stack_bytes: int = 0) -> Future[T]:
    """Does something in a thread of its own, with a stack of this size or the usual one."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            made.set_result(do())
        except BaseException as error:
            made.set_exception(error)

    with _STARTING:
        before = threading.stack_size(stack_bytes)
        try:
            threading.Thread(target=run, name="quire-aside", daemon=True).start()
        finally:
            threading.stack_size(before)
    return made
