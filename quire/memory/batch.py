"""From tables to what kernels read: micro-batches and their page views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.errors import RequestError
from quire.memory.interface import MicroBatch, PageView, SeqTokens
from quire.memory.layout import AttentionLayout, Int32
from quire.memory.pool import PagePool
from quire.memory.table import HOLE, Table


def check_entries(entries: Sequence[SeqTokens]) -> None:
    """Refuses a batch that is empty or names a sequence twice or without tokens."""
    if not entries:
        raise RequestError("a batch needs at least one sequence with a token; it has none")
    if len({seq for seq, _ in entries}) != len(entries):
        raise RequestError("a batch names a sequence twice; join its tokens in one entry")
    for seq, tokens in entries:
        if seq < 0 or not len(tokens):
            raise RequestError(
                f"sequence {seq} has {len(tokens)} tokens; ids start at 0, counts at 1"
            )


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


class TableRows:
    """Page ids of running sequences as one matrix that lives from step to step.

    A row is copied only when its table's version is not the one it shows, so a step that adds no
    page copies nothing, however long the sequences are.
    """

    def __init__(self) -> None:
        self._matrix: Int32 = np.full((4, 16), -1, np.int32)
        self._versions: list[object] = [None] * 4

    def show(self, tables: list[Table]) -> Int32:
        """[len(tables), max_pages] page ids; valid until the next call."""
        rows, columns = self._matrix.shape
        versions = self._versions
        stale = [i for i, t in enumerate(tables) if i >= rows or versions[i] is not t.version]
        if not stale:
            return self._matrix[: len(tables)]
        widest = max(tables[i].n_pages for i in stale)
        if len(tables) > rows or widest > columns:
            rows = max(rows, 2 * len(tables)) if len(tables) > rows else rows
            columns = max(columns, 2 * widest) if widest > columns else columns
            self._matrix = np.full((rows, columns), -1, np.int32)
            self._versions = versions = [None] * rows
            stale = list(range(len(tables)))
        for i in stale:
            table = tables[i]
            self._matrix[i, : table.n_pages] = table.pages
            self._matrix[i, table.n_pages :] = -1
            versions[i] = table.version
        return self._matrix[: len(tables)]


class Views:
    """Makes the micro-batches of one group."""

    def __init__(self, layout: AttentionLayout, pool: PagePool) -> None:
        self.layout = layout
        self.pool = pool
        self._rows = TableRows()

    def micro_batch(self, entries: Sequence[SeqTokens], tables: list[Table]) -> MicroBatch:
        """The new tokens, which the tables already include as their last slots."""
        pages = self._rows.show(tables)
        page_tokens = self.layout.page_tokens
        n = len(tables)
        tokens = entries[0].tokens if n == 1 else np.concatenate([e.tokens for e in entries])
        length = np.array([t.length for t in tables], np.int32)
        behind = np.array([t.next_position for t in tables], np.int32)
        rows = np.arange(n, dtype=np.int32)
        if len(tokens) == n:  # one token each: the step that matters most
            slots = np.array(
                [t.last_page * page_tokens + (t.length - 1) % page_tokens for t in tables], np.int32
            )
            positions = behind - 1
        else:
            counts = np.array([len(e.tokens) for e in entries], np.int32)
            # How many tokens of the same sequence come after each token, itself included.
            left = np.repeat(np.cumsum(counts, dtype=np.int32), counts)
            left -= np.arange(len(tokens), dtype=np.int32)
            rows = np.repeat(rows, counts)
            positions = behind[rows] - left
            slot = length[rows] - left
            slots = pages[rows, slot // page_tokens] * page_tokens + slot % page_tokens
        view = PageView(
            self.pool.address, self.layout.page_bytes, page_tokens, self.layout, pages,
            np.array([t.first for t in tables], np.int32), length, slots, _slot_positions(tables),
        )  # fmt: skip
        seqs = [e.seq for e in entries]
        return MicroBatch(tokens, positions, rows, seqs, {self.layout.spec.name: view})

    def full(self) -> MicroBatch:
        """One sequence that holds every page, and no new token."""
        none: Int32 = np.empty(0, np.int32)
        n_pages = self.pool.max_pages
        length = np.array([n_pages * self.layout.page_tokens], np.int32)
        view = PageView(
            self.pool.address, self.layout.page_bytes, self.layout.page_tokens, self.layout,
            np.arange(n_pages, dtype=np.int32)[None], np.zeros(1, np.int32), length, none, None,
        )  # fmt: skip
        return MicroBatch(none, none, none, [0], {self.layout.spec.name: view})


def _slot_positions(tables: list[Table]) -> Int32 | None:
    if all(t.positions is None for t in tables):
        return None
    matrix = np.full((len(tables), max(t.length for t in tables)), HOLE, np.int32)
    for row, table in zip(matrix, tables, strict=True):
        row[: table.length] = table.position_array()
    return matrix
