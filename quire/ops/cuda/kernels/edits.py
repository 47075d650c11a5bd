"""What generations change of their logits before a token is drawn: bias, then penalties.

A row is told where its generation's own things lie, as addresses; 0 is nowhere. Counts have a word
for each token of the vocabulary: twice how often it was said, plus one if it is in the prompt.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin(
    logits, last, counts, biases, lengths, news, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """Counts the newest token of a row, and adds its bias.

    A token under -1 is the one that the step before drew for a row: -2 for the first, and so on.
    """
    row = tl.program_id(0)
    counted, new = tl.load(counts + row), tl.load(news + row)
    if new < -1:
        new = tl.load(last - 2 - new)
    if (counted != 0) & (new >= 0):
        at = counted.to(tl.pointer_type(tl.int32)) + new
        tl.store(at, tl.load(at) + 2)
    n = tl.load(lengths + row)
    ids = tl.load(biases + row).to(tl.pointer_type(tl.int32))
    for start in range(0, n, BLOCK):
        some = start + tl.arange(0, BLOCK)
        id = tl.load(ids + some, mask=some < n, other=0)
        value = tl.load(ids + n + some, mask=some < n, other=0).to(tl.float32, bitcast=True)
        at = logits + row.to(tl.int64) * vocab + id
        tl.store(at, tl.load(at, mask=some < n, other=0.0) + value, mask=some < n)


@triton.jit
def penalise(
    logits, counts, repetition, frequency, presence, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of a row's tokens; each is rounded as on CPUs: launch it without fused products."""
    row = tl.program_id(0)
    counted = tl.load(counts + row)
    if counted != 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(counted.to(tl.pointer_type(tl.int32)) + ids, mask=ids < vocab, other=0)
        at = logits + row.to(tl.int64) * vocab + ids
        x = tl.load(at, mask=found > 0, other=0.0)
        again = tl.load(repetition + row)
        x = tl.where(x > 0, tl.div_rn(x, again), x * again)
        often = (found >> 1).to(tl.float32)
        less = tl.load(frequency + row) * often + tl.load(presence + row)
        tl.store(at, tl.where(found > 1, x - less, x), mask=found > 0)
