"""A device: bytes under one budget, operations on them, and the work that pages need.

Memory keeps books; a device keeps bytes. It is asked for ranges of pages (`backing`), told what
to do with pages by their ids (`run`), and knows alone where they lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.devices.budget import Budget
from quire.devices.copier import Copier
from quire.ops import Array, Draw, Drawn, Ops
from quire.ops.batch import GroupPages

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]
Ids = Int32 | NDArray[np.intp] | list[int]


class PageWork:
    """Four kinds of work, each run in one call, in this order:

        moves ──▶ copies ──▶ folds ──▶ rotations

    What a step needs (copies, folds) writes fresh pages that nobody holds yet, so undoing it is
    forgetting. Only an update may move or rotate in place, in pages that nobody else holds.
    """

    __slots__ = ("copies", "folds", "moves", "rotations")

    def __init__(self) -> None:
        self.moves: dict[str, list[Int32]] = {}
        """By group: rows of from_page, from_slot, to_page, to_slot, to be done in order."""
        self.copies: dict[str, list[tuple[int, int]]] = {}
        """By pool: a page, and the page it is copied to."""
        self.folds: dict[str, list[tuple[int, int, int, int]]] = {}
        """By group: state page (-1: the zero state), log page, entries, state page to write."""
        self.rotations: dict[str, list[tuple[int, Int32]]] = {}
        """By group: a page, and by how many positions the K of each of its slots moves."""

    def __bool__(self) -> bool:
        return bool(self.copies or self.folds or self.moves or self.rotations)

    def clear(self) -> None:
        """All of it is done."""
        for kind in (self.moves, self.copies, self.folds, self.rotations):
            kind.clear()

    def copy(self, pool: str, source: int, target: int) -> None:
        """A whole page is to be copied."""
        self.copies.setdefault(pool, []).append((source, target))

    def fold(self, group: str, state_in: int, log: int, entries: int, state_out: int) -> None:
        """A log is to become part of a state."""
        self.folds.setdefault(group, []).append((state_in, log, entries, state_out))

    def rotate(self, group: str, page: int, deltas: Int32) -> None:
        """Stored keys are to be turned on."""
        self.rotations.setdefault(group, []).append((page, deltas))

    def move(self, group: str, rows: Int32) -> None:
        """Tokens are to be copied from slot to slot: [n, 4]."""
        self.moves.setdefault(group, []).append(rows)


class Backing(ABC):
    """The bytes behind the pages of one pool: one range of addresses, memory where it is needed.

    Memory is handed out and taken back in the device's *granules*, which need not be as large as
    a page.
    """

    base: int
    """Where page 0 starts, as the device's kernels address it."""
    gives_back: bool
    """Whether memory that was taken can be given back before `close`."""
    copier: Copier | None = None
    """What copies its pages by itself, on devices that have memory of their own."""

    @abstractmethod
    def back(self, low: int, high: int) -> None:
        """Granules low … high-1 get memory; MemoryError, and nothing changed, if there is none."""

    @abstractmethod
    def give_back(self, low: int, high: int) -> None:
        """Granules low … high-1 return their memory to the system; what they held is gone."""

    @abstractmethod
    def read(self, pages: Ids) -> list[Bytes]:
        """The bytes of pages on the host, to read; valid while somebody holds these pages."""

    @abstractmethod
    def writing(self, pages: Ids) -> AbstractContextManager[list[Bytes]]:
        """Arrays to be filled with the bytes of pages; they are there when the block is left."""

    @abstractmethod
    def fill(self, pages: Ids, byte: int) -> None:
        """Every byte of these pages becomes this one."""

    @abstractmethod
    def close(self) -> None:
        """Returns everything."""


Rotate = Callable[[int, Any, Int32, Int32], None]
"""rotate(base, layout, pages, deltas): K of slot i of pages[j], in all layers, by deltas[j, i]."""
Move = Callable[[int, Any, Int32, Int32, Int32, Int32], None]
"""move(base, layout, from_pages, from_slots, to_pages, to_slots): copies K and V of tokens."""
Fold = Callable[[int, int, Any, Int32, Int32, Int32, Int32], None]
"""fold(state_base, log_base, layout, state_in, log, n_entries, state_out), by ids of pages.

Replays the raw inputs of entries 0 … n-1 of each log one by one, in float32, on the state in page
`state_in` (-1: the zero state) and writes the result to page `state_out`, in all layers."""


Derive = Callable[[int, int, Any, Int32, Int32, Int32], None]
"""derive(state_base, log_base, layout, state_in, log, n_entries), by ids of pages.

Computes what the first entries of logs have besides raw inputs, which are all that is there."""


@dataclass(frozen=True)
class GroupKernels:
    """What can be done with the pages of one group, besides computing tokens with them.

    Without `rotate` positions cannot move, without `move` holes are not closed; a recurrent group
    needs `fold`.
    """

    rotate: Rotate | None = None
    move: Move | None = None
    fold: Fold | None = None
    derive: Derive | None = None


@dataclass(frozen=True)
class Bound:
    """A group of layers on a device: its layout, its kernels, and where its pages lie."""

    layout: Any
    kernels: GroupKernels
    bases: tuple[int, ...]
    """Where the pages of each of its pools start."""


Draws = Sequence[Draw | None]
"""How the token behind each row is chosen; None: nobody wants it."""


class Steps(Protocol):
    """Whole steps of a model on a device that computes behind its host's back."""

    @property
    def seconds_per_token(self) -> float:
        """Of prompts so far; 0 before there was one."""

    @property
    def replayed(self) -> bool:
        """Whether the last step was like one before, so that its arrays took no more memory."""

    def forget(self) -> bool:
        """Lets go of what was recorded, which is recorded again then; False if nothing was."""

    def run(
        self, tokens: Int32, positions: Int32, seq_rows: Int32, views: Mapping[str, Any],
        rows: Int32, draws: Draws, sources: Int32 | None, x: Array | None = None,
    ) -> tuple[Array, Drawn] | None:  # fmt: skip
        """Logits of rows, and the tokens that follow them; None where it has to be run plainly.

        Logits are valid until the next step; where a draw edits those of its row, they may be
        edited. A token with a source (not -1) is the one that the step before chose for that row,
        and its sampler has not seen it yet. x is what comes from layers that are elsewhere.
        """


class Device(ABC):
    """One place that computes. Its pools are told apart by name, and so are its groups."""

    granularity: int
    """Bytes of a granule: what is handed out and taken back."""
    capacity: int
    """Bytes it has in all, whoever holds them."""
    ahead = 0
    """Bytes of pages that are taken before they are needed, where taking them is slow."""
    copier: Copier | None = None
    """What copies its pages by itself, if it has memory of its own."""

    def __init__(self, name: str, budget: Budget, ops: Ops) -> None:
        self.name = name
        self.budget = budget
        self.ops = ops
        self.backings: dict[str, Backing] = {}
        self._page_bytes: dict[str, int] = {}
        self._groups: dict[str, Bound] = {}

    @property
    def page_layout(self) -> str:
        """How bytes lie in pages: state saved with one layout is not read as another."""
        return self.ops.page_layout

    def backing(self, pool: str, page_bytes: int, max_pages: int, demand_paged: bool) -> Backing:
        """A range for the pages of a pool; not demand paged, all its memory is taken at once."""
        assert pool not in self.backings, f"there is a pool {pool!r} already"
        made = self._backing(page_bytes, max_pages, demand_paged)
        self.backings[pool] = made
        self._page_bytes[pool] = page_bytes
        return made

    @abstractmethod
    def _backing(self, page_bytes: int, max_pages: int, demand_paged: bool) -> Backing:
        """The range itself; MemoryError if the system refuses it."""

    def drop_backing(self, pool: str) -> None:
        """Returns a pool's range to the system."""
        self.backings.pop(pool).close()

    def bind(
        self, group: str, layout: object, kernels: GroupKernels, pools: tuple[str, ...]
    ) -> None:
        """Says how the pages of a group are worked on."""
        bases = tuple(self.backings[pool].base for pool in pools)
        self._groups[group] = Bound(layout, kernels, bases)

    # -- work on pages --------------------------------------------------------------------------

    def run(self, work: PageWork) -> None:
        """Does what is to be done with pages of this device, one call for each kind and group."""
        for group, moved in work.moves.items():
            if bound := self._groups.get(group):
                self._move(bound, np.concatenate(moved))
        for pool, copied in work.copies.items():
            if backing := self.backings.get(pool):
                sources, targets = _columns(copied)
                self.ops.copy_pages(backing.base, self._page_bytes[pool], sources, targets)
        for group, folded in work.folds.items():
            if bound := self._groups.get(group):
                self._fold(bound, _columns(folded))
        for group, turned in work.rotations.items():
            if bound := self._groups.get(group):
                self._rotate(bound, turned)

    def _move(self, bound: Bound, rows: Int32) -> None:
        assert bound.kernels.move is not None
        columns = np.ascontiguousarray(rows.T)
        bound.kernels.move(bound.bases[0], bound.layout, *columns)

    def _fold(self, bound: Bound, columns: Int32) -> None:
        assert bound.kernels.fold is not None
        states, logs = bound.bases
        bound.kernels.fold(states, logs, bound.layout, *columns)

    def _rotate(self, bound: Bound, turned: list[tuple[int, Int32]]) -> None:
        assert bound.kernels.rotate is not None
        pages = np.array([page for page, _ in turned], np.int32)
        deltas = np.stack([deltas for _, deltas in turned])
        bound.kernels.rotate(bound.bases[0], bound.layout, pages, deltas)

    def derive(self, group: str, rows: list[tuple[int, int, int]]) -> None:
        """Completes logs that have raw inputs alone: state page, log page and entries of each."""
        bound = self._groups[group]
        if bound.kernels.derive is not None:
            states, logs = bound.bases
            bound.kernels.derive(states, logs, bound.layout, *_columns(rows))

    # -- what kernels of a step see ---------------------------------------------------------------

    def steps(self, model: Any, first: int = 0) -> Steps | None:
        """Whole steps of a model, where the device is told of them and works on its own.

        Or what is left of them from a layer on.
        """
        return None

    def bound(self, group: str) -> Bound:
        """A group of this device."""
        return self._groups[group]

    def group(self, name: str, view: Any, positions: Int32, seq_rows: Int32) -> GroupPages:
        """A group's memory in a step: its view by ids becomes what kernels take."""
        bound = self.bound(name)
        layout = bound.layout
        pages: Any
        if layout.spec.kind == "recurrent":
            states, logs = bound.bases
            pages = self.ops.states(view, states, logs, seq_rows)
        else:
            pages = self.ops.pages(view, bound.bases[0], positions, seq_rows)
        return GroupPages(pages, layout.by_layer)


def _columns(rows: list[tuple[int, ...]] | Any) -> Int32:
    """Rows of numbers as contiguous columns."""
    return np.ascontiguousarray(np.array(rows, np.int32).T)
