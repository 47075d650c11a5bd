"""Appending to recurrent sequences: into the log, through a fold, or as a scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from quire.errors import RequestError
from quire.memory.append import SetAside
from quire.memory.interface import Appends, MicroBatch, SeqTokens
from quire.memory.layout import Int32
from quire.memory.pool import PagePool
from quire.memory.state_layout import Fold, StateLayout, StateView
from quire.memory.state_table import StateTable


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
    """The pages of one recurrent group, and what makes a log part of a state."""

    layout: StateLayout
    states: PagePool
    logs: PagePool
    fold: Fold

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


@dataclass(slots=True)
class Step:
    """One sequence's new tokens, and how the sequence was before them."""

    seq: int
    table: StateTable
    count: int
    mode: Mode
    before: StateTable


class StateAppends(Appends):
    """New tokens at the ends of recurrent sequences.

    A state page is written once, by a fold or by the kernels of a scan, before anybody else can
    hold it. Log entries are written where the one-appender rule allows. What a step replaces is
    kept until its tokens are, so `undo` has no bytes to restore.
    """

    def __init__(
        self, pools: StatePools, tables: Mapping[int, StateTable],
        parts: Sequence[Sequence[SeqTokens]], ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self._pools = pools
        self._tables = tables
        self._ended = ended
        self._steps: list[Step] = []
        counts: dict[int, list[int]] = {}
        for part in parts:
            for seq, tokens in part:
                counts.setdefault(seq, []).append(len(tokens))
        needs = [pools.need(seq, tables[seq], n) for seq, n in counts.items()]
        self.states = SetAside(pools.states, sum(n for n, _ in needs))
        try:
            self.logs = SetAside(pools.logs, sum(n for _, n in needs))
        except BaseException:
            self.states.give_back()
            raise

    def apply(self, entries: Sequence[SeqTokens]) -> MicroBatch:
        try:
            for seq, tokens in entries:
                table, count = self._tables[seq], len(tokens)
                mode = choose(table.log_length, count, self._pools.layout.log_tokens)
                step = Step(seq, table, count, mode, table.copy())
                self._steps.append(step)
                self._take_in(step)
            return self._micro_batch(entries)
        except BaseException:
            self.undo()
            raise

    def _take_in(self, step: Step) -> None:
        """Makes room for new tokens. Interrupted anywhere, `undo` takes it back."""
        table, pools = step.table, self._pools
        if step.mode is Mode.SCAN:
            tail = pools.layout.tail_tokens
            _replace_state(table, step.before.next_position + step.count - tail, self.states)
            _replace_log(table, tail, self.logs)
            return
        if step.mode is Mode.FOLD:
            state_in = pools.states.page_address(table.state) if table.state >= 0 else 0
            state_out = pools.states.page_address(int(self.states.pages[0]))
            log = pools.logs.page_address(table.log)
            pools.fold(state_in, log, table.log_length, state_out, pools.layout)
            _replace_state(table, table.next_position, self.states)
            _replace_log(table, step.count, self.logs)
        elif pools.can_append(step.seq, table):
            table.log_length += step.count
        else:
            if table.log >= 0:
                pools.logs.copy_page(table.log, int(self.logs.pages[0]))
            _replace_log(table, table.log_length + step.count, self.logs)

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
        for aside in (self.states, self.logs):
            aside.recycle_originals()

    def undo(self) -> None:
        for step in self._steps:
            self._undo(step)
        self._steps = []

    def _undo(self, step: Step) -> None:
        table, before = step.table, step.before
        _put_back(table.state, before.state, self.states)
        _put_back(table.log, before.log, self.logs)
        table.become(before)

    def close(self) -> None:
        for aside in (self.states, self.logs):
            aside.give_back()
        self._ended()

    def _micro_batch(self, entries: Sequence[SeqTokens]) -> MicroBatch:
        steps, pools = self._steps, self._pools
        counts: Int32 = np.array([step.count for step in steps], np.int32)
        starts: Int32 = np.array([step.before.next_position for step in steps], np.int32)
        rows = np.repeat(np.arange(len(steps), dtype=np.int32), counts)
        # A token's place in the batch, from where its sequence starts in it.
        offsets = (
            np.arange(len(rows), dtype=np.int32) - (counts.cumsum(dtype=np.int32) - counts)[rows]
        )
        view = StateView(
            pools.states.address, pools.logs.address, pools.layout,
            *np.array([_row(step) for step in steps], np.int32).T.copy(),
        )  # fmt: skip
        return MicroBatch(
            np.concatenate([tokens for _, tokens in entries]),
            starts[rows] + offsets,
            rows,
            [step.seq for step in steps],
            {pools.layout.spec.name: view},
        )


def _row(step: Step) -> tuple[int, int, int, int, int, int]:
    """One sequence in the view: state in and out, log in, its length, log out, tail."""
    table, before = step.table, step.before
    if step.mode is Mode.SCAN:
        tail = table.log_length
        return before.state, table.state, before.log, before.log_length, table.log, tail
    length = table.log_length - step.count
    return table.state, -1, table.log if length else -1, length, table.log, 0


def _replace_state(table: StateTable, position: int, aside: SetAside) -> None:
    """A fresh state page, for the state at a position."""
    if table.state >= 0:
        aside.originals.append(table.state)
    table.state, table.position = int(aside.take(1)[0]), position


def _replace_log(table: StateTable, length: int, aside: SetAside) -> None:
    """A fresh log page, or none for an empty log."""
    if table.log >= 0:
        aside.originals.append(table.log)
    table.log, table.log_length = int(aside.take(1)[0]) if length else -1, length


def _put_back(now: int, before: int, aside: SetAside) -> None:
    """One page of a table is as it was: what replaced it goes, what was replaced returns."""
    if now == before:
        return
    if now >= 0:
        aside.pool.release_one(now)
    if before >= 0:
        aside.originals.remove(before)
