"""The prefix index: tokens that were computed before need not be computed again.

It works over the `Memory` interface alone, and so for every kind: a retained place is a
checkpoint, and a sequence that still runs can be shared from. What a kind cannot cut back to a
position it refuses, and the next best place is tried. Nothing is copied, and nothing is given
away but what has the same salt and the same tokens, compared one by one.

    [0 ──── adopted)[adopted ──── len(prompt))
     from the index   computed, and then inserted for the next one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from time import monotonic
from typing import TypedDict

from quire.errors import RequestError
from quire.memory.interface import Memory
from quire.memory.layout import Int32
from quire.memory.prefix_keys import Keys
from quire.memory.prefix_places import (
    ROOT_BYTES,
    Entry,
    Live,
    Places,
    Source,
    encode,
    length_of,
    make_place,
)

_REMEMBERED = 4096
"""How many evicted entries are remembered, by key, to tell why a prompt missed."""


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
    live: int
    evictions: int
    bytes_only_here: int
    """Bytes of memory that one entry alone keeps alive, over all entries."""
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
        self._places = Places()
        self._live: dict[int, Live] = {}
        self._pages: Counter[bytes] = Counter()  # keys of first pages, whatever the salt
        self._evicted: dict[bytes, bytes] = {}  # keys of first pages -> their roots, oldest first
        self._cuts_back = True  # until memory refuses once
        self._uses = 0
        self._unmeasured = 0
        self._bytes_per_token = 0.0
        self._bytes_index = 0
        self._hits = self._tokens_saved = self._tokens_refused = self._evictions = 0
        self._misses = dict.fromkeys(("new", "evicted", "salt", "no state here", "short"), 0)

    # -- finding --------------------------------------------------------------------------------

    def adopt(self, seq: int, tokens: Sequence[int] | Int32, salt: str = "") -> int:
        """Makes an empty sequence hold the longest known prefix of tokens; returns its length."""
        if self.memory.seq_pos_max(seq) >= 0:
            raise RequestError(f"sequence {seq} holds tokens; only an empty one can adopt a prefix")
        place = make_place(self._keys.root(salt), tokens)
        matched = 0
        for n, source in self._offers(place, self.min_tokens):
            matched = max(matched, n)
            if source.give(self.memory, seq, n):
                assert self.memory.seq_pos_max(seq) == n - 1
                self._touch(source)
                self._hits += 1
                self._tokens_saved += n
                self._tokens_refused += matched - n
                return n
            self._cuts_back = False
        self._tokens_refused += matched
        self._misses["no state here" if matched else self._reason(place)] += 1
        return 0

    def known(self, tokens: Sequence[int] | Int32, salt: str = "") -> int:
        """How many first tokens somebody holds, whether memory can restore that place or not."""
        place = make_place(self._keys.root(salt), tokens)
        return next((n for n, _ in self._offers(place, self.min_tokens)), 0)

    def _offers(self, place: bytes, least: int) -> Iterator[tuple[int, Source]]:
        """Who could give how many first tokens of a place; most first."""
        running: list[tuple[int, Source]] = []
        for live in self._live.values():
            n = min(live.in_common(place), self.memory.seq_pos_max(live.seq) + 1)
            if n >= least:  # an empty sequence, such as the one that asks, is none of these
                running.append((n, live))
        running.sort(key=lambda offer: -offer[0])
        # Of equals, entries come first: nobody appends to their last page, so it needs no copy.
        return merge(self._places.matches(place, least), running, key=lambda offer: -offer[0])

    def _reason(self, place: bytes) -> str:
        """Why nothing that is worth it matches a place."""
        matched = next((n for n, _ in self._offers(place, 1)), 0)
        if self._keys.first_page(place) in self._evicted:
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
        entry = self._places.find(place) or self._retain(seq, place)
        if entry is None:
            return False
        self._touch(entry)
        if pin:
            until = float("inf") if ttl_s is None else self._clock() + ttl_s
            entry.pinned_until = max(entry.pinned_until, until)
        return True

    def _retain(self, seq: int, place: bytes) -> Entry | None:
        if len(place) > self.max_bytes:
            return None
        while self._bytes_index + len(place) > self.max_bytes:
            oldest = min(self._evictable(), key=lambda entry: entry.used, default=None)
            if oldest is None:
                return None
            self._evict(oldest)
        entry = Entry(self.memory.checkpoint_save(seq), place)
        self._places.add(entry)
        if page := self._keys.first_page(place, any_salt=True):
            self._pages[page] += 1
        self._bytes_index += len(place)
        self._unmeasured += 1
        return entry

    def _touch(self, source: Source) -> None:
        self._uses += 1
        source.used = self._uses

    # -- sequences that run ---------------------------------------------------------------------

    def track(self, seq: int, tokens: Sequence[int] | Int32, salt: str = "") -> None:
        """Lets others share what a sequence holds, now or later, of these tokens."""
        self._live[seq] = Live(seq, bytearray(make_place(self._keys.root(salt), tokens)))

    def extend(self, seq: int, tokens: Sequence[int] | Int32) -> None:
        """A tracked sequence got more tokens."""
        self._tracked(seq).place += encode(tokens)

    def untrack(self, seq: int) -> None:
        """A sequence ends or must not be shared from any more."""
        if self._live.pop(seq, None):
            self._unmeasured += 1

    def _tracked(self, seq: int) -> Live:
        if seq not in self._live:
            raise RequestError(f"sequence {seq} is not tracked; there are {sorted(self._live)}")
        return self._live[seq]

    # -- letting go -----------------------------------------------------------------------------

    def evict_one(self) -> bool:
        """Drops what was not used for longest, weighed by bytes freed per token to compute again.

        Never what is pinned; False when there is nothing to drop.
        """
        if self._unmeasured > len(self._places.entries) // 8:
            self._measure()
        now, pinned_after = self._uses + 1, self._clock()
        worst, most = None, (-1.0, 0)
        for entry, cost in self._places.costs(self._cuts_back):
            if entry.pinned_until <= pinned_after:
                size = entry.only_here
                if size is None:
                    size = int(cost * self._bytes_per_token)
                age = now - entry.used
                score = (age * size / max(cost, 1), age)
                if score > most:
                    worst, most = entry, score
        if worst is None:
            return False
        self._evict(worst)
        return True

    def forget(self, salt: str | None = None) -> None:
        """Drops all entries, or those of one salt, pinned or not; running sequences stay."""
        root = None if salt is None else self._keys.root(salt)
        for entry in list(self._places.entries) if root is None else self._places.under(root):
            self._drop(entry)
        self._evicted = {k: r for k, r in self._evicted.items() if root not in (None, r)}

    def close(self) -> None:
        """Gives everything back."""
        self.forget()
        self._live.clear()

    def _evictable(self) -> Iterator[Entry]:
        now = self._clock()
        return (entry for entry in self._places.entries if entry.pinned_until <= now)

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
        self._places.remove(entry)
        self._bytes_index -= len(entry.place)
        self._unmeasured += 1
        if page := self._keys.first_page(entry.place, any_salt=True):
            self._pages[page] -= 1
            if not self._pages[page]:
                del self._pages[page]

    # -- figures --------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that entries alone keep alive, as measured last; those since are estimated."""
        entries = self._places.entries
        if self._unmeasured > len(entries) // 8:
            self._measure()
        return sum(entry.only_here or 0 for entry in entries)

    @property
    def names(self) -> set[str]:
        """The checkpoints that are the index's own."""
        return {entry.name for entry in self._places.entries}

    @property
    def pinned_names(self) -> set[str]:
        """Those of its checkpoints that are pinned now."""
        now = self._clock()
        return {entry.name for entry in self._places.entries if entry.pinned_until > now}

    def stats(self) -> PrefixStats:
        """Figures so far, and what is held now."""
        self._measure()
        entries, now = self._places.entries, self._clock()
        return PrefixStats(
            hits=self._hits,
            misses=dict(self._misses),
            tokens_saved=self._tokens_saved,
            tokens_refused=self._tokens_refused,
            entries=len(entries),
            pinned=sum(entry.pinned_until > now for entry in entries),
            live=len(self._live),
            evictions=self._evictions,
            bytes_only_here=sum(entry.only_here or 0 for entry in entries),
            bytes_index=self._bytes_index,
        )

    def _measure(self) -> None:
        """Asks memory what each entry alone keeps alive."""
        sizes: Counter[str] = Counter()
        for parts in self.memory.memory_breakdown().values():
            for use, size in parts.items():
                sizes[use.partition(": checkpoint ")[2]] += size
        tokens = 0
        for entry, cost in self._places.costs(self._cuts_back):
            entry.only_here = sizes[entry.name]
            tokens += cost
        held = sum(entry.only_here or 0 for entry in self._places.entries)
        self._bytes_per_token = held / max(tokens, 1)
        self._unmeasured = 0
