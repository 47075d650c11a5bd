"""Appending to recurrent sequences: into the log, through a fold, or as a scan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    CROSS = "cross"
    """Some fill the log, which goes into a new state, and the others into a new log."""
    SCAN = "scan"
    """They are more than a log holds: all but the last of them go into a new state."""


def choose(log_length: int, count: int, log_tokens: int) -> tuple[Mode, int]:
    """What to do, and how many of the new tokens are in the log then, by what fits.

    As long as new tokens can be in a log, each of them can be taken back.
    """
    if count > log_tokens:
        return Mode.SCAN, log_tokens // 2
    return (Mode.APPEND if log_length + count <= log_tokens else Mode.FOLD), count


def choose_at_positions(
    position: int, log_length: int, count: int, log_tokens: int
) -> tuple[Mode, int]:
    """The same by positions alone, for kernels whose bits depend on where a log was folded.

    A state is of a multiple of `log_tokens`, and the tokens up to the next one are in its log:
    so token t is computed from the state at the last multiple up to t, whatever batch, draft,
    fork or prompt it came in. A log that is full stays so until a token follows, so the last
    token can always be taken back; and a draft of up to `log_tokens` tokens crosses one multiple
    at most, with the log before it kept as long as the draft may be taken back.

    A state that was converted from another device may be of any position: its log ends at the next
    multiple all the same, or is folded as it is before anything follows (`StatePools.odd`).
    """
    start = position + log_length
    last = start + count - 1
    base = max(last - last % log_tokens, position)
    tail = last + 1 - base
    if base == position:
        return Mode.APPEND, count
    if base == start:
        return Mode.FOLD, count
    return (Mode.CROSS if count <= log_tokens else Mode.SCAN), tail


@dataclass(frozen=True, slots=True)
class StatePools:
    """The pages of one recurrent group."""

    layout: StateLayout
    states: PagePool
    logs: PagePool
    at_positions: bool
    """Whether logs are folded at multiples of their length, or when they are full."""

    def choose(self, position: int, log_length: int, count: int) -> tuple[Mode, int]:
        """What to do with new tokens, and how many of them are in the log then."""
        log_tokens = self.layout.log_tokens
        if self.at_positions:
            return choose_at_positions(position, log_length, count, log_tokens)
        return choose(log_length, count, log_tokens)

    def odd(self, table: StateTable) -> bool:
        """Whether a log goes on behind a multiple, as those from other devices may."""
        room = self.layout.log_tokens - table.position % self.layout.log_tokens
        return self.at_positions and table.log_length > room

    def can_append(self, seq: int, table: StateTable) -> bool:
        """Whether the sequence may write behind the end of its log, once there is room."""
        return table.log >= 0 and self.logs.may_append(table.log, table.log_length, seq)

    def need(self, seq: int, table: StateTable, counts: Iterable[int]) -> tuple[int, int]:
        """State and log pages it takes for micro-batches of so many tokens, one after the other.

        A replaced page that nobody else holds serves again from the next micro-batch on.
        """
        position, length = table.position, table.log_length
        odd, writable = self.odd(table), self.can_append(seq, table)
        if odd:
            position, length, writable = position + length, 0, False
        states = _Supply(table.state >= 0 and int(self.states.refs[table.state]) == 1)
        logs = _Supply(table.log >= 0 and int(self.logs.refs[table.log]) == 1)
        for count in counts:
            mode, tail = self.choose(position, length, count)
            copied = mode in (Mode.APPEND, Mode.CROSS) and not writable
            if odd or mode is not Mode.APPEND:
                states.replace(odd + (mode is not Mode.APPEND))
            fresh = copied + (mode is not Mode.APPEND and tail > 0)
            if odd or fresh or mode is not Mode.APPEND:
                logs.replace(fresh)
            if mode is not Mode.APPEND:
                position, length = position + length + count - tail, 0
            length, odd = length + tail, False
            writable = length > 0
        return states.needed, logs.needed

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


class _Supply:
    """Counts the pages of one kind that a sequence takes: those it replaces serve again."""

    def __init__(self, own: bool) -> None:
        self.needed = 0
        self._own, self._spare = own, 0

    def replace(self, fresh: int) -> None:
        """Its page goes, and so many take its place one after the other."""
        taken = min(fresh, self._spare)
        self.needed += fresh - taken
        self._spare += self._own + max(fresh - 1, 0) - taken
        self._own = fresh > 0


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
