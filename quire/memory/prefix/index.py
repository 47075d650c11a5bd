"""The prefix index: tokens that were computed before need not be computed again.

It works over the `Memory` interface alone, and so for every kind: a retained place is a
checkpoint, and a sequence that still runs can be shared from. What a kind cannot cut back to a
position it refuses, and the next best place is tried. Nothing is copied, and nothing is given
away but what has the same salt and the same tokens, compared one by one.

    [0 ──── adopted)[adopted ──── len(prompt))
     from the index   computed, and then inserted for the next one
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import islice
from time import monotonic
from typing import TypedDict

from quire.errors import RequestError
from quire.memory.groups.layout import Int32
from quire.memory.memory import Memory
from quire.memory.prefix.entries import (
    ROOT_BYTES,
    Entries,
    Entry,
    Giver,
    Live,
    length_of,
    make_place,
    tokens_of,
)
from quire.memory.prefix.keys import Keys
from quire.memory.tokens import Tokens

_REMEMBERED = 4096
"""How many evicted entries are remembered, by key, to tell why a prompt missed."""
_WEIGHED = 16
"""How many entries, the least recently used ones, are weighed to find the one that goes."""


class PrefixStats(TypedDict):
    """What the index did and holds."""

    hits: int
    misses: dict[str, int]
    """How often nothing was found, by reason.

    "no state here": tokens matched, but memory cannot restore that position;
    "evicted": it was here once; "salt": it is here under another salt;
    "short": fewer tokens match, or were asked for, than is worth it; "new": none of these.
    """
    tokens_saved: int
    tokens_refused: int
    """Tokens that matched, but at positions that memory could not restore."""
    entries: int
    pinned: int
    parked: int
    """Entries whose pages lie in a tier."""
    live: int
    evictions: int
    bytes_only_here: int
    """Bytes of memory that entries alone keep alive."""
    bytes_index: int
    """Bytes of the tokens the index keeps to compare."""


class PrefixIndex:
    """Finds the longest prefix that memory can restore, and decides what is kept for that.

    `identity` says which model and layout the tokens belong to. Matches below `min_tokens` are
    not taken. The index keeps at most `max_bytes` of tokens to compare. Checkpoints that it saves
    are its own: `forget` comes before `Memory.clear`. A sequence whose positions were moved or
    that has holes is no source: do not insert it, and untrack it first.
    """

    def __init__(
        self, memory: Memory, page_tokens: int, identity: str = "", min_tokens: int = 1,
        max_bytes: int = 64 << 20, clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        if min_tokens < 1:
            raise RequestError(f"min_tokens must be at least 1, not {min_tokens}")
        self.memory = memory
        self.page_tokens = page_tokens
        self.min_tokens = min_tokens
        self.max_bytes = max_bytes
        self._clock = clock
        self._keys = Keys(page_tokens, identity)
        self._entries = Entries()
        self._by_use: OrderedDict[Entry, None] = OrderedDict()  # the least recently used first
        self._parked: OrderedDict[Entry, None] = OrderedDict()  # those whose pages lie in a tier
        self._park: Callable[[str, int], bool] | None = None
        self._live: dict[int, Live] = {}
        self._pages: Counter[bytes] = Counter()  # keys of first pages, whatever the salt
        self._evicted: dict[bytes, bytes] = {}  # keys of first pages -> their roots, oldest first
        self.missed = ""
        """Why the rest of the prompt that asked last was not here; empty if all of it was."""
        self.matched = 0
        """First tokens of that prompt that somebody holds, whether they can be restored or not."""
        self._cuts_back = True  # until memory refuses once
        self._uses = 0
        self._bytes_index = 0
        self._hits = self._tokens_saved = self._tokens_refused = self._evictions = 0
        self._misses = dict.fromkeys(("new", "evicted", "salt", "no state here", "short"), 0)

    # -- finding --------------------------------------------------------------------------------

    def adopt(self, seq: int, tokens: Sequence[int] | Int32, salt: str = "") -> int:
        """Makes an empty sequence hold the longest known prefix of tokens; returns its length."""
        if self.memory.seq_pos_max(seq) >= 0:
            raise RequestError(f"sequence {seq} holds tokens; only an empty one can adopt a prefix")
        place = make_place(self._keys.root(salt), tokens)
        matched = self.matched = 0
        for n, giver in self._offers(place, 1):
            self.matched = max(self.matched, n)
            if n < self.min_tokens:
                break
            matched = max(matched, n)
            if giver.give(self.memory, seq, n):
                assert self.memory.seq_pos_max(seq) == n - 1
                self._touch(giver)
                self._hits += 1
                self._tokens_saved += n
                self._tokens_refused += matched - n
                rest = "no state here" if matched > n else "new"
                self.missed = "" if n == length_of(place) else rest
                return n
            self._cuts_back = False
        self._tokens_refused += matched
        self.missed = "no state here" if matched else self._reason(place, self.matched)
        self._misses[self.missed] += 1
        return 0

    def _offers(self, place: bytes, least: int) -> Iterator[tuple[int, Giver]]:
        """Who could give how many first tokens of a place; most first."""
        running: list[tuple[int, Giver]] = []
        root, tokens = place[:ROOT_BYTES], tokens_of(place)
        for live in self._live.values():
            if live.root == root:
                n = min(live.tokens.common(tokens), self.memory.seq_pos_max(live.seq) + 1)
                if n >= least:  # an empty sequence, such as the one that asks, is none of these
                    running.append((n, live))
        if not running:
            return self._entries.matches(place, least)
        running.sort(key=lambda offer: -offer[0])
        # Of equals, entries come first: nobody appends to their last page, so it needs no copy.
        return merge(self._entries.matches(place, least), running, key=lambda offer: -offer[0])

    def _reason(self, place: bytes, matched: int) -> str:
        """Why nothing that is worth it matches a place."""
        if self._evicted and self._keys.first_page(place) in self._evicted:
            return "evicted"
        elsewhere = self._keys.first_page(place, any_salt=True) in self._pages
        if elsewhere and matched < self.page_tokens:
            return "salt"
        return "short" if matched or length_of(place) < self.min_tokens else "new"

    # -- retaining ------------------------------------------------------------------------------

    def insert(
        self, seq: int, tokens: Sequence[int] | Int32, salt: str = "", pin: bool = False,
        ttl_s: float | None = None,
    ) -> bool:  # fmt: skip
        """Retains what a sequence holds now, which are these tokens; a pin keeps it, for ttl_s.

        False when the index has no room for the tokens, which it would need to compare.
        """
        held = self.memory.seq_pos_max(seq) + 1
        if held != len(tokens) or held == 0:
            raise RequestError(
                f"sequence {seq} holds {held} tokens and {len(tokens)} were named; insert takes "
                "exactly the tokens that were computed, at least one"
            )
        if ttl_s is not None and not (pin and ttl_s > 0):
            raise RequestError(f"ttl_s={ttl_s} limits a pin: it needs pin=True and more than 0")
        place = make_place(self._keys.root(salt), tokens)
        entry, pinned = self._entries.find(place), float("-inf")
        if entry is not None and self.memory.checkpoints.get(entry.name).parked is not None:
            pinned = entry.pinned_until  # here it is again, and need not be read back
            self._drop(entry)
            entry = None
        entry = entry or self._retain(seq, place)
        if entry is None:
            return False
        entry.pinned_until = max(entry.pinned_until, pinned)
        self._touch(entry)
        if pin:
            until = float("inf") if ttl_s is None else self._clock() + ttl_s
            entry.pinned_until = max(entry.pinned_until, until)
        return True

    def _retain(self, seq: int, place: bytes) -> Entry | None:
        if len(place) > self.max_bytes:
            return None
        while self._bytes_index + len(place) > self.max_bytes:
            oldest = next(iter(self._parked), None) or next(self._evictable(), None)
            if oldest is None:
                return None
            self._evict(oldest)
        entry = Entry(self.memory.checkpoint_save(seq, cached=True), place)
        self._entries.add(entry)
        self._by_use[entry] = None
        if page := self._keys.first_page(place, any_salt=True):
            self._pages[page] += 1
        self._bytes_index += len(place)
        return entry

    def _touch(self, giver: Giver) -> None:
        self._uses += 1
        giver.used = self._uses
        if isinstance(giver, Entry):
            self._parked.pop(giver, None)
            self._by_use[giver] = None
            self._by_use.move_to_end(giver)

    # -- sequences that run ---------------------------------------------------------------------

    def track(self, seq: int, tokens: Tokens, salt: str = "") -> None:
        """Lets others share what a sequence holds, now or later, of its tokens as they grow."""
        self._live[seq] = Live(seq, self._keys.root(salt), tokens)

    def untrack(self, seq: int) -> None:
        """A sequence ends or must not be shared from any more."""
        self._live.pop(seq, None)

    # -- letting go -----------------------------------------------------------------------------

    def park_with(self, park: Callable[[str, int], bool]) -> None:
        """Says who moves entries to a tier before they are dropped.

        `park(checkpoint, tokens)` says whether it did; so many tokens would have to be computed
        again without the entry.
        """
        self._park = park

    def evict_one(self) -> bool:
        """Frees what was not used for longest, weighed by bytes freed per token to compute again.

        It goes to a tier where that pays, or for good. Never what is pinned; False when there is
        nothing to free. Only some of the least recently used entries are looked at, so what it
        costs does not grow with the index.
        """
        now = self._uses + 1
        worst, cost, most = None, 0, (-1.0, 0)
        for entry in islice(self._evictable(), _WEIGHED):
            size = self.memory.checkpoint_bytes(entry.name)
            age, again = now - entry.used, self._entries.cost(entry, self._cuts_back)
            score = (age * size / max(again, 1), age)
            if score > most:
                worst, cost, most = entry, again, score
        if worst is None:
            worst = next(self._half_parked(), None)
            if worst is not None:
                self._evict(worst)
            return worst is not None
        if self._park is not None and self._moves_out(worst, cost):
            self._parked[worst] = None
            del self._by_use[worst]
        else:
            self._evict(worst)
        return True

    def _half_parked(self) -> Iterator[Entry]:
        """Entries in a tier of which some pages are here, since others held them too."""
        for entry in self._parked:
            held = self.memory.held_by(self.memory.checkpoints.get(entry.name))
            if any(len(pages) for _, pages, _ in held):
                yield entry

    def _moves_out(self, entry: Entry, cost: int) -> bool:
        """Whether an entry goes to a tier; what was there for longest makes room for it once."""
        assert self._park is not None
        if self._park(entry.name, cost):
            return True
        oldest = next(iter(self._parked), None)
        if oldest is None:
            return False
        self._evict(oldest)
        return self._park(entry.name, cost)

    def forget(self, salt: str | None = None) -> None:
        """Drops all entries, or those of one salt, pinned or not; running sequences stay."""
        root = None if salt is None else self._keys.root(salt)
        for entry in list(self._entries) if root is None else self._entries.under(root):
            self._drop(entry)
        self._evicted = {k: r for k, r in self._evicted.items() if root not in (None, r)}

    def drop(self, tokens: Sequence[int] | Int32, salt: str = "") -> None:
        """Drops the entry of exactly these tokens, if there is one."""
        if entry := self._entries.find(make_place(self._keys.root(salt), tokens)):
            self._drop(entry)

    def close(self) -> None:
        """Gives everything back."""
        self.forget()
        self._live.clear()

    def _evictable(self) -> Iterator[Entry]:
        """Entries in memory that are not pinned, the least recently used first."""
        now = self._clock()
        return (entry for entry in self._by_use if entry.pinned_until <= now)

    def _evict(self, entry: Entry) -> None:
        self._drop(entry)
        self._evictions += 1
        if page := self._keys.first_page(entry.place):
            self._evicted.pop(page, None)  # to the end of the order
            self._evicted[page] = entry.place[:ROOT_BYTES]
            if len(self._evicted) > _REMEMBERED:
                del self._evicted[next(iter(self._evicted))]

    def _drop(self, entry: Entry) -> None:
        self.memory.checkpoint_delete(entry.name)
        self._entries.remove(entry)
        self._by_use.pop(entry, None)
        self._parked.pop(entry, None)
        self._bytes_index -= len(entry.place)
        if page := self._keys.first_page(entry.place, any_salt=True):
            self._pages[page] -= 1
            if not self._pages[page]:
                del self._pages[page]

    # -- figures --------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that entries alone keep alive."""
        return self.memory.cached_bytes

    @property
    def names(self) -> set[str]:
        """The checkpoints that are the index's own."""
        return {entry.name for entry in self._entries}

    @property
    def pinned_names(self) -> set[str]:
        """Those of its checkpoints that are pinned now."""
        now = self._clock()
        return {entry.name for entry in self._entries if entry.pinned_until > now}

    def stats(self) -> PrefixStats:
        """Figures so far, and what is held now."""
        entries, now = self._entries, self._clock()
        return PrefixStats(
            hits=self._hits,
            misses=dict(self._misses),
            tokens_saved=self._tokens_saved,
            tokens_refused=self._tokens_refused,
            entries=len(entries),
            pinned=sum(entry.pinned_until > now for entry in entries),
            parked=len(self._parked),
            live=len(self._live),
            evictions=self._evictions,
            bytes_only_here=self.held_bytes,
            bytes_index=self._bytes_index,
        )
