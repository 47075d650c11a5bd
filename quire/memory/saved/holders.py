"""What sequences and checkpoints hold, apart from any pool: numbers, and the bytes of pages.

Pages are numbered in the order in which they are met, each once however many hold it, so what is
shared stays shared. Who may append to a shared page follows from who holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import AttentionLayout, Int32
from quire.memory.groups.state_layout import StateLayout
from quire.memory.groups.state_table import StateTable
from quire.memory.groups.table import HOLE, Table
from quire.memory.pages.pool import PagePool
from quire.memory.saved.tables import AnyTable, Refuse, from_numbers, to_numbers

MAX_SEQ = 2**31 - 1
"""Pools note who may append to a page with int32."""


@dataclass(frozen=True)
class Held:
    """One holder of pages, and its table in each group."""

    seq: int
    """The sequence, or the one that a checkpoint was taken of."""
    name: str | None
    """Of a checkpoint; None for a sequence."""
    tables: dict[str, AnyTable]
    kept: Mapping[str, Any]
    """In groups that are left out: what a sequence must hold there to go with the rest."""

    @property
    def end(self) -> int:
        """Where it goes on; the same in every group."""
        ends = [table.next_position for table in self.tables.values()]
        ends += [kept["next"] for kept in self.kept.values()]
        return max(ends)


class Snapshot:
    """Takes down what is held; valid while somebody holds it, for pages are not copied."""

    def __init__(self, groups: Sequence[AnyGroup], left_out: Sequence[AnyGroup]) -> None:
        self._groups = groups
        self._left_out = left_out
        self._numbers: dict[str, dict[int, int]] = {p.name: {} for p in pools_of(groups)}
        self.sequences: list[dict[str, object]] = []
        self.checkpoints: list[dict[str, object]] = []

    def add_sequence(self, seq: int, tables: Mapping[str, AnyTable]) -> None:
        """A sequence as it is now, with its table in each group."""
        kept = {group.name: signature(tables[group.name]) for group in self._left_out}
        self.sequences.append({"seq": seq, "tables": self._written(tables), "kept": kept})

    def add_checkpoint(self, name: str, seq: int, tables: Mapping[str, AnyTable]) -> None:
        """A checkpoint that was taken of a sequence."""
        self.checkpoints.append({"seq": seq, "name": name, "tables": self._written(tables)})

    def _written(self, tables: Mapping[str, AnyTable]) -> dict[str, object]:
        return {
            group.name: to_numbers(
                tables[group.name], [self._numbered(pool.name) for pool in group.pools]
            )
            for group in self._groups
        }

    def _numbered(self, pool: str) -> Callable[[int], int]:
        numbers = self._numbers[pool]
        return lambda page: numbers.setdefault(page, len(numbers))

    def pages(self, pool: PagePool) -> list[NDArray[np.uint8]]:
        """The bytes of a pool's pages in the order of their numbers."""
        return pool.bytes.read(list(self._numbers[pool.name]))


def pools_of(groups: Iterable[AnyGroup]) -> list[PagePool]:
    """All pools, in order."""
    return [pool for group in groups for pool in group.pools]


def describe(group: AnyGroup) -> dict[str, object]:
    """All that decides what the bytes of a page mean."""
    layout = group.layout
    described: dict[str, object] = {
        field.name: getattr(layout.spec, field.name) for field in fields(layout.spec)
    }
    described["layers"] = list(layout.spec.layers)
    if isinstance(layout, StateLayout) and layout.spec.parts is not None:
        described["parts"] = list(astuple(layout.spec.parts))
    if isinstance(layout, AttentionLayout):
        described["reuse"] = {str(k): v for k, v in layout.spec.reuse.items()}
        described |= {"type_k": layout.type_k.value, "type_v": layout.type_v.value}
        described["page_tokens"] = layout.page_tokens
    described["bytes"] = f"{sys.byteorder}-endian, {group.device.page_layout}"
    return described


def signature(table: AnyTable) -> dict[str, object]:
    """Which positions a table of full attention holds."""
    assert isinstance(table, Table)
    positions = table.position_array()
    live = np.sort(positions[positions != HOLE]).astype("<i4")
    return {
        "next": table.next_position,
        "digest": blake2b(live.tobytes(), digest_size=32).hexdigest(),
    }


# -- reading --------------------------------------------------------------------------------------


def parse_holders(
    groups: Sequence[AnyGroup], left_out: Sequence[AnyGroup], state: object,
    n_pages: Mapping[str, int], refuse: Refuse,
) -> list[Held]:  # fmt: skip
    """Sequences, then checkpoints, with pages by their numbers in the file; all of it checked."""
    if not isinstance(state, dict) or state.keys() != {"sequences", "checkpoints"}:
        refuse("it does not say which sequences and checkpoints it has")
    held: list[Held] = []
    for label, wanted in (
        ("sequences", {"seq", "tables", "kept"}),
        ("checkpoints", {"seq", "name", "tables"}),
    ):
        if not isinstance(state[label], list):
            refuse(f"its {label} are not a list")
        for entry in state[label]:
            if not isinstance(entry, dict) or entry.keys() != wanted:
                refuse(f"one of its {label} has not the fields {sorted(wanted)}")
            held.append(_holder(groups, left_out, entry, n_pages, refuse))
    ids = [h.seq for h in held if h.name is None]
    names = [h.name for h in held if h.name is not None]
    if len(set(ids)) != len(ids) or len(set(names)) != len(names):
        refuse("a sequence or a checkpoint is in it twice")
    _check_states(held, refuse)
    return held


def _holder(
    groups: Sequence[AnyGroup], left_out: Sequence[AnyGroup], entry: dict[str, Any],
    n_pages: Mapping[str, int], refuse: Refuse,
) -> Held:  # fmt: skip
    seq, name, tables, kept = (
        entry["seq"],
        entry.get("name"),
        entry["tables"],
        entry.get("kept", {}),
    )
    if type(seq) is not int or not 0 <= seq < MAX_SEQ:
        refuse(f"a sequence has the id {str(seq)[:40]}; ids are whole numbers below {MAX_SEQ}")
    if "name" in entry and not isinstance(name, str):
        refuse("the name of a checkpoint is not text")
    if not isinstance(tables, dict) or tables.keys() != {group.name for group in groups}:
        refuse("a sequence or checkpoint has not one table in each group")
    if "kept" in entry and not _is_kept(entry["kept"], left_out):
        refuse("a sequence does not say what it holds in the groups that are left out")
    made = {
        group.name: from_numbers(
            group, tables[group.name], [n_pages[pool.name] for pool in group.pools], refuse
        )
        for group in groups
    }
    ends = {table.next_position for table in made.values()}
    if len(ends | {value["next"] for value in kept.values()}) > 1:
        refuse(f"sequence {seq} does not end at the same position in all groups")
    return Held(seq, name, made, kept)


def _is_kept(kept: object, left_out: Sequence[AnyGroup]) -> bool:
    """Whether this has a `signature` for each group that is left out."""
    if not isinstance(kept, dict) or kept.keys() != {group.name for group in left_out}:
        return False
    kinds = {"next": int, "digest": str}
    return all(
        isinstance(value, dict) and {key: type(of) for key, of in value.items()} == kinds
        for value in kept.values()
    )


def _check_states(held: Iterable[Held], refuse: Refuse) -> None:
    """A state page is of one position, whoever holds it, and a log page follows one state."""
    states: dict[tuple[str, int], int] = {}
    logs: dict[tuple[str, int], tuple[int, int]] = {}
    for one in held:
        for group, table in one.tables.items():
            if not isinstance(table, StateTable):
                continue
            place = (table.state, table.position)
            if table.state >= 0 and states.setdefault((group, table.state), place[1]) != place[1]:
                refuse(f"state {table.state} of group {group!r} is said to be of two positions")
            if table.log >= 0 and logs.setdefault((group, table.log), place) != place:
                refuse(f"log {table.log} of group {group!r} is said to follow two states")


@dataclass(frozen=True)
class Sharing:
    """Who holds the pages of a pool, as `PagePool` counts it."""

    refs: Int32
    frozen: Int32
    appender: Int32


def sharing(group: AnyGroup, pool: PagePool, held: Iterable[Held], n: int) -> Sharing:
    """The counts for pages 0 … n-1 of a file.

    Of those who hold a page the sequence that sees most of it may append: what it alone sees is
    above what the others see, and that is `frozen`.
    """
    holders = [
        (one.seq if one.name is None else -1, *group.held_pages(pool, one.tables[group.name]))
        for one in held
    ]
    refs, frozen, most = (np.zeros(n, np.int32) for _ in range(3))
    appender: Int32 = np.full(n, -1, np.int32)
    for seq, pages, seen in holders:
        refs[pages] += 1
        if seq >= 0:
            ahead = seen > most[pages]
            most[pages[ahead]], appender[pages[ahead]] = seen[ahead], seq
    for seq, pages, seen in holders:
        other = (appender[pages] != seq) | (seq < 0)
        frozen[pages[other]] = np.maximum(frozen[pages[other]], seen[other])
    return Sharing(refs, frozen, appender)
