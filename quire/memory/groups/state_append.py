"""Appending to recurrent sequences: into the log, through a fold, or as a scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.devices.device import PageWork
from quire.errors import RequestError
from quire.memory.batch import NewTokens
from quire.memory.groups.group import GroupAppend, Wanted
from quire.memory.groups.state_pools import Mode, StatePools
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.views import StateView
from quire.memory.pages.reserved import ReservedPages


@dataclass(slots=True)
class Step:
    """One sequence's new tokens, and how the sequence was before them."""

    seq: int
    table: StateTable
    count: int
    before: StateTable
    mode: Mode = Mode.APPEND
    tail: int = 0
    """How many of them are in the log."""
    start: StateTable = field(default_factory=StateTable)
    """The sequence before them, once an odd log is folded."""
    kept: int = -1
    """The log page that a crossing has filled."""

    def can_keep(self, accepted: int) -> bool:
        """Whether so many of the tokens can stay without the others."""
        return self.mode is not Mode.SCAN or accepted == 0 or self.count - accepted <= self.tail


class StateAppend(GroupAppend[StateTable]):
    """New tokens at the ends of recurrent sequences.

    A state page is written once, by a fold or by the kernels of a scan, before anybody else can
    hold it. Log entries are written where the one-appender rule allows. What a step replaces is
    kept until its tokens are, so `undo` has no bytes to restore.
    """

    def __init__(self, pools: StatePools, parts: Sequence[Sequence[Wanted[StateTable]]]) -> None:
        self._pools = pools
        self._steps: list[Step] = []
        n_states, n_logs = pools.need_of_all(parts)
        self.states = ReservedPages(pools.states, n_states)
        try:
            self.logs = ReservedPages(pools.logs, n_logs)
        except BaseException:
            self.states.give_back()
            raise
        self.reserved = (self.states, self.logs)

    def apply(
        self, part: Sequence[Wanted[StateTable]], new: NewTokens, work: PageWork
    ) -> StateView:
        rows: list[tuple[int, ...]] = []
        for seq, table, count in part:
            step = Step(seq, table, count, table.copy())
            self._steps.append(step)
            if self._pools.odd(table):
                self._fold(table, 0, work)
            step.start = table.copy()
            step.mode, step.tail = self._pools.choose(table.position, table.log_length, count)
            self._take_in(step, work)
            rows.append(_row(step, self._pools.layout.log_tokens))
        columns = np.array(rows, np.int32).T.copy()
        layout = self._pools.layout
        sizes = layout.state_page_bytes, layout.log_page_bytes, layout.log_stride
        return StateView(layout, *sizes, *columns)

    def _take_in(self, step: Step, work: PageWork) -> None:
        """Makes room for new tokens. Interrupted anywhere, `undo` takes it back."""
        table = step.table
        if step.mode in (Mode.APPEND, Mode.CROSS):
            filled = step.count if step.mode is Mode.APPEND else step.count - step.tail
            self._lengthen(step, filled, work)
        if step.mode is Mode.FOLD:
            self._fold(table, step.count, work)
        elif step.mode is not Mode.APPEND:
            step.kept = table.log if step.mode is Mode.CROSS else -1
            _replace_state(table, step.start.next_position + step.count - step.tail, self.states)
            _replace_log(table, step.tail, self.logs)

    def _fold(self, table: StateTable, count: int, work: PageWork) -> None:
        """The log becomes part of a new state, and a new log has room for so many tokens."""
        state_in, log, n = table.state, table.log, table.log_length
        _replace_state(table, table.next_position, self.states)
        _replace_log(table, count, self.logs)
        work.fold(self._pools.layout.spec.name, state_in, log, n, table.state)

    def _lengthen(self, step: Step, count: int, work: PageWork) -> None:
        """So many entries more in the log, or in a copy of it where others hold it too."""
        table, pools = step.table, self._pools
        if pools.can_append(step.seq, table):
            table.log_length += count
            return
        log = table.log
        _replace_log(table, table.log_length + count, self.logs)
        if log >= 0:
            work.copy(pools.logs.name, log, table.log)

    def check(self, accepted: Mapping[int, int]) -> None:
        for step in self._steps:
            if not step.can_keep(accepted[step.seq]):
                raise RequestError(
                    f"sequence {step.seq} took in {step.count} tokens at once and cannot keep "
                    f"{accepted[step.seq]} of them; keep {step.count - step.tail} or more, or "
                    f"none, or give it at most {self._pools.layout.log_tokens} tokens "
                    "(room_for_draft)"
                )

    def keep(self, accepted: Mapping[int, int]) -> None:
        for step in self._steps:
            kept = accepted[step.seq]
            if kept == 0:
                self._undo(step)
            elif step.mode is Mode.CROSS and kept <= step.count - step.tail:
                self._stay_before(step, kept)
            elif kept < step.count:
                step.table.log_length -= step.count - kept
                if step.table.log_length == 0:  # a scan without its tail
                    self.logs.pool.release_one(step.table.log)
                    step.table.log = -1
        self._steps = []
        for reserved in self.reserved:
            if reserved.originals:
                reserved.recycle_originals()

    def undo(self) -> None:
        for step in self._steps:
            self._undo(step)
        self._steps = []

    def close(self) -> None:
        for reserved in self.reserved:
            reserved.give_back()

    def _stay_before(self, step: Step, kept: int) -> None:
        """No token past the fold stays: the state before it again, and the log that was filled."""
        table, start = step.table, step.start
        _put_back(table.state, start.state, self.states)
        _put_back(table.log, step.kept, self.logs)
        length = start.log_length + kept
        table.become(StateTable(start.state, start.position, step.kept, length))

    def _undo(self, step: Step) -> None:
        table, before = step.table, step.before
        _put_back(table.state, before.state, self.states)
        _put_back(table.log, before.log, self.logs)
        table.become(before)


def _row(step: Step, log_tokens: int) -> tuple[int, ...]:
    """One sequence in the view, column by column."""
    table, start = step.table, step.start
    position = start.next_position if step.mode is Mode.FOLD else start.position
    room = log_tokens - position % log_tokens
    if step.mode in (Mode.SCAN, Mode.CROSS):
        length = start.log_length
        own = start.log if step.mode is Mode.SCAN else step.kept
        log = own if length else -1
        return start.state, table.state, log, length, table.log, step.tail, step.kept, room
    length = table.log_length - step.count
    return table.state, -1, table.log if length else -1, length, table.log, 0, -1, room


def _replace_state(table: StateTable, position: int, reserved: ReservedPages) -> None:
    """A fresh state page, for the state at a position."""
    page = int(reserved.take(1)[0])
    if table.state >= 0:
        reserved.originals.append(table.state)
    table.state, table.position = page, position


def _replace_log(table: StateTable, length: int, reserved: ReservedPages) -> None:
    """A fresh log page, or none for an empty log."""
    page = int(reserved.take(1)[0]) if length else -1
    if table.log >= 0:
        reserved.originals.append(table.log)
    table.log, table.log_length = page, length


def _put_back(now: int, before: int, reserved: ReservedPages) -> None:
    """One page of a table is as it was: what replaced it goes, what was replaced returns."""
    if now == before:
        return
    if now >= 0:
        reserved.pool.release_one(now)
    if before >= 0:
        reserved.originals.remove(before)
