"""Tables as plain numbers, and back: the numbers may come from anybody, so all are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import MAX_POSITION, AttentionLayout, Int32
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.table import HOLE, Table

AnyTable: TypeAlias = Table | StateTable
Refuse: TypeAlias = Callable[[str], NoReturn]
Numbered: TypeAlias = Callable[[int], int]
"""The number that a file gives to a page."""

_TABLE_FIELDS = {"pages", "first", "length", "positions", "pending", "lost"}
_STATE_FIELDS = {"state", "position", "log", "log_length"}


def to_numbers(table: AnyTable, numbered: Sequence[Numbered]) -> dict[str, object]:
    """A table as JSON holds it, with page ids as numbered for each of its pools."""
    if isinstance(table, StateTable):
        states, logs = numbered
        return {
            "state": states(table.state) if table.state >= 0 else -1,
            "position": table.position,
            "log": logs(table.log) if table.log >= 0 else -1,
            "log_length": table.log_length,
        }
    positions, pending = table.positions, table.pending
    return {
        "pages": [numbered[0](page) for page in table.pages.tolist()],
        "first": table.first if positions is None else 0,
        "length": table.length,
        "positions": None if positions is None else positions.tolist(),
        "pending": None if pending is None else pending.tolist(),
        "lost": [table.lost.start, table.lost.stop] if table.lost else [0, 0],
    }


def from_numbers(
    group: AnyGroup, numbers: object, n_pages: Sequence[int], refuse: Refuse
) -> AnyTable:
    """A table whose pages have the file's numbers, of which there are `n_pages` in each pool."""
    table = group.empty()
    fields = _STATE_FIELDS if isinstance(table, StateTable) else _TABLE_FIELDS
    if not isinstance(numbers, dict) or numbers.keys() != fields:
        refuse(f"a table of group {group.name!r} has not the fields {sorted(fields)}")
    if isinstance(table, StateTable):
        made: AnyTable = _state_table(numbers, n_pages, refuse)
    else:
        made = _table(table, group, numbers, n_pages[0], refuse)
    faults = group.faults(made)
    if faults:
        refuse(f"its tables are wrong: {faults[0][:200]}")
    return made


def _state_table(numbers: dict[str, Any], n_pages: Sequence[int], refuse: Refuse) -> StateTable:
    n_states, n_logs = n_pages
    state = _whole(numbers["state"], -1, n_states - 1, "a state page", refuse)
    log = _whole(numbers["log"], -1, n_logs - 1, "a log page", refuse)
    position = _whole(numbers["position"], 0, MAX_POSITION, "the position of a state", refuse)
    room = MAX_POSITION + 1 - position
    length = _whole(numbers["log_length"], 0, room, "the length of a log", refuse)
    return StateTable(state, position, log, length)


def _table(
    table: Table, group: AnyGroup, numbers: dict[str, Any], n_pages: int, refuse: Refuse
) -> Table:
    pages = _array(numbers["pages"], 0, n_pages - 1, "page", refuse)
    size = table.page_tokens
    # As many slots as pages have room for: nothing larger is ever made from what a file says.
    length = _whole(numbers["length"], 0, len(pages) * size, "the length of a table", refuse)
    if len(pages) != -(-length // size):
        refuse(f"a table has {length} tokens of {size} to a page, and {len(pages)} pages")
    if numbers["positions"] is None:
        first = _whole(numbers["first"], 0, MAX_POSITION, "a first position", refuse)
        _whole(first + length, 0, MAX_POSITION + 1, "the end of a table", refuse)
        positions: Int32 = np.arange(first, first + length, dtype=np.int32)
    else:
        positions = _array(numbers["positions"], HOLE, MAX_POSITION, "position", refuse)
        if len(positions) != length or not length or positions[-1] == HOLE:
            refuse("a table's positions are not as many as its tokens, or end in a hole")
    pending = _pending(group, numbers["pending"], positions, refuse)
    table.assign(pages, positions, pending)
    table.lost = _lost(group, numbers["lost"], refuse)
    return table


def _pending(group: AnyGroup, numbers: object, positions: Int32, refuse: Refuse) -> Int32 | None:
    """How far K has yet to be rotated."""
    if numbers is None:
        return None
    pending = _array(numbers, -MAX_POSITION, MAX_POSITION, "turn", refuse)
    stored = positions.astype(np.int64) - pending if len(pending) == len(positions) else None
    live = positions != HOLE
    if stored is None or pending[~live].any() or not _in_range(stored[live]):
        refuse("a table's turns do not go with its tokens")
    if not group.can_shift:
        refuse(
            f"positions of group {group.name!r} have moved in it, and this model gives "
            "no way to rotate K"
        )
    return pending


def _in_range(positions: NDArray[np.int64]) -> bool:
    return bool(((positions >= 0) & (positions <= MAX_POSITION)).all())


def _lost(group: AnyGroup, numbers: object, refuse: Refuse) -> range:
    """What a window has passed; nothing in other kinds."""
    span = _array(numbers, 0, MAX_POSITION + 1, "lost position", refuse)
    if len(span) != 2 or span[0] > span[1]:
        refuse(f"{numbers} is no range of lost positions")
    layout = group.layout
    windowed = isinstance(layout, AttentionLayout) and layout.spec.window is not None
    if span[0] < span[1] and not windowed:
        refuse(f"group {layout.spec.name!r} has no window and cannot have lost positions")
    return range(int(span[0]), int(span[1])) if span[0] < span[1] else range(0)


def _whole(value: object, low: int, high: int, what: str, refuse: Refuse) -> int:
    if type(value) is not int or not low <= value <= high:
        refuse(f"{what} is {str(value)[:40]}; it has to be a whole number from {low} to {high}")
    return value


def _array(value: object, low: int, high: int, what: str, refuse: Refuse) -> Int32:
    if not isinstance(value, list):
        refuse(f"{what}s are not a list of whole numbers")
    for number in value:
        if type(number) is not int or not low <= number <= high:
            refuse(f"{what} {str(number)[:40]} is not a whole number from {low} to {high}")
    return np.array(value, np.int32)
