"""The merging that all vocabularies here share: join the best neighbours until none can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf

Priority = Callable[[int, int, int], float | None]
"""How urgent it is to join text[a:b] with text[b:c]: least first; None if they never join."""
Join = Callable[[int, float], object]
"""The symbols at a place were joined, which was so urgent."""

_NEVER = inf
"""The rank of a pair that is never joined."""
_LONG = 256
"""Characters of a word from which on it pays to look at all pairs of one urgency at a time."""


def merge(length: int, priority: Priority) -> list[int]:
    """Merges the characters of a text and returns where the resulting symbols end, in order."""
    ends = _merge_in_order(length, priority) if length > _LONG else None
    return _merge_one_by_one(length, priority) if ends is None else ends


def _merge_in_order(length: int, priority: Priority, join: Join | None = None) -> list[int] | None:
    """Merges all pairs of one urgency before any of the next: several times as fast.

    None where joining made a pair that is as urgent or more: it would have come before the rest. In
    vocabularies that were learned a pair comes after those that its symbols were made of.
    """
    ends = list(range(1, length + 1))
    before = list(range(-1, length))
    pairs = [priority(i, i + 1, i + 2) for i in range(length - 1)]
    pairs.append(None)  # by their first symbols; None is none that joins
    waiting: dict[float, list[int]] = {}
    for i, urgency in enumerate(pairs):
        if urgency is not None:
            waiting.setdefault(urgency, []).append(i)
    order = list(waiting)
    heapify(order)
    while order:
        now = heappop(order)
        for left in sorted(waiting.pop(now)):
            if pairs[left] != now:
                continue
            middle = ends[left]
            end = ends[left] = ends[middle]
            ends[middle] = -1
            before[end] = left
            pairs[middle] = None
            if join is not None:
                join(left, now)
            pairs[left] = priority(left, end, ends[end]) if end < length else None
            changed = [left]
            if left:
                previous = before[left]
                pairs[previous] = priority(previous, left, end)
                changed.append(previous)
            for at in changed:
                urgency = pairs[at]
                if urgency is None:
                    continue
                if urgency in waiting:
                    waiting[urgency].append(at)
                elif urgency > now:
                    waiting[urgency] = [at]
                    heappush(order, urgency)
                else:
                    return None
    return [end for end in ends if end > 0]


def _merge_one_by_one(length: int, priority: Priority) -> list[int]:
    """Merges the most urgent pair, the first of them, again and again.

    Symbols are known by where they start: `ends[i]` is the end of the one at i, and -1 once it
    has become part of another. An entry of the heap is stale when an end has moved since. Every
    merge makes one symbol fewer, so this ends whatever the vocabulary says, in O(n log n).
    """
    ends = list(range(1, length + 1))
    before = list(range(-1, length))
    heap = []
    for i in range(length - 1):
        urgency = priority(i, i + 1, i + 2)
        if urgency is not None:
            heap.append((urgency, i, i + 1, i + 2))
    heapify(heap)
    while heap:
        _, left, middle, end = heappop(heap)
        if ends[left] != middle or ends[middle] != end:
            continue
        ends[left] = end
        ends[middle] = -1
        before[end] = left
        if left:
            previous = before[left]
            urgency = priority(previous, left, end)
            if urgency is not None:
                heappush(heap, (urgency, previous, left, end))
        if end < length:
            after = ends[end]
            urgency = priority(left, end, after)
            if urgency is not None:
                heappush(heap, (urgency, left, end, after))
    return [end for end in ends if end > 0]


def merge_few(text: str, ranks: Mapping[str, int]) -> list[str]:
    """The symbols of a short word: the pair "left right" of the least rank, the first of them, is
    joined again and again. So few pairs are looked through faster than kept in order."""
    symbols = list(text)
    rank = ranks.get
    pairs = [rank(f"{left} {right}", _NEVER) for left, right in pairwise(symbols)]
    while pairs and (least := min(pairs)) < _NEVER:
        at = pairs.index(least)
        symbols[at] += symbols.pop(at + 1)
        del pairs[at]
        if at:
            pairs[at - 1] = rank(f"{symbols[at - 1]} {symbols[at]}", _NEVER)
        if at < len(pairs):
            pairs[at] = rank(f"{symbols[at]} {symbols[at + 1]}", _NEVER)
    return symbols


def merge_ids(
    symbols: list[int], ranks: Mapping[int, int], made: Sequence[int], base: int
) -> list[int]:
    """Merges token ids: the pair `left * base + right` of the least rank becomes `made[rank]`."""
    if len(symbols) > _LONG:
        own = symbols.copy()
        ends = _merge_in_order(
            len(own),
            lambda a, b, _: ranks.get(own[a] * base + own[b]),
            lambda at, rank: own.__setitem__(at, made[int(rank)]),
        )
        if ends is not None:
            return [own[start] for start in [0, *ends[:-1]]]
    return _merge_ids_one_by_one(symbols, ranks, made, base)


def _merge_ids_one_by_one(
    symbols: list[int], ranks: Mapping[int, int], made: Sequence[int], base: int
) -> list[int]:
    """The same, a pair after the other.

    Symbols are known by their place; -1 is one that has become part of another. An entry of the
    heap is stale when the pair there has another rank by now.
    """
    length = len(symbols)
    after = list(range(1, length + 1))
    before = list(range(-1, length))
    heap = []
    for i in range(length - 1):
        rank = ranks.get(symbols[i] * base + symbols[i + 1])
        if rank is not None:
            heap.append((rank, i))
    heapify(heap)
    while heap:
        rank, left = heappop(heap)
        right = after[left]
        if symbols[left] < 0 or right >= length:
            continue
        if ranks.get(symbols[left] * base + symbols[right]) != rank:
            continue
        new = symbols[left] = made[rank]
        symbols[right] = -1
        following = after[left] = after[right]
        if following < length:
            before[following] = left
            better = ranks.get(new * base + symbols[following])
            if better is not None:
                heappush(heap, (better, left))
        previous = before[left]
        if previous >= 0:
            better = ranks.get(symbols[previous] * base + new)
            if better is not None:
                heappush(heap, (better, previous))
    return [symbol for symbol in symbols if symbol >= 0]
