"""The prefix index: tokens that were computed before need not be computed again.

It works over the `Memory` interface alone, and so for every kind: a retained place is a
checkpoint, and a sequence that still runs can be shared from. What a kind cannot cut back to a
position it refuses, and the next best place is tried. Nothing is copied, and nothing is given
away but what has the same salt and the same tokens, compared one by one.

    [0 ──── adopted)[adopted ──── len(prompt))
     from the index   computed, and then inserted for the next one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from time import monotonic
from typing import TypedDict

from quire.errors import RequestError
from quire.memory.groups.layout import Int32
from quire.memory.memory import Memory
from quire.memory.prefix.entries import (
    ROOT_BYTES,
    Entry,
    Giver,
    Live,
    length_of,
    make_place,
    tokens_of,
)
from quire.memory.prefix.kept import Kept, Park
from quire.memory.prefix.keys import Keys
from quire.memory.tokens import Tokens


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
        self._clock = clock
        self._keys = Keys(page_tokens, identity)
        self._kept = Kept(memory, self._keys, max_bytes, clock)
        self._live: dict[int, Live] = {}
        self.missed = ""
        """Why the rest of the prompt that asked last was not here; empty if all of it was."""
        self.matched = 0
        """First tokens of that prompt that somebody holds, whether they can be restored or not."""
        self._cuts_back = True  # until memory refuses once
        self._hits = self._tokens_saved = self._tokens_refused = 0
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
            return self._kept.entries.matches(place, least)
        running.sort(key=lambda offer: -offer[0])
        # Of equals, entries come first: nobody appends to their last page, so it needs no copy.
        return merge(self._kept.entries.matches(place, least), running, key=lambda offer: -offer[0])

    def _reason(self, place: bytes, matched: int) -> str:
        """Why nothing that is worth it matches a place."""
        if self._kept.was_here(place):
            return "evicted"
        if matched < self.page_tokens and self._kept.has_elsewhere(place):
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
        entry, pinned = self._kept.entries.find(place), float("-inf")
        if entry is not None and self.memory.checkpoints.get(entry.name).parked is not None:
            pinned = entry.pinned_until  # here it is again, and need not be read back
            self._kept.drop(entry)
            entry = None
        entry = entry or self._kept.add(seq, place)
        if entry is None:
            return False
        entry.pinned_until = max(entry.pinned_until, pinned)
        self._touch(entry)
        if pin:
            until = float("inf") if ttl_s is None else self._clock() + ttl_s
            entry.pinned_until = max(entry.pinned_until, until)
        return True

    def _touch(self, giver: Giver) -> None:
        giver.used = self._kept.count_use()
        if isinstance(giver, Entry):
            self._kept.use(giver)

    # -- sequences that run ---------------------------------------------------------------------

    def track(self, seq: int, tokens: Tokens, salt: str = "") -> None:
        """Lets others share what a sequence holds, now or later, of its tokens as they grow."""
        self._live[seq] = Live(seq, self._keys.root(salt), tokens)

    def untrack(self, seq: int) -> None:
        """A sequence ends or must not be shared from any more."""
        self._live.pop(seq, None)

    # -- letting go -----------------------------------------------------------------------------

    def park_with(self, park: Park) -> None:
        """Says who moves entries to a tier before they are dropped."""
        self._kept.park = park

    def evict_one(self) -> bool:
        """Frees what is worth least: to a tier where that pays, or for good.

        Never what is pinned; False when there is nothing to free.
        """
        return self._kept.evict_one(self._cuts_back)

    def evict_parked(self) -> bool:
        """Drops the oldest entry in a tier, so that there is room in it; False when none is."""
        return self._kept.evict_parked()

    def forget(self, salt: str | None = None) -> None:
        """Drops all entries, or those of one salt, pinned or not; running sequences stay."""
        self._kept.forget(None if salt is None else self._keys.root(salt))

    def drop(self, tokens: Sequence[int] | Int32, salt: str = "") -> None:
        """Drops the entry of exactly these tokens, if there is one."""
        if entry := self._kept.entries.find(make_place(self._keys.root(salt), tokens)):
            self._kept.drop(entry)

    def close(self) -> None:
        """Gives everything back."""
        self.forget()
        self._live.clear()

    # -- figures --------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that entries alone keep alive."""
        return self.memory.cached_bytes

    @property
    def names(self) -> set[str]:
        """The checkpoints that are the index's own."""
        return {entry.name for entry in self._kept.entries}

    @property
    def pinned_names(self) -> set[str]:
        """Those of its checkpoints that are pinned now."""
        now = self._clock()
        return {entry.name for entry in self._kept.entries if entry.pinned_until > now}

    def stats(self) -> PrefixStats:
        """Figures so far, and what is held now."""
        kept, now = self._kept, self._clock()
        return PrefixStats(
            hits=self._hits,
            misses=dict(self._misses),
            tokens_saved=self._tokens_saved,
            tokens_refused=self._tokens_refused,
            entries=len(kept.entries),
            pinned=sum(entry.pinned_until > now for entry in kept.entries),
            parked=len(kept.parked),
            live=len(self._live),
            evictions=kept.evictions,
            bytes_only_here=self.held_bytes,
            bytes_index=kept.n_bytes,
        )
