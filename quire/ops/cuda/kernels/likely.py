"""Log-probabilities of tokens that were drawn, and the likeliest tokens with theirs.

The likeliest are those before the edge of a cut (see cuts.py). They are collected as they come, and
put in order at the end: by logit, of equals by id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.cuda.kernels.cuts import logit, place


@triton.jit
def weigh(logits, tops, sums, vocab, n_blocks, BLOCK: tl.constexpr):
    """The largest logit of a block, and the weights of all its tokens beside that."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
    top = tl.max(x, 0)
    weight = tl.where(x > float("-inf"), tl.exp(x.to(tl.float64) - top.to(tl.float64)), 0.0)
    tl.store(tops + row * n_blocks + block, top)
    tl.store(sums + row * n_blocks + block, tl.sum(weight, 0))


@triton.jit
def collect(
    logits, edges, counts, keys, filled, vocab, n_blocks, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Tokens of a block that are among the likeliest, as keys: what is likelier is larger."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
    edge, kept = tl.load(edges + row * 2), tl.load(edges + row * 2 + 1)
    at = place(x)
    same = ((at == edge) & (ids < vocab)).to(tl.int32)
    blocks = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(counts + row * n_blocks + blocks, mask=blocks < block, other=0), 0)
    first = (same > 0) & (before + tl.cumsum(same, 0) <= kept)
    stays = ((at > edge) & (ids < vocab)) | first
    if tl.sum(stays.to(tl.int32), 0) > 0:
        slot = tl.atomic_add(filled + row + ids * 0, 1, mask=stays, sem="relaxed")
        key = ((at - 0x80000000) << 32) + (0x7FFFFFFF - ids)
        tl.store(keys + row * MOST + slot, key, mask=stays & (slot < MOST))


@triton.jit
def report(
    logits, drawn, tops, sums, keys, out, vocab, n_blocks, BLOCKS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """A row's report as bare integers: of the drawn token, then ids, then their log-probabilities.

    Where no token was drawn the first one is reported, which nobody reads.
    """
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < n_blocks
    each = tl.load(tops + row * n_blocks + blocks, mask=inside, other=float("-inf")).to(tl.float64)
    weight = tl.load(sums + row * n_blocks + blocks, mask=inside, other=0.0)
    top = tl.max(each, 0)
    whole = top + tl.log(
        tl.sum(tl.where(each > float("-inf"), weight * tl.exp(each - top), 0.0), 0)
    )
    id = tl.load(drawn + row)
    x = tl.load(logits + row.to(tl.int64) * vocab + tl.where(id < 0, 0, id)).to(tl.float64)
    into = out + row.to(tl.int64) * (1 + 2 * MOST)
    tl.store(into, (x - whole).to(tl.float32).to(tl.int32, bitcast=True))
    if MOST > 0:
        key = tl.load(keys + row * MOST + tl.arange(0, MOST))
        rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
        value = (logit((key >> 32) + 0x80000000).to(tl.float64) - whole).to(tl.float32)
        tl.store(into + 1 + rank, (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32))
        tl.store(into + 1 + MOST + rank, value.to(tl.int32, bitcast=True))
