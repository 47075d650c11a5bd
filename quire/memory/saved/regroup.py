"""Saved groups of layers as the groups of another memory: the same bytes, layer by layer.

Layers of one kind are one group on each device they are on, so another plan has other groups:

    file     attention on cpu [0 1]       attention on cuda:0 [2 3]
    memory   attention on cpu [0]         attention on cuda:0 [1 2 3]
                                                │
    page 5 here = layer 1 of page 2 of the first + layers 2, 3 of page 4 of the second

Groups of one kind grow in step, so their tables say the same but for the numbers of pages. A page
here stands for one page of each group that its layers come from. Only devices that fold logs at
positions have states elsewhere: those are brought to the end, each with its own log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from quire.memory.groups.group import AnyGroup
from quire.memory.groups.state_layout import StateLayout
from quire.memory.saved.convert import Bytes
from quire.memory.saved.format import Container
from quire.memory.saved.fresh import folded
from quire.memory.saved.sources import PAGES, Saved, Sources

Apart: TypeAlias = dict[tuple[str, str, int, int], Bytes]
"""Pages of the file that are not put together yet: its group, the one here, pool, page here."""
_NUMBERS = {"pages": 0, "state": 0, "log": 1}
"""Fields of tables that name pages, and of which pool."""


class Behind(NamedTuple):
    """A state in one group of the file and the log behind it, by their pages."""

    state: int
    log: int
    entries: int


class Regrouping:
    """How the pages and tables of a file become those of these groups."""

    def __init__(self, container: Container, groups: Sequence[AnyGroup]) -> None:
        """Refuses groups that are not made of the same layers, or whose bytes mean other things."""
        self._container = container
        self._from = Sources(container, groups)
        self._wanted: dict[str, dict[tuple[int, ...] | tuple[Behind, ...], int]] = {}
        self._apart: Apart = {}

    # -- tables -----------------------------------------------------------------------------------

    def tables(
        self, state: Any, groups: Sequence[AnyGroup], left_out: Sequence[AnyGroup]
    ) -> tuple[Any, dict[str, int]]:
        """The same tables by these groups, and how many pages of each pool they name."""
        self._from.count_pages(groups)
        self._wanted = {pool.name: {} for group in groups for pool in group.pools}
        entries = []
        if isinstance(state, dict):
            lists = [state.get(label) for label in ("sequences", "checkpoints")]
            entries = [entry for each in lists if isinstance(each, list) for entry in each]
        for entry in entries:
            if isinstance(entry, dict):
                entry["tables"] = self._joined(entry.get("tables"), groups)
                if "kept" in entry:
                    entry["kept"] = self._kept(entry["kept"], left_out)
        self._check_held(groups)
        counts = {pool: len(pages) for pool, pages in self._wanted.items()}
        return state, counts

    def _joined(self, tables: Any, groups: Sequence[AnyGroup]) -> dict[str, Any]:
        names = {one.name for one in self._from.written(groups)}
        if not isinstance(tables, dict) or tables.keys() != names:
            self._container.refuse("a sequence or checkpoint has not one table in each group")
        return {group.name: self._table(group, tables) for group in groups}

    def _table(self, group: AnyGroup, tables: dict[str, Any]) -> dict[str, Any]:
        """One table of several that say the same but for their pages."""
        sources = self._from.of[group.name]
        parts = [tables[one.name] for one in sources]
        first = parts[0]
        if not all(isinstance(part, dict) and part.keys() == first.keys() for part in parts):
            self._container.refuse(f"tables of group {group.name!r} are of several kinds")
        if group.kind == "recurrent" and any(p["position"] != first["position"] for p in parts):
            return self._at_end(group, parts)
        made = {}
        for key, value in first.items():
            values = [part[key] for part in parts]
            if key in _NUMBERS:
                made[key] = self._numbered(group, _NUMBERS[key], values)
            elif all(each == value for each in values):
                made[key] = value
            else:
                names = " and ".join(repr(one.name) for one in sources)
                self._container.refuse(
                    f"{key} of a table is {str(values)[:80]} in its groups {names}, which are one "
                    "group here"
                )
        return made

    def _at_end(self, group: AnyGroup, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """A table of states that were left at several positions, with all their tokens in them."""
        assert isinstance(group.layout, StateLayout)
        behind, ends, most = [], set(), group.layout.log_tokens
        for one, part in zip(self._from.of[group.name], parts, strict=True):
            found = Behind(part["state"], part["log"], part["log_length"])
            position = part["position"]
            whole = all(type(number) is int for number in (*found, position))
            if not whole or not all(-1 <= found[i] < one.counts[i] for i in (0, 1)):
                self._container.refuse(f"a table of group {one.name!r} names pages it has not")
            if (found.state < 0) != (position == 0) or (found.log < 0) != (found.entries == 0):
                self._container.refuse(f"a table of group {one.name!r} has not the pages it needs")
            if position < 0 or not 0 <= found.entries <= most:
                self._container.refuse(f"a table of group {one.name!r} has a log that cannot be")
            behind.append(found)
            ends.add(position + found.entries)
        if len(ends) != 1:
            self._container.refuse("a sequence does not end at the same position in all groups")
        numbers = self._wanted[group.pools[0].name]
        number = numbers.setdefault(tuple(behind), len(numbers))
        return {"state": number, "position": ends.pop(), "log": -1, "log_length": 0}

    def _numbered(self, group: AnyGroup, pool: int, values: list[Any]) -> Any:
        """Pages of several groups as pages of one: of lists one after the other."""
        if isinstance(values[0], list):
            if not all(isinstance(each, list) and len(each) == len(values[0]) for each in values):
                self._container.refuse(f"tables of group {group.name!r} are not equally long")
            return [self._number(group, pool, pages) for pages in zip(*values, strict=True)]
        return -1 if values == [-1] * len(values) else self._number(group, pool, tuple(values))

    def _number(self, group: AnyGroup, pool: int, pages: tuple[Any, ...]) -> int:
        for one, page in zip(self._from.of[group.name], pages, strict=True):
            if type(page) is not int or not 0 <= page < one.counts[pool]:
                self._container.refuse(
                    f"page {str(page)[:40]} is not a whole number from 0 to {one.counts[pool] - 1}"
                )
        numbers = self._wanted[group.pools[pool].name]
        return numbers.setdefault(pages, len(numbers))

    def _kept(self, kept: Any, left_out: Sequence[AnyGroup]) -> Any:
        """What a sequence must hold in groups that are left out: the same in those of one kind."""
        names = {one.name for one in self._from.written(left_out)}
        if not isinstance(kept, dict) or kept.keys() != names:
            self._container.refuse(
                "a sequence does not say what it holds in the groups that are left out"
            )
        made = {}
        for group in left_out:
            values = [kept[one.name] for one in self._from.of[group.name]]
            if any(each != values[0] for each in values):
                self._container.refuse("a sequence holds other positions in groups of one kind")
            made[group.name] = values[0]
        return made

    def _check_held(self, groups: Sequence[AnyGroup]) -> None:
        """Refuses pages that nobody holds."""
        for one in self._from.written(groups):
            for pool, count in enumerate(one.counts):
                if len(self._used(one, pool, groups)) != count:
                    self._container.refuse(f"it has pages of {one.pools[pool]} that nobody holds")

    def _used(
        self, one: Saved, pool: int, groups: Iterable[AnyGroup]
    ) -> dict[int, list[tuple[AnyGroup, int, bool]]]:
        """By page of the file: the pages here that have something of it, and if behind a fold."""
        used: dict[int, list[tuple[AnyGroup, int, bool]]] = {}
        for group in groups:
            if one in self._from.of[group.name]:
                at = self._from.of[group.name].index(one)
                for pages, number in self._wanted[group.pools[pool].name].items():
                    if not isinstance(page := pages[at], Behind):
                        used.setdefault(page, []).append((group, number, False))
                for parts, number in self._merges(group):
                    used.setdefault(parts[at][pool], []).append((group, number, True))
        used.pop(-1, None)
        return used

    def _merges(self, group: AnyGroup) -> list[tuple[tuple[Behind, ...], int]]:
        """States that are put together of several positions, and their pages here."""
        items = self._wanted[group.pools[0].name].items()
        return [
            (parts, number)
            for pages, number in items
            if (parts := tuple(page for page in pages if isinstance(page, Behind)))
        ]

    # -- pages ------------------------------------------------------------------------------------

    def fill(self, groups: Sequence[AnyGroup], arrays: Mapping[str, list[Bytes]]) -> None:
        """Reads the file's pages into these, by pool; states of several positions stay apart."""
        for one in self._from.written(groups):
            for at, name in enumerate(one.pools):
                pages = self._scattered(one, at, groups, arrays)
                self._container.read_into(PAGES + name, pages)

    def merge(self, groups: Sequence[AnyGroup], arrays: Mapping[str, list[Bytes]]) -> None:
        """Puts states of several positions together; the device brings them to the end."""
        for group in groups:
            for parts, number in self._merges(group):
                self._merge(group, parts, number, arrays[group.pools[0].name][number])

    def _scattered(
        self, one: Saved, pool: int, groups: Sequence[AnyGroup], arrays: Mapping[str, list[Bytes]]
    ) -> Iterator[Bytes]:
        """Pages to be filled one by one: each is spread out when the next is asked for."""
        used = self._used(one, pool, groups)
        size = one.sizes[pool]
        for number in range(one.counts[pool]):
            page: Bytes = np.empty(size * len(one.layers), np.uint8)
            yield page
            for group, into, folds in used[number]:
                if folds:
                    target: Bytes = np.zeros(group.pools[pool].page_bytes, np.uint8)
                    self._apart[one.name, group.name, pool, into] = target
                else:
                    target = arrays[group.pools[pool].name][into]
                layers, convert = group.layout.spec.layers, one.conversions[group.name].pages[pool]
                for source, layer in zip(page.reshape(-1, size), one.layers, strict=True):
                    if layer in layers:
                        convert(source, target.reshape(len(layers), -1)[layers.index(layer)])

    def _merge(self, group: AnyGroup, parts: tuple[Behind, ...], number: int, into: Bytes) -> None:
        """A state of which each layer is brought to the end by its own log."""
        layers = group.layout.spec.layers
        for one, part in zip(self._from.of[group.name], parts, strict=True):
            state, log = (self._apart.get((one.name, group.name, pool, number)) for pool in (0, 1))
            if log is not None:
                raw = one.conversions[group.name].raw_only
                state = folded(group, state, log, part.entries, raw)
            assert state is not None, "a table that is not empty has a state or a log"
            for i, layer in enumerate(layers):
                if layer in one.layers:
                    into.reshape(len(layers), -1)[i] = state.reshape(len(layers), -1)[i]

    def incomplete(self, group: AnyGroup) -> bool:
        """Whether logs of this group lack what its device derives from raw inputs."""
        return any(one.conversions[group.name].raw_only for one in self._from.of[group.name])
