"""What one sequence holds in a recurrent group: a state page, and a log page after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.memory.groups.layout import Int32


@dataclass(slots=True)
class StateTable:
    """The state after some tokens, and the raw inputs of those that came since.

        tokens    0 ─────────────── position ───── next_position
                  [  in the state   )[  in the log )

    There is no state page while `position` is 0 (the zero state needs none) and no log page
    while the log is empty. Any position from `position` on can be returned to by moving the end.
    """

    state: int = -1
    """Page id, or -1."""
    position: int = 0
    """How many tokens the state has seen."""
    log: int = -1
    """Page id, or -1."""
    log_length: int = 0
    """Entries of the log page that count."""

    @property
    def next_position(self) -> int:
        """Where new tokens go."""
        return self.position + self.log_length

    @property
    def length(self) -> int:
        """How many tokens are remembered."""
        return self.position + self.log_length

    @property
    def state_pages(self) -> Int32:
        """The state page, if any, as an array."""
        return np.array([self.state] if self.state >= 0 else [], np.int32)

    @property
    def log_pages(self) -> Int32:
        """The log page, if any, as an array."""
        return np.array([self.log] if self.log >= 0 else [], np.int32)

    def copy(self) -> StateTable:
        """The same pages in a table of its own."""
        return StateTable(self.state, self.position, self.log, self.log_length)

    def become(self, other: StateTable) -> None:
        """All fields from another table."""
        self.state, self.position = other.state, other.position
        self.log, self.log_length = other.log, other.log_length


def audit_state(table: StateTable, log_tokens: int) -> list[str]:
    """What is wrong with a table by itself."""
    wrong: list[str] = []
    if (table.state < 0) != (table.position == 0) or table.position < 0:
        wrong.append(f"{table}: a state page belongs to every position but 0")
    if (table.log < 0) != (table.log_length == 0) or not 0 <= table.log_length <= log_tokens:
        wrong.append(f"{table}: a log page belongs to 1 to {log_tokens} entries")
    return wrong
