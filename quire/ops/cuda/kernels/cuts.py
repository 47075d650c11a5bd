"""Which tokens top-k and top-p leave in a race, without putting them in order.

The last one that stays is found digit by digit: all tokens whose logit begins with the digits so
far are tallied by the next one (how many, or with how much weight), and from the largest digit down
it is seen where the tally reaches what is wanted. Weights are tallied as whole numbers, so that no
order of adding them is another result.
"""

from __future__ import annotations

import triton
import triton.language as tl

DIGITS = 8
"""Of a logit, four bits each."""


@triton.jit
def place(x):
    """Logits as numbers from 0 on in the same order; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 0x80000000)


@triton.jit
def logit(at):
    """The logit at a place."""
    bits = tl.where(at < 0x80000000, -1 - at, at - 0x80000000)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, top, temperature, SCALE: tl.constexpr):
    """exp((x - top) / temperature) as a whole number."""
    score, best = x.to(tl.float64), top.to(tl.float64)
    heat = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    weight = tl.where(score == best, 1.0, tl.exp((score - best) / heat))
    return (tl.where(weight >= 0, weight, 0.0) * SCALE + 0.5).to(tl.int64)


@triton.jit
def _narrowed(sums, states, row, n, wanted, edge, extra, number):
    """The first digits so far and the one of this number, and the tally of what lies above them.

    `extra` comes at the edge of the cut before, on top of what was tallied.
    """
    state = states + (number * n + row) * 2
    first, above = tl.load(state), tl.load(state + 1)
    shift = 28 - 4 * number
    digits = tl.arange(0, 16)
    tally = tl.load(sums + (number * n + row) * 16 + digits)
    inside = (edge >> (shift + 4)) == (first >> (shift + 4))
    tally += tl.where(inside & (digits == ((edge >> shift) & 15)), extra, 0)
    reach = above + tl.cumsum(tally, 0, reverse=True)
    digit = tl.max(tl.where(reach.to(tl.float64) >= wanted, digits, 0), 0)
    above += tl.sum(tl.where(digits > digit, tally, 0), 0)
    return first + (digit.to(tl.int64) << shift), above


@triton.jit
def _wanted(
    logits_top, temperatures, most, shares, sums, edges, row, BY_WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """What the tally is to reach; the edge of the cut before, and what comes at it."""
    edge = tl.load(edges + row * 2)
    if BY_WEIGHT:
        kept = tl.load(edges + row * 2 + 1)
        top, temperature = tl.load(logits_top + row), tl.load(temperatures + row)
        extra = kept * _weight(logit(edge), top, temperature, SCALE)
        whole = tl.sum(tl.load(sums + row * 16 + tl.arange(0, 16)), 0) + extra
        wanted = whole.to(tl.float64) * tl.load(shares + row)
    else:
        extra = edge * 0
        wanted = tl.load(most + row).to(tl.float64)
    return wanted, edge, extra


@triton.jit(do_not_specialize=["n", "number"])
def tally(
    logits, tops, temperatures, most, shares, sums, states, edges, vocab, n, number,
    BY_WEIGHT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a block of tokens to the tally of the digit of this number."""
    row, block = tl.program_id(0), tl.program_id(1)
    wanted, edge, extra = _wanted(
        tops, temperatures, most, shares, sums, edges, row, BY_WEIGHT, SCALE
    )
    first = edge * 0
    if number > 0:
        first, above = _narrowed(sums, states, row, n, wanted, edge, extra, number - 1)
        if block == 0:
            tl.store(states + (number * n + row) * 2, first)
            tl.store(states + (number * n + row) * 2 + 1, above)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
    at = place(x)
    shift = 28 - 4 * number
    counts = (ids < vocab) & ((at >> (shift + 4)) == (first >> (shift + 4)))
    if BY_WEIGHT:
        counts &= at > edge
    many = tl.sum(counts.to(tl.int32), 0)
    if many > 0:
        size = counts.to(tl.int64)
        if BY_WEIGHT:
            size *= _weight(x, tl.load(tops + row), tl.load(temperatures + row), SCALE)
        digits = ((at >> shift) & 15).to(tl.int32)
        into = sums + (number * n + row) * 16
        if many <= BLOCK // 32:  # few are sooner added one by one
            tl.atomic_add(into + digits, size, mask=counts, sem="relaxed")
        else:
            low = tl.min(tl.where(counts, digits, 15), 0)
            high = tl.max(tl.where(counts, digits, 0), 0)
            for digit in range(low, high + 1):
                found = tl.sum(tl.where(digits == digit, size, 0), 0)
                tl.atomic_add(into + digit, found, sem="relaxed")


@triton.jit(do_not_specialize=["n"])
def settle(
    tops, temperatures, most, shares, sums, states, edges, n, DIGITS: tl.constexpr,
    BY_WEIGHT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The edge of a row's cut, and how many of the tokens that are at the edge stay in."""
    row = tl.program_id(0)
    wanted, edge, extra = _wanted(
        tops, temperatures, most, shares, sums, edges, row, BY_WEIGHT, SCALE
    )
    found, above = _narrowed(sums, states, row, n, wanted, edge, extra, DIGITS - 1)
    if BY_WEIGHT:
        size = _weight(logit(found), tl.load(tops + row), tl.load(temperatures + row), SCALE)
        size = tl.where(size > 0, size, 1)
        kept = ((wanted - above.to(tl.float64)) / size.to(tl.float64)).to(tl.int64)
        kept = tl.where(kept > 1, kept - 1, 0)  # one less than rounding can make of it, and on
        for _ in range(3):
            kept += ((above + kept * size).to(tl.float64) < wanted).to(tl.int64)
        kept = tl.where(kept > 1, kept, 1)
        if tl.load(shares + row) < 1:  # the whole weight is no cut, which rounding could make
            tl.store(edges + row * 2, found)
            tl.store(edges + row * 2 + 1, kept)
    else:
        tl.store(edges + row * 2, found)
        tl.store(edges + row * 2 + 1, tl.load(most + row) - above)


@triton.jit
def at_edge(logits, edges, counts, vocab, n_blocks, BLOCK: tl.constexpr):
    """How many tokens of a block are at the edge."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
    same = (place(x) == tl.load(edges + row * 2)) & (ids < vocab)
    tl.store(counts + row * n_blocks + block, tl.sum(same.to(tl.int32), 0))
