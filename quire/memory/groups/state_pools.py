"""Where the logs of recurrent sequences are folded, and the pages that takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from quire.memory.groups.group import Wanted
from quire.memory.groups.state_layout import StateLayout
from quire.memory.groups.state_table import StateTable
from quire.memory.pages.pool import PagePool


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
