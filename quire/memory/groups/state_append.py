"""Appending to recurrent sequences: into the log, through a fold, or as a scan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from quire.devices.device import PageWork
from quire.errors import RequestError
from quire.memory.batch import NewTokens
from quire.memory.groups.group import GroupAppend, Wanted
from quire.memory.groups.state_layout import StateLayout
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.views import StateView
from quire.memory.pages.pool import PagePool
from quire.memory.pages.reserved import ReservedPages


class Mode(Enum):
    """What a sequence does with new tokens."""

    APPEND = "append"
    """They fit behind what the log holds."""
    FOLD = "fold"
    """They fit into an empty log: what it holds goes into a new state, and they into a new log."""
    SCAN = "scan"
    """They are more than a log holds: all but the last of them go into a new state."""


def choose(log_length: int, count: int, log_tokens: int) -> Mode:
    """The policy: as long as new tokens can be in a log, each of them can be taken back."""
    if count > log_tokens:
        return Mode.SCAN
    return Mode.APPEND if log_length + count <= log_tokens else Mode.FOLD


@dataclass(frozen=True, slots=True)
class StatePools:
    """The pages of one recurrent group."""

    layout: StateLayout
    states: PagePool
    logs: PagePool

    def can_append(self, seq: int, table: StateTable) -> bool:
        """Whether the sequence may write behind the end of its log, once there is room."""
        return table.log >= 0 and self.logs.may_append(table.log, table.log_length, seq)

    def need(self, seq: int, table: StateTable, counts: Iterable[int]) -> tuple[int, int]:
        """State and log pages it takes for micro-batches of so many tokens, one after the other.

        A replaced page that nobody else holds serves again from the next micro-batch on, so two
        of each are always enough, and one where the first to be replaced is such a page.
        """
        length, writable = table.log_length, self.can_append(seq, table)
        states = logs = 0
        for count in counts:
            mode = choose(length, count, self.layout.log_tokens)
            states += mode is not Mode.APPEND
            length = length + count if mode is Mode.APPEND else count
            if mode is Mode.SCAN:
                length = self.layout.tail_tokens
                logs, writable = logs + (length > 0), length > 0
            elif mode is Mode.FOLD or not writable:
                logs, writable = logs + 1, True
        own_state = table.state >= 0 and int(self.states.refs[table.state]) == 1
        own_log = table.log >= 0 and int(self.logs.refs[table.log]) == 1
        return min(states, 2 - own_state), min(logs, 2 - own_log)

    def need_of_all(self, parts: Sequence[Sequence[Wanted[StateTable]]]) -> tuple[int, int]:
        """State and log pages that all sequences of these micro-batches need together."""
        counts: dict[int, tuple[StateTable, list[int]]] = {}
        for part in parts:
            for seq, table, count in part:
                counts.setdefault(seq, (table, []))[1].append(count)
        n_states = n_logs = 0
        for seq, (table, each) in counts.items():
            states, logs = self.need(seq, table, each)
            n_states += states
            n_logs += logs
        return n_states, n_logs


@dataclass(slots=True)
class Step:
    """One sequence's new tokens, and how the sequence was before them."""

    seq: int
    table: StateTable
    count: int
    mode: Mode
    before: StateTable


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
        log_tokens = self._pools.layout.log_tokens
        rows: list[tuple[int, ...]] = []
        for seq, table, count in part:
            mode = choose(table.log_length, count, log_tokens)
            step = Step(seq, table, count, mode, table.copy())
            self._steps.append(step)
            self._take_in(step, work)
            rows.append(_row(step))
        columns = np.array(rows, np.int32).T.copy()
        layout = self._pools.layout
        sizes = layout.state_page_bytes, layout.log_page_bytes, layout.log_stride
        return StateView(layout, *sizes, *columns)

    def _take_in(self, step: Step, work: PageWork) -> None:
        """Makes room for new tokens. Interrupted anywhere, `undo` takes it back."""
        table, pools = step.table, self._pools
        if step.mode is Mode.SCAN:
            tail = pools.layout.tail_tokens
            _replace_state(table, step.before.next_position + step.count - tail, self.states)
            _replace_log(table, tail, self.logs)
            return
        if step.mode is Mode.FOLD:
            state_in, log, n = table.state, table.log, table.log_length
            _replace_state(table, table.next_position, self.states)
            _replace_log(table, step.count, self.logs)
            work.fold(pools.layout.spec.name, state_in, log, n, table.state)
        elif pools.can_append(step.seq, table):
            table.log_length += step.count
        else:
            log = table.log
            _replace_log(table, table.log_length + step.count, self.logs)
            if log >= 0:
                work.copy(pools.logs.name, log, table.log)

    def check(self, accepted: Mapping[int, int]) -> None:
        for step in self._steps:
            least = step.count - self._pools.layout.tail_tokens
            if step.mode is Mode.SCAN and 0 < accepted[step.seq] < least:
                raise RequestError(
                    f"sequence {step.seq} took in {step.count} tokens at once and cannot keep "
                    f"{accepted[step.seq]} of them; keep {least} or more, or none, or give it at "
                    f"most {self._pools.layout.log_tokens} tokens (room_for_draft)"
                )

    def keep(self, accepted: Mapping[int, int]) -> None:
        for step in self._steps:
            kept = accepted[step.seq]
            if kept == 0:
                self._undo(step)
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

    def _undo(self, step: Step) -> None:
        table, before = step.table, step.before
        _put_back(table.state, before.state, self.states)
        _put_back(table.log, before.log, self.logs)
        table.become(before)


def _row(step: Step) -> tuple[int, int, int, int, int, int]:
    """One sequence in the view: state in and out, log in, its length, log out, tail."""
    table, before = step.table, step.before
    if step.mode is Mode.SCAN:
        tail = table.log_length
        return before.state, table.state, before.log, before.log_length, table.log, tail
    length = table.log_length - step.count
    return table.state, -1, table.log if length else -1, length, table.log, 0


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
