"""What a kind of memory has to say: its tables, and how they grow, are cut and shared.

`Memory` keeps sequences, checkpoints and parked tables of all groups. A group never knows whose a
table is but for the id that marks who may append to a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.devices.device import Device, PageWork
from quire.memory.groups.layout import AttentionLayout, Int32
from quire.memory.groups.state_layout import StateLayout
from quire.memory.groups.views import View
from quire.memory.pages.demand import Demand
from quire.memory.pages.pool import PagePool
from quire.memory.pages.reserved import ReservedPages

if TYPE_CHECKING:
    from quire.memory.batch import NewTokens
    from quire.memory.stats import GroupStats

Int64 = NDArray[np.int64]
Change = Callable[[Int64], Int64]
"""New positions from old ones."""


class AnyTable(Protocol):
    """What one sequence holds in one group, whatever the kind."""

    @property
    def length(self) -> int:
        """0 when it holds nothing."""

    @property
    def next_position(self) -> int:
        """Where new tokens go."""

    def copy(self) -> Self:
        """The same pages in a table of its own; nobody's references are counted."""


T = TypeVar("T", bound=AnyTable)
Wanted = tuple[int, T, int]
"""A sequence, its table, and how many new tokens it gets."""
Holding = tuple[Int32, Int32]
"""Pages of a pool that somebody holds, and how many slots of each are seen."""


class GroupAppend(ABC, Generic[T]):
    """New tokens at the ends of tables of one group, with pages set aside for all of them.

    `apply` puts one micro-batch in; then `keep` or `undo` settles it, and the next may follow.
    `close` gives back what is left.
    """

    reserved: tuple[ReservedPages, ...]

    @abstractmethod
    def apply(self, part: Sequence[Wanted[T]], new: NewTokens, work: PageWork) -> View:
        """Puts new tokens in and says what pages need first; `undo` takes it back anywhere."""

    def check(self, accepted: Mapping[int, int]) -> None:
        """Raises RequestError if this kind cannot keep so many tokens of each sequence."""

    @abstractmethod
    def keep(self, accepted: Mapping[int, int]) -> None:
        """Keeps the first tokens of each sequence, by number, and drops the rest."""

    @abstractmethod
    def undo(self) -> None:
        """Makes everything as it was before `apply`."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what is set aside."""


class GroupUpdate(ABC):
    """Pending work on all tables of a group, with pages set aside for it."""

    reserved: tuple[ReservedPages, ...]

    @abstractmethod
    def phases(self) -> Iterator[PageWork]:
        """Work to be run, part after part; tables show one when the next is asked for."""

    def close(self) -> None:
        """Gives back what is set aside."""
        for reserved in self.reserved:
            reserved.give_back()


class Group(ABC, Generic[T]):
    """The layers of a model that share one kind of memory, over one or two pools."""

    layout: AttentionLayout | StateLayout
    pools: tuple[PagePool, ...]
    device: Device
    can_shift: bool
    """Whether positions can move."""
    room_for_draft: int
    """The most new tokens of which a step can keep any number."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        return self.layout.spec.name

    @property
    def kind(self) -> str:
        """attention, window or recurrent."""
        return self.layout.spec.kind

    # -- tables and their holders ---------------------------------------------------------------

    @abstractmethod
    def empty(self) -> T:
        """The table of a sequence without tokens."""

    @abstractmethod
    def share(self, table: T, seq: int) -> None:
        """One more holder of a table's pages; where there was one, `seq` is who may append."""

    @abstractmethod
    def let_go(self, table: T) -> None:
        """One holder less of a table's pages."""

    def exchange(self, old: T, new: T, seq: int) -> None:
        """Lets go of a table of `seq` and takes hold of another."""
        self.let_go(old)
        self.share(new, seq)

    @abstractmethod
    def held_pages(self, pool: PagePool, table: T) -> Holding:
        """The pages of one pool that a table holds, and how many slots of each it sees."""

    @abstractmethod
    def repaged(self, table: T, pages: Sequence[Int32]) -> T:
        """A table that lies in other pages, given those of each pool."""

    @abstractmethod
    def faults(self, table: T) -> list[str]:
        """What is wrong with a table by itself."""

    # -- growing --------------------------------------------------------------------------------

    @abstractmethod
    def most_pages(self, n_seqs: int, n_tokens: int) -> Demand:
        """Pages that so many tokens more, in so many sequences, take at most."""

    @abstractmethod
    def least_pages(self, n_tokens: int) -> Demand:
        """Pages that a sequence of so many tokens holds at least, in each pool."""

    @abstractmethod
    def demand(self, wanted: Sequence[Wanted[T]]) -> Demand:
        """Pages that it takes exactly."""

    @abstractmethod
    def append(self, parts: Sequence[Sequence[Wanted[T]]]) -> GroupAppend[T]:
        """Room for these micro-batches, one after the other; or OutOfMemory, nothing changed."""

    def check_ready(self, seq: int, table: T) -> None:
        """Refuses to append to a table that is not ready for it."""

    @abstractmethod
    def full_view(self) -> View:
        """One sequence that holds every page."""

    def update(self, tables: Sequence[T], optimize: bool) -> GroupUpdate | None:
        """Room for what is pending on tables, None for nothing; or OutOfMemory."""
        return None

    def update_demand(self, tables: Sequence[T], optimize: bool, gone: T | None) -> Demand:
        """Pages that `update` takes, once a checkpoint's table is gone."""
        return []

    @abstractmethod
    def grow(self) -> None:
        """Has as many pages as the device's budget can pay for now, if nobody set a cap."""

    @abstractmethod
    def trim(self, n_seqs: int) -> None:
        """Gives back what is idle; a kind may keep what so many sequences will want at once."""

    # -- cutting and joining --------------------------------------------------------------------

    @abstractmethod
    def can_remove(self, table: T, p0: int, p1: int) -> bool:
        """Whether a table without these positions can be represented."""

    @abstractmethod
    def remove(self, table: T, p0: int, p1: int) -> None:
        """Removes positions from a table that can do without them."""

    @abstractmethod
    def part(self, source: T, target: T, p0: int, p1: int) -> T:
        """A table with these positions of `source`, to go into `target`; or RequestError."""

    @abstractmethod
    def join(self, target: T, part: T, seq: int) -> None:
        """Takes hold of part of `seq`'s table and adds it to a table that holds something else."""

    @abstractmethod
    def shifted(self, table: T, p0: int, p1: int, change: Change) -> Any:
        """What moving these positions comes to, for `shift`; RequestError if it cannot be."""

    @abstractmethod
    def shift(self, table: T, shifted: Any) -> None:
        """Moves positions."""

    @abstractmethod
    def first_position(self, table: T) -> int:
        """The smallest position that a table holds, which has some."""

    # -- figures --------------------------------------------------------------------------------

    @abstractmethod
    def stats(
        self, tables: Sequence[T], parked: Mapping[str, Sequence[Holding]]
    ) -> dict[str, GroupStats]:
        """Figures by pool, given every table, and what parked sequences still hold by pool."""


AnyGroup = Group[Any]
