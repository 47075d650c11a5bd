"""What the prefix index keeps, and what goes first when somebody needs the room.

in memory, by use   ──evict_one──▶   in a tier, where that pays   ──▶   gone; its key is
(pinned: stays)                      (the oldest makes room there)      remembered for a while
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from quire.memory.memory import Memory
from quire.memory.prefix.entries import ROOT_BYTES, Entries, Entry
from quire.memory.prefix.keys import Keys

_REMEMBERED = 4096
"""How many evicted entries are remembered, by key, to tell why a prompt missed."""
_WEIGHED = 16
"""How many entries, the least recently used ones, are weighed to find the one that goes."""

Park = Callable[[str, int], bool]
"""Moves a checkpoint to a tier, or not: so many tokens would be computed again without it."""


class Kept:
    """Entries by place and by use, with at most `max_bytes` of tokens to compare."""

    def __init__(
        self, memory: Memory, keys: Keys, max_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._memory = memory
        self._keys = keys
        self._max_bytes = max_bytes
        self._clock = clock
        self.entries = Entries()
        self._by_use: OrderedDict[Entry, None] = OrderedDict()  # the least recently used first
        self.parked: OrderedDict[Entry, None] = OrderedDict()
        """Those whose pages lie in a tier; the one that is there for longest first."""
        self.park: Park | None = None
        self._pages: Counter[bytes] = Counter()  # keys of first pages, whatever the salt
        self._evicted: dict[bytes, bytes] = {}  # keys of first pages -> their roots, oldest first
        self._uses = 0
        self.n_bytes = 0
        """Of tokens."""
        self.evictions = 0

    def was_here(self, place: bytes) -> bool:
        """Whether something with the same first page was evicted."""
        return bool(self._evicted) and self._keys.first_page(place) in self._evicted

    def has_elsewhere(self, place: bytes) -> bool:
        """Whether something with the same first page is here, under any salt."""
        return self._keys.first_page(place, any_salt=True) in self._pages

    # -- keeping --------------------------------------------------------------------------------

    def add(self, seq: int, place: bytes) -> Entry | None:
        """Keeps what a sequence holds, which is this place; None where there is no room for it."""
        if len(place) > self._max_bytes:
            return None
        while self.n_bytes + len(place) > self._max_bytes:
            oldest = next(iter(self.parked), None) or next(self._evictable(), None)
            if oldest is None:
                return None
            self._evict(oldest)
        entry = Entry(self._memory.checkpoint_save(seq, cached=True), place)
        self.entries.add(entry)
        self._by_use[entry] = None
        if page := self._keys.first_page(place, any_salt=True):
            self._pages[page] += 1
        self.n_bytes += len(place)
        return entry

    def count_use(self) -> int:
        """One more use of the index, and how many there were."""
        self._uses += 1
        return self._uses

    def use(self, entry: Entry) -> None:
        """An entry was used last, and is in memory."""
        self.parked.pop(entry, None)
        self._by_use[entry] = None
        self._by_use.move_to_end(entry)

    # -- letting go -----------------------------------------------------------------------------

    def evict_one(self, cuts_back: bool) -> bool:
        """Frees what was not used for longest, weighed by bytes freed per token to compute again.

        Only some of the least recently used entries are looked at, so what it costs does not grow
        with the index. `cuts_back`: memory gives tokens of any entry with the same beginning.
        """
        now = self._uses + 1
        worst, cost, most = None, 0, (-1.0, 0)
        for entry in islice(self._evictable(), _WEIGHED):
            size = self._memory.checkpoint_bytes(entry.name)
            age, again = now - entry.used, self.entries.cost(entry, cuts_back)
            score = (age * size / max(again, 1), age)
            if score > most:
                worst, cost, most = entry, again, score
        if worst is None:
            worst = next(self._half_parked(), None)
            if worst is not None:
                self._evict(worst)
            return worst is not None
        if self.park is not None and self._moves_out(worst, cost, self.park):
            self.parked[worst] = None
            del self._by_use[worst]
        else:
            self._evict(worst)
        return True

    def _half_parked(self) -> Iterator[Entry]:
        """Entries in a tier of which some pages are here, since others held them too."""
        for entry in self.parked:
            held = self._memory.held_by(self._memory.checkpoints.get(entry.name))
            if any(len(pages) for _, pages, _ in held):
                yield entry

    def evict_parked(self) -> bool:
        """Drops what was in a tier for longest; False when nothing is there."""
        oldest = next(iter(self.parked), None)
        if oldest is not None:
            self._evict(oldest)
        return oldest is not None

    def _moves_out(self, entry: Entry, cost: int, park: Park) -> bool:
        """Whether an entry goes to a tier; what was there for longest makes room for it once."""
        if park(entry.name, cost):
            return True
        if not self.evict_parked():
            return False
        return park(entry.name, cost)

    def forget(self, root: bytes | None) -> None:
        """Drops all entries, or those of one root, and that any were here."""
        for entry in list(self.entries) if root is None else self.entries.under(root):
            self.drop(entry)
        self._evicted = {k: r for k, r in self._evicted.items() if root not in (None, r)}

    def _evictable(self) -> Iterator[Entry]:
        """Entries in memory that are not pinned, the least recently used first."""
        now = self._clock()
        return (entry for entry in self._by_use if entry.pinned_until <= now)

    def _evict(self, entry: Entry) -> None:
        self.drop(entry)
        self.evictions += 1
        if page := self._keys.first_page(entry.place):
            self._evicted.pop(page, None)  # to the end of the order
            self._evicted[page] = entry.place[:ROOT_BYTES]
            if len(self._evicted) > _REMEMBERED:
                del self._evicted[next(iter(self._evicted))]

    def drop(self, entry: Entry) -> None:
        """Lets an entry go."""
        self._memory.checkpoint_delete(entry.name)
        self.entries.remove(entry)
        self._by_use.pop(entry, None)
        self.parked.pop(entry, None)
        self.n_bytes -= len(entry.place)
        if page := self._keys.first_page(entry.place, any_salt=True):
            self._pages[page] -= 1
            if not self._pages[page]:
                del self._pages[page]
