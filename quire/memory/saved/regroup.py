"""Saved groups of layers as the groups of another memory: the same bytes, layer by layer.

Layers of one kind are one group on each device they are on, so another plan has other groups:

    file     attention on cpu [0 1]       attention on cuda:0 [2 3]
    memory   attention on cpu [0]         attention on cuda:0 [1 2 3]
                                                │
    page 5 here = layer 1 of page 2 of the first + layers 2, 3 of page 4 of the second

Groups of one kind grow in step, so their tables say the same but for the numbers of pages. A page
here stands for one page of each group that its layers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import AttentionLayout
from quire.memory.groups.state_layout import StateLayout
from quire.memory.saved.convert import Bytes, Conversion, same_but_order
from quire.memory.saved.format import Container, is_counts
from quire.memory.saved.holders import describe

PAGES = "pages "
_PLACE = {"name", "layers", "reuse"}
"""What groups of one kind may differ in."""
_NUMBERS = {"pages": 0, "state": 0, "log": 1}
"""Fields of tables that name pages, and of which pool."""


def kind_name(group: str) -> str:
    """What a group is called, whatever device it is on."""
    return group.partition(" on ")[0]


@dataclass(frozen=True, eq=False)
class Saved:
    """A group of the file."""

    name: str
    layers: list[int]
    fields: Mapping[str, Any]
    pools: list[str]
    conversions: Mapping[str, Conversion]
    """What one layer of a page becomes, by the group that it goes to."""
    counts: list[int] = field(default_factory=list)
    """Pages of each pool."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of one layer in a page of each pool."""
        return next(iter(self.conversions.values())).sizes


class Regrouping:
    """How the pages and tables of a file become those of these groups."""

    def __init__(self, container: Container, groups: Sequence[AnyGroup]) -> None:
        """Refuses groups that are not made of the same layers, or whose bytes mean other things."""
        self._container = container
        self._saved: list[Saved] = []
        self._sources: dict[str, list[Saved]] = {}
        self._wanted: dict[str, dict[tuple[int, ...], int]] = {}
        layout = container.json(container.metadata.get("layout", ""))
        kinds = dict.fromkeys(kind_name(group.name) for group in groups)
        known = isinstance(layout, dict) and all(isinstance(each, dict) for each in layout.values())
        if not known or {kind_name(name) for name in layout} != kinds.keys():
            names = ", ".join(group.name for group in groups)
            container.refuse(f"it has other groups of layers than this model's {names}")
        for kind in kinds:
            ours = [group for group in groups if kind_name(group.name) == kind]
            theirs = {name: each for name, each in layout.items() if kind_name(name) == kind}
            self._match(ours, theirs)

    def _match(self, ours: list[AnyGroup], theirs: dict[str, dict[str, Any]]) -> None:
        """Finds where the layers of each group of a kind come from."""
        saved = [self._described(ours, name, fields) for name, fields in theirs.items()]
        here = [layer for group in ours for layer in group.layout.spec.layers]
        there = [layer for one in saved for layer in one.layers]
        reused: dict[str, Any] = {}
        for group in ours:
            reused |= describe(group).get("reuse", {})  # type: ignore[call-overload]
        again: dict[str, Any] = {}
        for one in saved:
            again |= one.fields.get("reuse", {})
        if sorted(here) != sorted(there) or reused != again:
            self._refuse("layers", saved[0].name, there, here)
        self._saved += saved
        for group in ours:
            mine = set(group.layout.spec.layers)
            self._sources[group.name] = [one for one in saved if mine & set(one.layers)]

    def _described(self, ours: list[AnyGroup], name: str, theirs: dict[str, Any]) -> Saved:
        """A group of the file, if it is like these but for its layers and device."""
        layers, reuse = theirs.get("layers"), theirs.get("reuse", {})
        if not is_counts(layers, 1 << 16) or not isinstance(reuse, dict):
            self._container.refuse(f"group {name!r} does not say which layers it has")
        conversions = {group.name: self._conversion(group, name, theirs) for group in ours}
        recurrent = ours[0].kind == "recurrent"
        pools = [f"{name} state", f"{name} log"] if recurrent else [name]
        return Saved(name, list(layers or ()), theirs, pools, conversions)

    def _conversion(self, group: AnyGroup, name: str, theirs: dict[str, Any]) -> Conversion:
        fields = describe(group)
        if theirs.keys() != fields.keys():
            self._container.refuse(f"group {name!r} is of another kind in it")
        same = {key: theirs[key] if key in _PLACE else value for key, value in fields.items()}
        why = ""
        if same_but_order(same, theirs):
            try:
                return Conversion(_one_layer(group.layout), fields, theirs)
            except ValueError as error:
                why = f" ({error})"
        key = next(key for key, value in same.items() if theirs[key] != value)
        self._refuse(key, name, theirs[key], fields[key], why)

    def _refuse(self, key: str, name: str, theirs: object, ours: object, why: str = "") -> NoReturn:
        self._container.refuse(
            f"it has another layout: {key} of group {name!r} is {str(theirs)[:100]} in the "
            f"file and {ours} here{why}"
        )

    # -- what the file has ------------------------------------------------------------------------

    def count_pages(self, groups: Sequence[AnyGroup]) -> None:
        """Counts the pages of groups that are written; refuses tensors of another shape or name."""
        container, names = self._container, set()
        for one in self._written(groups):
            for pool, size in zip(one.pools, one.sizes, strict=True):
                place = container.tensors.get(PAGES + pool)
                whole = size * len(one.layers)
                if place is None or place.dtype != "U8" or place.shape[1:] != (whole,):
                    container.refuse(f"it has no pages of {pool!r} of {whole} bytes each")
                one.counts.append(place.shape[0])
                names.add(PAGES + pool)
        others = [name for name in container.tensors if not name.startswith("extra ")]
        if len(others) != len(names):
            container.refuse(f"it has tensors that do not belong there: {others[:5]}")

    def _written(self, groups: Iterable[AnyGroup]) -> list[Saved]:
        """The groups of the file that these are made of."""
        return list(dict.fromkeys(one for group in groups for one in self._sources[group.name]))

    # -- tables -----------------------------------------------------------------------------------

    def tables(
        self, state: Any, groups: Sequence[AnyGroup], left_out: Sequence[AnyGroup]
    ) -> tuple[Any, dict[str, int]]:
        """The same tables by these groups, and how many pages of each pool they name."""
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
        counts = {pool: len(pages) for pool, pages in self._wanted.items()}
        self._check_held(groups)
        return state, counts

    def _joined(self, tables: Any, groups: Sequence[AnyGroup]) -> dict[str, Any]:
        if not isinstance(tables, dict) or tables.keys() != {o.name for o in self._written(groups)}:
            self._container.refuse("a sequence or checkpoint has not one table in each group")
        return {group.name: self._table(group, tables) for group in groups}

    def _table(self, group: AnyGroup, tables: dict[str, Any]) -> dict[str, Any]:
        """One table of several that say the same but for their pages."""
        sources = self._sources[group.name]
        parts = [tables[one.name] for one in sources]
        first = parts[0]
        if not all(isinstance(part, dict) and part.keys() == first.keys() for part in parts):
            self._container.refuse(f"tables of group {group.name!r} are of several kinds")
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
                    "group here; open it with the devices it was saved with, or compute it again"
                )
        return made

    def _numbered(self, group: AnyGroup, pool: int, values: list[Any]) -> Any:
        """Pages of several groups as pages of one: of lists one after the other."""
        if isinstance(values[0], list):
            if not all(isinstance(each, list) and len(each) == len(values[0]) for each in values):
                self._container.refuse(f"tables of group {group.name!r} are not equally long")
            return [self._number(group, pool, pages) for pages in zip(*values, strict=True)]
        return -1 if values == [-1] * len(values) else self._number(group, pool, tuple(values))

    def _number(self, group: AnyGroup, pool: int, pages: tuple[Any, ...]) -> int:
        for one, page in zip(self._sources[group.name], pages, strict=True):
            if type(page) is not int or not 0 <= page < one.counts[pool]:
                self._container.refuse(
                    f"page {str(page)[:40]} is not a whole number from 0 to {one.counts[pool] - 1}"
                )
        numbers = self._wanted[group.pools[pool].name]
        return numbers.setdefault(pages, len(numbers))

    def _kept(self, kept: Any, left_out: Sequence[AnyGroup]) -> Any:
        """What a sequence must hold in groups that are left out: the same in those of one kind."""
        if not isinstance(kept, dict) or kept.keys() != {o.name for o in self._written(left_out)}:
            self._container.refuse(
                "a sequence does not say what it holds in the groups that are left out"
            )
        made = {}
        for group in left_out:
            values = [kept[one.name] for one in self._sources[group.name]]
            if any(each != values[0] for each in values):
                self._container.refuse("a sequence holds other positions in groups of one kind")
            made[group.name] = values[0]
        return made

    def _check_held(self, groups: Sequence[AnyGroup]) -> None:
        """Refuses pages that nobody holds."""
        for one in self._written(groups):
            for pool, count in enumerate(one.counts):
                if len(self._used(one, pool, groups)) != count:
                    self._container.refuse(f"it has pages of {one.pools[pool]} that nobody holds")

    def _used(
        self, one: Saved, pool: int, groups: Iterable[AnyGroup]
    ) -> dict[int, list[tuple[AnyGroup, int]]]:
        """By page of the file: the pages here that have something of it."""
        used: dict[int, list[tuple[AnyGroup, int]]] = {}
        for group in groups:
            if one in self._sources[group.name]:
                at = self._sources[group.name].index(one)
                for pages, number in self._wanted[group.pools[pool].name].items():
                    used.setdefault(pages[at], []).append((group, number))
        return used

    # -- pages ------------------------------------------------------------------------------------

    def fill(self, groups: Sequence[AnyGroup], ids: Mapping[str, Any]) -> None:
        """Reads the file's pages into pages of these ids, by pool."""
        with ExitStack() as stack:
            arrays: dict[str, list[Bytes]] = {}
            for group in groups:
                for pool in group.pools:
                    into = stack.enter_context(pool.bytes.writing(ids[pool.name]))
                    arrays[pool.name] = into
            for one in self._written(groups):
                for at, name in enumerate(one.pools):
                    pages = self._scattered(one, at, groups, arrays)
                    self._container.read_into(PAGES + name, pages)

    def _scattered(
        self, one: Saved, pool: int, groups: Sequence[AnyGroup], arrays: Mapping[str, list[Bytes]]
    ) -> Iterator[Bytes]:
        """Pages to be filled one by one: each is spread out when the next is asked for."""
        used = self._used(one, pool, groups)
        size = one.sizes[pool]
        for number in range(one.counts[pool]):
            page: Bytes = np.empty(size * len(one.layers), np.uint8)
            yield page
            for group, into in used[number]:
                target = arrays[group.pools[pool].name][into]
                layers, convert = group.layout.spec.layers, one.conversions[group.name].pages[pool]
                for source, layer in zip(page.reshape(-1, size), one.layers, strict=True):
                    if layer in layers:
                        convert(source, target.reshape(len(layers), -1)[layers.index(layer)])

    def incomplete(self, group: AnyGroup) -> bool:
        """Whether logs of this group lack what its device derives from raw inputs."""
        return any(one.conversions[group.name].raw_only for one in self._sources[group.name])


def _one_layer(layout: AttentionLayout | StateLayout) -> AttentionLayout | StateLayout:
    """The layout of a page with one such layer: what a page has of each."""
    if isinstance(layout, StateLayout):
        return StateLayout(replace(layout.spec, layers=(0,)))
    return replace(layout, spec=replace(layout.spec, layers=(0,), reuse={}))
