"""What one sequence holds in one group: pages, and which position lies in which slot."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.memory.groups.layout import Int32

HOLE = -1
"""The position of a slot whose token was removed."""

Mask = NDArray[np.bool_]
_Value = TypeVar("_Value", np.bool_, np.int32)


class Table:
    """Slots 0 … length-1 of a sequence, `page_tokens` to a page, in the order of `pages`.

    Slot i holds position `first + i` unless `positions` says otherwise: it is an array once
    tokens were removed from the middle or moved, with HOLE for slots without a token (`first` is
    0 then). The last slot is never a hole, no page holds only holes, and there is no page more
    than needed.

    `position_buffer` has room for slots to come; None while slot i holds position first + i.
    `pending` is how far each slot's K still has to be rotated (None: nowhere). `version` is
    replaced whenever the page ids change, so equal versions mean equal pages. `lost` spans the
    positions that belong to the sequence and are not here any more, because a window passed them.
    """

    __slots__ = (
        "_ids", "first", "last_page", "length", "lost", "n_pages", "next_position",
        "page_tokens", "pending", "position_buffer", "version",
    )  # fmt: skip

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.first = 0
        self.length = 0
        self.next_position = 0
        self.n_pages = 0
        self.last_page = -1
        self.pending: Int32 | None = None
        self.lost = range(0)
        self.version = object()
        self._ids: Int32 = np.empty(8, np.int32)
        self.position_buffer: Int32 | None = None

    def copy(self) -> Table:
        """The same pages and positions in a table of their own."""
        twin = Table.__new__(Table)
        twin.page_tokens = self.page_tokens
        twin.first = self.first
        twin.length = self.length
        twin.next_position = self.next_position
        twin.n_pages = self.n_pages
        twin.last_page = self.last_page
        twin.pending = None if self.pending is None else self.pending.copy()
        twin.lost = self.lost
        twin.version = self.version
        twin._ids = self._ids.copy()
        buffer = self.position_buffer
        twin.position_buffer = None if buffer is None else buffer.copy()
        return twin

    def become(self, other: Table) -> None:
        """Everything from another table, which is not used afterwards."""
        for field in self.__slots__:
            setattr(self, field, getattr(other, field))

    # -- reading --------------------------------------------------------------------------------

    @property
    def pages(self) -> Int32:
        """Page ids in order; a view, valid until the table changes."""
        return self._ids[: self.n_pages]

    @property
    def positions(self) -> Int32 | None:
        """Position by slot, or None while slot i holds position first + i."""
        return None if self.position_buffer is None else self.position_buffer[: self.length]

    def position_array(self) -> Int32:
        """Position by slot, always as an array of its own."""
        if self.position_buffer is not None:
            return self.position_buffer[: self.length].copy()
        return np.arange(self.first, self.first + self.length, dtype=np.int32)

    @property
    def gapless(self) -> bool:
        """Whether it holds each position from 0 to its end once."""
        if self.position_buffer is None:
            return self.first == 0
        live = np.sort(self.position_buffer[: self.length])
        live = live[live != HOLE]
        return len(live) == self.next_position and bool((live == np.arange(len(live))).all())

    def within(self, p0: int, p1: int) -> Mask:
        """Which slots hold a position in [p0, p1); p1 < 0 means to the end."""
        positions = self.position_array()
        inside = positions >= max(p0, 0)
        return inside if p1 < 0 else inside & (positions < p1)

    def same_pages(self, other: Table) -> int:
        """How many pages the two have in common from the start."""
        n = min(self.n_pages, other.n_pages)
        if self.version is other.version:
            return n
        differ = np.flatnonzero(self._ids[:n] != other._ids[:n])
        return int(differ[0]) if len(differ) else n

    def seen(self) -> Int32:
        """How many slots of each page this table can see."""
        if self.position_buffer is None:
            full = np.full(self.n_pages, self.page_tokens, np.int32)
            if self.n_pages:
                full[-1] = self.length - (self.n_pages - 1) * self.page_tokens
            return full
        live = self.by_page(self.position_buffer[: self.length] != HOLE)
        seen: Int32 = self.page_tokens - np.argmax(live[:, ::-1], axis=1).astype(np.int32)
        return seen

    def by_page(self, slots: NDArray[_Value]) -> NDArray[_Value]:
        """One row per page of a value per slot; zeros behind the last slot."""
        rows = np.zeros((self.n_pages, self.page_tokens), slots.dtype)
        rows.reshape(-1)[: self.length] = slots
        return rows

    # -- growing and shrinking ------------------------------------------------------------------

    def add_pages(self, ids: Int32) -> None:
        """Pages at the end, for slots to come."""
        end = self.n_pages + len(ids)
        if end > len(self._ids):
            self._ids = np.concatenate([self.pages, np.empty(max(end, 8), np.int32)])
        self._ids[self.n_pages : end] = ids
        self.n_pages = end
        self.last_page = int(ids[-1])
        self.version = object()

    def extend(self, count: int) -> None:
        """The next `count` positions in the next slots; their pages are there already."""
        end = self.length + count
        if self.position_buffer is not None:
            if end > len(self.position_buffer):
                spare = np.empty(max(end, 64), np.int32)
                self.position_buffer = np.concatenate([self.position_buffer[: self.length], spare])
            new = np.arange(self.next_position, self.next_position + count, dtype=np.int32)
            self.position_buffer[self.length : end] = new
        self.length = end
        self.next_position += count

    def replace_page(self, index: int, page: int) -> None:
        """Another page, with the same contents, at this place."""
        self._ids[index] = page
        if index == self.n_pages - 1:
            self.last_page = page
        self.version = object()

    def replace_pages(self, pages: Int32) -> None:
        """Other pages, with the same contents, in place of all."""
        self._ids = pages.copy()
        self.last_page = int(pages[-1]) if len(pages) else -1
        self.version = object()

    def truncate(self, length: int) -> Int32:
        """Keeps the first `length` slots and returns the pages that are not needed any more."""
        positions = self.position_buffer
        if positions is not None:
            live = np.flatnonzero(positions[:length] != HOLE)
            length = int(live[-1]) + 1 if len(live) else 0
        keep = -(-length // self.page_tokens)
        dropped = self._ids[keep : self.n_pages].copy()
        self.length = length
        if len(dropped):
            self.n_pages = keep
            self.last_page = int(self._ids[keep - 1]) if keep else -1
            self.version = object()
        if self.pending is not None:
            self.pending = self.pending[:length]
        if positions is None and length and self.pending is None:
            self.next_position = self.first + length
        else:
            self.settle()
        return dropped

    def cut(self, remove: Mask) -> Int32:
        """Removes these slots; returns the pages that hold nothing any more.

        Those leave the table together with their slots. Elsewhere removed slots become holes.
        """
        positions = self.position_array()
        positions[remove] = HOLE
        keep = self.by_page(positions != HOLE).any(axis=1)
        pages = self.pages
        dropped = pages[~keep]
        slots = np.repeat(keep, self.page_tokens)[: self.length]
        pending = None if self.pending is None else np.where(remove, 0, self.pending)[slots]
        self.assign(pages[keep], positions[slots], pending)
        return dropped

    def join(self, other: Table) -> None:
        """The slots of another table as well: in pages both have, or behind the own pages."""
        _, rows, known = np.intersect1d(self.pages, other.pages, True, True)
        new = np.delete(np.arange(other.n_pages), known)
        positions, theirs = self._position_rows(), other._position_rows()
        turns, their_turns = self.by_page(self._turns()), other.by_page(other._turns())
        # Of two tables that do not clash, one has a hole and no turn wherever the other sees.
        positions[rows] = np.maximum(positions[rows], theirs[known])
        turns[rows] += their_turns[known]
        self.assign(
            np.concatenate([self.pages, other.pages[new]]),
            np.concatenate([positions, theirs[new]]).reshape(-1),
            np.concatenate([turns, their_turns[new]]).reshape(-1),
        )

    def clashes(self, other: Table) -> bool:
        """Whether both see the same slot of a page."""
        _, mine, theirs = np.intersect1d(self.pages, other.pages, True, True)
        live = self._position_rows()[mine] != HOLE
        return bool((live & (other._position_rows()[theirs] != HOLE)).any())

    def _position_rows(self) -> Int32:
        """Positions, one row per page, with holes behind the last slot."""
        rows = np.full((self.n_pages, self.page_tokens), HOLE, np.int32)
        rows.reshape(-1)[: self.length] = self.position_array()
        return rows

    def assign(self, ids: Int32, positions: Int32, pending: Int32 | None) -> None:
        """All contents anew; holes at the end are dropped, which must not empty a page."""
        live = np.flatnonzero(positions != HOLE)
        self.length = int(live[-1]) + 1 if len(live) else 0
        self.n_pages = len(ids)
        assert self.n_pages == -(-self.length // self.page_tokens)
        self._ids = ids
        self.last_page = int(ids[-1]) if len(ids) else -1
        self.position_buffer = positions
        self.pending = None if pending is None else pending[: self.length].astype(np.int32)
        self.version = object()
        self.settle()

    # -- moving ---------------------------------------------------------------------------------

    def move(self, slots: Mask, target: Int32) -> None:
        """These slots get the positions in `target`; K has yet to be rotated by the difference."""
        positions = self.position_array()
        turns = self._turns()
        turns[slots] += (target - positions)[slots]
        positions[slots] = target[slots]
        self.pending = turns
        self.position_buffer = positions
        self.settle()

    def _turns(self) -> Int32:
        return np.zeros(self.length, np.int32) if self.pending is None else self.pending.copy()

    def settle(self) -> None:
        """Restores the plain form where there is one, and the figures derived from positions."""
        if self.pending is not None and not self.pending.any():
            self.pending = None
        if self.length == 0:
            self.first = self.next_position = 0
            self.position_buffer = None
        if self.position_buffer is None:
            self.next_position = self.first + self.length
            return
        positions = self.position_buffer[: self.length]
        self.first = 0  # it says nothing where positions are listed
        self.next_position = int(positions.max()) + 1
        if positions[0] != HOLE and (np.diff(positions) == 1).all():
            self.first = int(positions[0])
            self.position_buffer = None
