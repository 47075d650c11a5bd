"""States and logs of sequences: the least that kernels need of a memory, on poisoned pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops import Ops, Recurrent

Int32 = NDArray[np.int32]
Bytes = NDArray[np.uint8]
POISON = 0xFF


def pages_of(count: int, size: int) -> Bytes:
    """Poisoned pages at a multiple of 64."""
    room = np.full(count * size + 64, POISON, np.uint8)
    return room[-room.ctypes.data % 64 :][: count * size].reshape(count, size)


def column(*values: int) -> Int32:
    """Ids or counts, one per sequence or fold."""
    return np.array(values, np.int32)


@dataclass
class Table:
    """What one sequence remembers: a state page, and entries of a log page after it."""

    state: int = -1
    log: int = -1
    length: int = 0


class StateBook:
    """Tokens go into a log while they fit, else the log is folded, or many are scanned at once."""

    def __init__(self, ops: Ops, layers: Sequence[Recurrent], log_tokens: int) -> None:
        self.ops, self.layers, self.log_tokens = ops, layers, log_tokens
        # Room between layers, and entries further apart than they are long: nobody writes there.
        apart = max(-(-layer.state_bytes // 64) * 64 for layer in layers) + 64
        self.log_stride = max(layer.log_bytes for layer in layers) + 8
        self.offsets = [(i * apart, i * log_tokens * self.log_stride) for i in range(len(layers))]
        self.states = pages_of(40, len(layers) * apart)
        self.logs = pages_of(40, len(layers) * log_tokens * self.log_stride)
        self.free_states, self.free_logs = deque(range(40)), deque(range(40))
        self.tables: dict[int, Table] = {}

    def run(
        self, work: dict[int, NDArray[np.float32]], keep: int | None = None
    ) -> dict[int, NDArray[np.float32]]:
        """New tokens by sequence; outputs of all layers side by side, for the kept tokens."""
        counts = {seq: len(x) for seq, x in work.items()}
        view, after = self.plan(counts)
        seq_rows = np.repeat(np.arange(len(work), dtype=np.int32), list(counts.values()))
        bases = self.states.ctypes.data, self.logs.ctypes.data
        states = self.ops.states(view, *bases, seq_rows)
        rows = np.concatenate(list(work.values()))
        parts = [
            np.array(self.ops.numpy(self.ops.recur(self.ops.array(rows), layer, states, *at)))
            for layer, at in zip(self.layers, self.offsets, strict=True)
        ]
        kept = {seq: n if keep is None else keep for seq, n in counts.items()}
        for seq, table in after.items():
            self.settle(seq, replace(table, length=table.length - counts[seq] + kept[seq]))
        ends = np.cumsum(list(counts.values()))[:-1]
        found = zip(work, np.split(np.concatenate(parts, 1), ends), strict=True)
        return {seq: out[: kept[seq]] for seq, out in found}

    def plan(self, counts: dict[int, int]) -> tuple[Any, dict[int, Table]]:
        """A view for so many new tokens, and the tables after all of them; folds what has to be."""
        rows, after = [], {}
        for seq, n in counts.items():
            table = self.tables.setdefault(seq, Table())
            if n <= self.log_tokens < n + table.length:
                self.fold(seq)
                table = self.tables[seq]
            log_in = table.log if table.length else -1
            if n <= self.log_tokens:
                log = log_in if log_in >= 0 else self._take(self.free_logs, self.logs)
                after[seq] = Table(table.state, log, table.length + n)
                rows.append((table.state, -1, log_in, table.length, log, 0))
                continue
            tail = n % 5  # any number would do
            log = self._take(self.free_logs, self.logs) if tail else -1
            state = self._take(self.free_states, self.states)
            after[seq] = Table(state, log, tail)
            rows.append((table.state, state, log_in, table.length, log, tail))
        names = ("state_in", "state_out", "log_in", "log_length", "log_out", "tail")
        pairs = zip(names, zip(*rows, strict=True), strict=True)
        columns = {name: column(*each) for name, each in pairs}
        return self.view(**columns), after

    def view(self, **columns: Int32) -> Any:
        """What memory shows to the kernels."""
        return SimpleNamespace(
            state_page_bytes=self.states.shape[1], log_page_bytes=self.logs.shape[1],
            log_stride=self.log_stride, layout=SimpleNamespace(log_tokens=self.log_tokens),
            log_kept=np.full_like(columns["tail"], -1),
            room=np.full_like(columns["tail"], self.log_tokens), **columns,
        )  # fmt: skip

    def settle(self, seq: int, table: Table) -> None:
        """Gives back the pages that a sequence no longer has."""
        old = self.tables[seq]
        if old.state not in (-1, table.state):
            self.free_states.append(old.state)
        if old.log not in (-1, table.log):
            self.free_logs.append(old.log)
        self.tables[seq] = table

    def fold(self, seq: int) -> None:
        """Makes a sequence's log part of its state."""
        table = self.tables[seq]
        state = self._take(self.free_states, self.states)
        self.fold_pages(*(column(i) for i in (table.state, table.log, table.length, state)))
        self.settle(seq, Table(state))

    def fold_pages(self, *columns: Int32) -> None:
        """Any folds: state_in, log, n_entries, state_out."""
        self.ops.fold(
            self.layers, self.offsets, self.states.ctypes.data, self.states.shape[1],
            self.logs.ctypes.data, self.logs.shape[1], self.log_stride, *columns,
        )  # fmt: skip

    def state(self, seq: int) -> bytes:
        """The state page of a sequence, with its log folded in; the sequence stays as it is."""
        table = self.tables[seq]
        if table.length == 0:
            return self.states[table.state].tobytes()
        state = self._take(self.free_states, self.states)
        self.fold_pages(*(column(i) for i in (table.state, table.log, table.length, state)))
        self.free_states.appendleft(state)
        return self.states[state].tobytes()

    def copy(self, seq: int, to: int) -> None:
        """Another sequence that remembers the same, in pages of its own."""
        table = self.tables[seq]
        self.tables[to] = Table(
            self._take(self.free_states, self.states), self._take(self.free_logs, self.logs),
            table.length,
        )  # fmt: skip
        self.states[self.tables[to].state] = self.states[table.state]
        self.logs[self.tables[to].log] = self.logs[table.log]

    def _take(self, free: deque[int], pages: Bytes) -> int:
        page = free.popleft()
        pages[page] = POISON
        return page
