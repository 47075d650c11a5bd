"""Pages that are filled before anybody holds them, and states that are brought on in them."""

from __future__ import annotations

import numpy as np

from quire.devices.device import PageWork
from quire.memory.groups.group import AnyGroup
from quire.memory.pages.pool import PagePool
from quire.memory.saved.convert import Bytes


class FreshPages:
    """Pages for what is being read, which nobody holds yet."""

    def __init__(self, pool: PagePool, n: int) -> None:
        self.pool = pool
        self._backed = np.frombuffer(bytes(pool.commitment.backed), np.uint8)
        self.ids = pool.allocate(n)

    def give_back(self) -> None:
        """As if they had never been taken: idle pages that were there stay, others go."""
        self.pool.release(self.ids)
        if self.pool.commitment.gives_back:
            new = self.ids[self._backed[self.ids] == 0]
            self.pool.commitment.give_back(new.astype(np.intp))


def folded(group: AnyGroup, state: Bytes | None, log: Bytes, entries: int, raw: bool) -> Bytes:
    """A state with the entries of a log in it, by the group's device; no state is one of zeros.

    A log may have raw inputs alone where the device needs more.
    """
    states, logs = group.pools
    taken: list[FreshPages] = []
    try:
        for pool, n in ((states, 2), (logs, 1)):
            taken.append(FreshPages(pool, n))
        (before, after), (entry,) = (pages.ids.tolist() for pages in taken)
        with states.bytes.writing([before]) as pages:
            pages[0][:] = 0 if state is None else state
        with logs.bytes.writing([entry]) as pages:
            pages[0][:] = log
        start = -1 if state is None else before
        if raw:
            group.device.derive(group.name, [(start, entry, entries)])
        work = PageWork()
        work.fold(group.name, start, entry, entries, after)
        group.device.run(work)
        return states.bytes.read([after])[0].copy()
    finally:
        for fresh in taken:
            fresh.give_back()
