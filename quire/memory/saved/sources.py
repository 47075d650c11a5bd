"""Which groups of a file the layers of each group of a memory come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import AttentionLayout
from quire.memory.groups.state_layout import StateLayout
from quire.memory.saved.convert import Conversion, same_but_order
from quire.memory.saved.format import Container, is_counts
from quire.memory.saved.holders import describe

PAGES = "pages "
_PLACE = {"name", "layers", "reuse"}
"""What groups of one kind may differ in."""


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


class Sources:
    """The groups of a file, by the group here that has layers of them."""

    def __init__(self, container: Container, groups: Sequence[AnyGroup]) -> None:
        """Refuses groups that are not made of the same layers, or whose bytes mean other things."""
        self._container = container
        self.of: dict[str, list[Saved]] = {}
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
        for group in ours:
            mine = set(group.layout.spec.layers)
            self.of[group.name] = [one for one in saved if mine & set(one.layers)]

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

    def count_pages(self, groups: Sequence[AnyGroup]) -> None:
        """Counts the pages of groups that are written; refuses tensors of another shape or name."""
        container, names = self._container, set()
        for one in self.written(groups):
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

    def written(self, groups: Iterable[AnyGroup]) -> list[Saved]:
        """The groups of the file that these are made of."""
        return list(dict.fromkeys(one for group in groups for one in self.of[group.name]))


def _one_layer(layout: AttentionLayout | StateLayout) -> AttentionLayout | StateLayout:
    """The layout of a page with one such layer: what a page has of each."""
    if isinstance(layout, StateLayout):
        return StateLayout(replace(layout.spec, layers=(0,)))
    return replace(layout, spec=replace(layout.spec, layers=(0,), reuse={}))
