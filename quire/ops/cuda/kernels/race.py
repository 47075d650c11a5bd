"""Sampling: the token that wins an exponential race, or the likeliest one."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.cuda.kernels.cuts import place


@triton.jit
def _mix(x):
    """Finalizer of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def race(
    logits, keys, temperatures, tops, floors, edges, counts, scores, winners, vocab, n_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GREEDY: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The best of a block of tokens, of equals the lowest id; those behind the edge stay out.

    A token runs if its logit is above the row's edge, or at the edge and one of the first there,
    and its weight is not under the floor. Score and winner are those of the reference. A block
    that is not numbers wins with -2.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
    runs = x > float("-inf")
    if CUT:
        edge, kept = tl.load(edges + row * 2), tl.load(edges + row * 2 + 1)
        at = place(x)
        same = ((at == edge) & (ids < vocab)).to(tl.int32)
        blocks = tl.arange(0, BLOCKS)
        before = tl.sum(tl.load(counts + row * n_blocks + blocks, mask=blocks < block, other=0), 0)
        runs = runs & ((at > edge) | ((same > 0) & (before + tl.cumsum(same, 0) <= kept)))
    score = x.to(tl.float64)
    if not GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            top = tl.load(tops + row).to(tl.float64)
            weight = tl.where(score == top, 1.0, tl.exp((score - top) / temperature.to(tl.float64)))
            runs = runs & (weight >= tl.load(floors + row))
            number = (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
            number = _mix(tl.load(keys + row).to(tl.uint64, bitcast=True) + number)
            u = ((number >> 11) | 1).to(tl.float64) * 1.1102230246251565e-16
            score = weight / -tl.log(u)
    score = tl.where(runs, score, float("-inf"))
    best = tl.max(score, 0)
    winner = tl.min(tl.where(runs & (score == best), ids, 2147483647), 0)
    wrong = tl.max((x != x).to(tl.int32), 0) > 0
    best, winner = tl.where(wrong, float("inf"), best), tl.where(wrong, -2, winner)
    tl.store(scores + row * n_blocks + block, best)
    tl.store(winners + row * n_blocks + block, winner)


@triton.jit
def finish(scores, winners, out, n_blocks, BLOCK: tl.constexpr):
    """The best of all blocks; -1 where nobody runs."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    score = tl.load(scores + row * n_blocks + at, mask=at < n_blocks, other=float("-inf"))
    winner = tl.load(winners + row * n_blocks + at, mask=at < n_blocks, other=2147483647)
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, winner, 2147483647), 0)
    tl.store(out + row, tl.where(winner == 2147483647, -1, winner))
