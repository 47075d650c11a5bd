"""New tokens in all groups at once: a step's lease, and a batch in micro-batches.

prepare ──▶ apply ──▶ (kernels write) ──▶ keep ──▶ close
              └────────── undo ◀─────────────┘        (whatever fails, memory is as it was)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quire.devices.device import PageWork
from quire.errors import RequestError
from quire.memory.batch import MicroBatch, NewTokens, SeqTokens
from quire.memory.groups.group import GroupAppend
from quire.memory.groups.layout import Int32
from quire.memory.groups.views import View
from quire.memory.pages.reserved import ReservedPages

if TYPE_CHECKING:
    from quire.memory.books import Books


class AppendTransaction:
    """Room in every group for micro-batches that follow one another; or OutOfMemory, no change.

    While it is open nothing else may change the memory, so nothing moves under the kernels.
    """

    def __init__(self, memory: Books, parts: Sequence[Sequence[SeqTokens]]) -> None:
        self._memory = memory
        self._parts = parts
        self._created = memory.begin(self, parts)
        self._groups: list[GroupAppend[Any]] = []
        try:
            self._wanted = memory.wanted(parts)
            for i, group in enumerate(memory.groups):
                if len(parts) == 1:
                    self._groups.append(group.append((self._wanted[0][i],)))
                else:
                    self._groups.append(group.append([wanted[i] for wanted in self._wanted]))
        except BaseException:
            self.close()
            raise

    @property
    def reserved(self) -> list[ReservedPages]:
        """Pages that are set aside."""
        return [reserved for group in self._groups for reserved in group.reserved]

    def apply(self, at: int) -> MicroBatch:
        """Puts the new tokens of a micro-batch in; an exception leaves everything as it was."""
        entries, wanted = self._parts[at], self._wanted[at]
        seqs: list[int] = []
        starts: list[int] = []
        for seq, table, _ in wanted[0]:
            seqs.append(seq)
            starts.append(table.next_position)
        new, work = new_tokens(entries, starts), PageWork()
        views: dict[str, View] = {}
        try:
            for i, group in enumerate(self._groups):
                name = self._memory.groups[i].layout.spec.name
                views[name] = group.apply(wanted[i], new, work)
        except BaseException:
            self.undo()
            raise
        return MicroBatch(new.tokens, new.positions, new.rows, seqs, views, work)

    def check(self, accepted: Mapping[int, int]) -> None:
        """Raises RequestError if a group cannot keep so many tokens of each sequence."""
        for group in self._groups:
            group.check(accepted)

    def keep(self, accepted: Mapping[int, int]) -> None:
        """Keeps the first tokens of each sequence, by number, and drops the rest."""
        for group in self._groups:
            group.keep(accepted)

    def undo(self) -> None:
        """Makes everything as it was before `apply`."""
        for group in self._groups:
            group.undo()

    def close(self) -> None:
        """Gives back what is set aside; memory is idle again."""
        for group in self._groups:
            group.close()
        self._memory.end(self._created)


class Lease:
    """What one step has reserved: committed once, or everything back when the block is left."""

    ubatch: MicroBatch

    def __init__(self, memory: Books, entries: Sequence[SeqTokens]) -> None:
        self._counts = check_entries(entries)
        self._appends = AppendTransaction(memory, [entries])
        self._open = False
        try:
            self.ubatch = self._appends.apply(0)
            self._open = True
        finally:
            if not self._open:
                self._appends.close()

    @property
    def tokens(self) -> Int32:
        """The new tokens of all sequences, one after the other."""
        return self.ubatch.tokens

    @property
    def positions(self) -> Int32:
        """The position of each new token."""
        return self.ubatch.positions

    @property
    def seq_rows(self) -> Int32:
        """The row in `seqs`, and in every view, that each token belongs to."""
        return self.ubatch.seq_rows

    @property
    def seqs(self) -> list[int]:
        """The sequences, row by row."""
        return self.ubatch.seqs

    @property
    def views(self) -> dict[str, View]:
        """Each group's memory for the kernels."""
        return self.ubatch.views

    def commit(self, accepted: Mapping[int, int]) -> None:
        """Keeps the first `accepted[seq]` new tokens of each sequence and drops the rest."""
        if not self._open:
            raise RequestError("a lease is committed once; this one has ended")
        whole = True
        for seq, count in self._counts.items():
            kept = accepted.get(seq, -1)
            if not 0 <= kept <= count:
                raise RequestError(
                    f"commit needs 0 to {count} tokens to keep for sequence {seq}; "
                    f"it got {accepted.get(seq, 'no entry')}"
                )
            whole &= kept == count
        if len(accepted) != len(self._counts):
            raise RequestError(
                f"commit names the sequences {sorted(accepted)}; the lease is of {self.seqs}"
            )
        if not whole:
            self._appends.check(accepted)
        self._open = False
        self._appends.keep(accepted)
        self._appends.close()

    def abort(self) -> None:
        """Makes everything as it was; does nothing after `commit`."""
        if self._open:
            self._open = False
            self._appends.undo()
            self._appends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.abort()


def new_tokens(entries: Sequence[SeqTokens], starts: Sequence[int]) -> NewTokens:
    """The tokens of a micro-batch whose sequences go on at these positions."""
    n = len(entries)
    tokens = entries[0].tokens if n == 1 else np.concatenate([e.tokens for e in entries])
    positions = np.array(starts, np.int32)
    rows = np.arange(n, dtype=np.int32)
    if len(tokens) == n:  # one token each: the step that matters most
        return NewTokens(tokens, positions, rows, None)
    if n == 1:
        ahead = np.arange(len(tokens), dtype=np.int32)
        return NewTokens(tokens, starts[0] + ahead, np.zeros(len(tokens), np.int32), ahead)
    counts = np.array([len(e.tokens) for e in entries], np.int32)
    rows = np.repeat(rows, counts)
    ahead = np.arange(len(rows), dtype=np.int32) - (counts.cumsum(dtype=np.int32) - counts)[rows]
    return NewTokens(tokens, positions[rows] + ahead, rows, ahead)


def check_entries(entries: Sequence[SeqTokens]) -> dict[int, int]:
    """How many tokens each sequence gets.

    Refuses a batch that is empty or names a sequence twice or without tokens.
    """
    counts: dict[int, int] = {}
    for seq, tokens in entries:
        if seq < 0 or not len(tokens):
            raise RequestError(
                f"sequence {seq} has {len(tokens)} tokens; ids start at 0, counts at 1"
            )
        counts[seq] = len(tokens)
    if not counts:
        raise RequestError("a batch needs at least one sequence with a token; it has none")
    if len(counts) != len(entries):
        raise RequestError("a batch names a sequence twice; join its tokens in one entry")
    return counts
