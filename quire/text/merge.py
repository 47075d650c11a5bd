"""The merging that all vocabularies here share: join the best neighbours until none can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

Priority = Callable[[int, int, int], float | None]
"""How urgent it is to join text[a:b] with text[b:c]: least first; None if they never join."""


def merge(length: int, priority: Priority) -> list[int]:
    """Merges the characters of a text and returns where the resulting symbols end, in order.

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


def merge_ids(
    symbols: list[int], ranks: Mapping[int, int], made: Sequence[int], base: int
) -> list[int]:
    """Merges token ids: the pair `left * base + right` of the least rank becomes `made[rank]`.

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
