"""Tokens that are computed together, and the memory they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.devices.device import PageWork
from quire.errors import RequestError
from quire.memory.groups.layout import Int32
from quire.memory.groups.views import Subset, View


class SeqTokens(NamedTuple):
    """New tokens for the end of a sequence; their positions follow from what it holds."""

    seq: int
    tokens: Int32


@dataclass(slots=True)
class MicroBatch:
    """Tokens that are computed together, and the memory they read and write."""

    tokens: Int32
    positions: Int32
    seq_rows: Int32
    """The row in `seqs`, and in every view, that each token belongs to."""
    seqs: list[int]
    views: dict[str, View]
    """Each group's memory for the kernels."""
    work: PageWork
    """What devices must have done with pages before the layers are run; empty once it is done."""

    @property
    def counts(self) -> Int32:
        """How many new tokens each sequence has."""
        return np.bincount(self.seq_rows, minlength=len(self.seqs)).astype(np.int32)

    def part(self, seqs: Int32, starts: Int32, counts: Int32) -> MicroBatch:
        """`counts[i]` of the new tokens of the sequence in row `seqs[i]`, from `starts[i]` on.

        Those before must have been computed in the layers that this part is run through. Work on
        pages that was not done yet goes with whatever is run first.
        """
        whole = self.counts
        rows = np.repeat(np.arange(len(seqs), dtype=np.int32), counts)
        ahead = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = ((np.cumsum(whole) - whole)[seqs] + starts)[rows] + ahead
        part = Subset(seqs, tokens, starts, counts, whole[seqs] - starts - counts)
        views: dict[str, View] = {name: view.part(part) for name, view in self.views.items()}
        ids = [self.seqs[i] for i in seqs.tolist()]
        return MicroBatch(self.tokens[tokens], self.positions[tokens], rows, ids, views, self.work)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a micro-batch, row by row, as each group is told of them."""

    tokens: Int32
    positions: Int32
    rows: Int32
    """The row of the sequence that each token belongs to."""
    ahead: Int32 | None
    """How many new tokens of its sequence come before each token; None for one token each."""


def split_batch(entries: Sequence[SeqTokens], n_ubatch: int) -> list[list[SeqTokens]]:
    """Entries in order, cut wherever n_ubatch tokens are full."""
    if n_ubatch < 1:
        raise RequestError(f"n_ubatch must be at least 1, not {n_ubatch}")
    parts: list[list[SeqTokens]] = []
    room = 0
    for seq, tokens in entries:
        done = 0
        while done < len(tokens):
            if room == 0:
                parts.append([])
                room = n_ubatch
            piece = tokens[done : done + room]
            parts[-1].append(SeqTokens(seq, piece))
            done += len(piece)
            room -= len(piece)
    return parts
