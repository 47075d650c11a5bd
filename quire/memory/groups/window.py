"""Sliding window: pages that no token can still see are freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.devices.device import Device, GroupKernels
from quire.errors import RequestError
from quire.memory.groups.attention import AttentionGroup, Shifted
from quire.memory.groups.group import Change, Wanted
from quire.memory.groups.layout import AttentionLayout
from quire.memory.groups.table import HOLE, Table
from quire.memory.groups.table_append import TableAppend
from quire.memory.pages.demand import Demand


class WindowGroup(AttentionGroup):
    """Attention in which a token at position p sees positions p - window + 1 … p.

        positions   0 ───────── next - window ────────────────── next
                    [   dead    ](  what the next token sees  )
        pages       [ freed ][ kept for its live end ][ ][ ][  ]

    The next position decides, and only once its tokens are committed: drafts free nothing, and
    neither does a step that is undone. `Table.lost` remembers what was freed. An operation after
    which a token could see lost positions is refused; a checkpoint taken before holds its pages
    itself, so restoring it is exact. `swa_full` keeps everything.
    """

    def __init__(
        self, layout: AttentionLayout, device: Device, kernels: GroupKernels | None = None,
        max_tokens: int | None = None, demand_paged: bool = True, poison: bool = False,
        swa_full: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(layout, device, kernels, max_tokens, demand_paged, poison)
        assert layout.spec.window is not None
        self.window = layout.spec.window
        self.swa_full = swa_full

    def append(self, parts: Sequence[Sequence[Wanted[Table]]]) -> TableAppend:
        passed = None if self.swa_full else self._passed
        return TableAppend(self.pool, self.layout, self._rows, parts, passed)

    def least_pages(self, n_tokens: int) -> Demand:
        return super().least_pages(n_tokens if self.swa_full else min(n_tokens, self.window))

    def _first_seen(self, next_position: int) -> int:
        """The smallest position that has to stay when a sequence goes on at `next_position`.

        The last token stays whatever the window: it tells where the sequence is.
        """
        return next_position - max(self.window, 2) + 1

    def _passed(self, table: Table) -> None:
        """New tokens of a table are there to stay: what they leave behind goes."""
        start = self._first_seen(table.next_position)
        if start <= 0:
            return
        if table.position_buffer is None and start - table.first < table.page_tokens:
            return  # most steps: no page has died
        positions = table.position_array()
        alive = table.by_page(positions >= start).any(axis=1)
        dead = ~np.repeat(alive, table.page_tokens)[: table.length]
        gone = positions[dead & (positions != HOLE)]
        if len(gone):
            table.lost = _hull(table.lost, range(int(gone.min()), int(gone.max()) + 1))
            self.pool.release(table.cut(dead))

    def _sees(self, lost: range, next_position: int) -> bool:
        return len(lost) > 0 and lost.stop > self._first_seen(next_position)

    # -- what would bring lost positions back is refused ------------------------------------------

    def can_remove(self, table: Table, p0: int, p1: int) -> bool:
        lost = _without(table.lost, p0, p1)
        if not lost:
            return True
        rest = table.position_array()[~table.within(p0, p1)]
        return not self._sees(lost, int(rest.max(initial=HOLE)) + 1)

    def remove(self, table: Table, p0: int, p1: int) -> None:
        table.lost = _without(table.lost, p0, p1)
        super().remove(table, p0, p1)

    def part(self, source: Table, target: Table, p0: int, p1: int) -> Table:
        part = super().part(source, target, p0, p1)
        part.lost = _within(part.lost, p0, p1)
        if _overlap(part, target):
            raise RequestError(
                "the sequence to copy to has positions of its own among those to copy, some of "
                f"which the window of {self.window} has passed; remove them with seq_rm"
            )
        lost = _hull(part.lost, target.lost)
        if self._sees(lost, max(part.next_position, target.next_position)):
            raise RequestError(
                f"the copy would see positions {lost.start} to {lost.stop - 1}, which the window "
                f"of {self.window} has passed; copy the whole sequence, or save a checkpoint "
                "before the place to return to"
            )
        return part

    def join(self, target: Table, part: Table, seq: int) -> None:
        super().join(target, part, seq)
        target.lost = _hull(target.lost, part.lost)

    def shifted(self, table: Table, p0: int, p1: int, change: Change) -> Shifted:
        shifted = super().shifted(table, p0, p1, change)
        lost = _moved(table.lost, p0, p1, change)
        if lost.start < 0:
            raise RequestError(
                f"positions would start at {lost.start}; they have to start at 0 or above"
            )
        if self._sees(lost, int(shifted.target.max(initial=HOLE)) + 1):
            raise RequestError(
                f"positions {lost.start} to {lost.stop - 1} would be seen again, which the window "
                f"of {self.window} has passed; compute the tokens again"
            )
        return replace(shifted, lost=lost)

    def shift(self, table: Table, shifted: Shifted) -> None:
        super().shift(table, shifted)
        table.lost = shifted.lost

    def faults(self, table: Table) -> list[str]:
        wrong = super().faults(table)
        if self._sees(table.lost, table.next_position):
            wrong.append(f"a table goes on at {table.next_position} and lost {table.lost}")
        return wrong


def _within(span: range, p0: int, p1: int) -> range:
    """What of a span lies in [p0, p1)."""
    return range(max(span.start, p0), span.stop if p1 < 0 else min(span.stop, p1))


def _without(span: range, p0: int, p1: int) -> range:
    """A span without [p0, p1); a gap in its middle stays part of it."""
    if p0 <= span.start:
        return range(0) if p1 < 0 else range(max(span.start, p1), span.stop)
    return range(span.start, min(span.stop, p0)) if p1 < 0 or p1 >= span.stop else span


def _hull(a: range, b: range) -> range:
    """The smallest span around both."""
    if not a or not b:
        return a or b
    return range(min(a.start, b.start), max(a.stop, b.stop))


def _overlap(a: Table, b: Table) -> bool:
    """Whether one has lost a position that the other holds or has lost too."""
    if range(max(a.lost.start, b.lost.start), min(a.lost.stop, b.lost.stop)):
        return True
    return any(
        bool(((positions >= lost.start) & (positions < lost.stop)).any())
        for lost, positions in ((a.lost, b.position_array()), (b.lost, a.position_array()))
    )


def _moved(span: range, p0: int, p1: int, change: Change) -> range:
    """A span after its part in [p0, p1) has moved."""
    p0 = max(p0, 0)
    stays = _within(span, -1, p0) if p0 else range(0)
    if p1 >= 0:
        stays = _hull(stays, _within(span, p1, -1))
    part = _within(span, p0, p1)
    if not part:
        return stays
    low, high = change(np.array([part.start, part.stop - 1], np.int64)).tolist()
    return _hull(stays, range(low, high + 1))
