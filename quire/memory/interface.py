"""The one interface of every kind of memory, and what travels through it.

The method names are those of llama.cpp's `llama_memory_i`. Ranges of positions are half open;
a negative start means 0 and a negative end means "to the end".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self, TypedDict

import numpy as np

from quire.memory.checkpoint import Checkpoints
from quire.memory.layout import AttentionLayout, Int32
from quire.memory.pool import PagePool, fit_together
from quire.memory.saved import Extra, Found, StateFlags, StateRead
from quire.memory.state_layout import Part, StateView
from quire.memory.tiers import Tier


class Status(Enum):
    """How preparing or applying a context went."""

    SUCCESS = "success"
    NO_UPDATE = "no update"
    FAILED_PREPARE = "failed prepare"
    FAILED_COMPUTE = "failed compute"

    @property
    def is_fail(self) -> bool:
        """Whether the context cannot be used."""
        return self in (Status.FAILED_PREPARE, Status.FAILED_COMPUTE)


def status_combine(a: Status, b: Status) -> Status:
    """The status of two parts together: the first failure, else whether either has work."""
    for status in (a, b):
        if status.is_fail:
            return status
    return a if a is Status.SUCCESS else b


class SeqTokens(NamedTuple):
    """New tokens for the end of a sequence; their positions follow from what it holds."""

    seq: int
    tokens: Int32


@dataclass(slots=True)
class PageView:
    """A group of attention layers as the kernels of one micro-batch see it; valid until the next.

    Row s belongs to the micro-batch's s-th sequence. Its slot i lies in page
    `tables[s, i // page_tokens]`; entries behind its last page are -1.
    """

    address: int
    page_bytes: int
    page_tokens: int
    layout: AttentionLayout
    tables: Int32
    """[n_seqs, max_pages] page ids."""
    first: Int32
    """[n_seqs] position of slot 0, where slot_positions does not say otherwise."""
    length: Int32
    """[n_seqs] slots, the new tokens' included."""
    slots: Int32
    """[n_tokens] page * page_tokens + slot in the page, where each new token goes."""
    slot_positions: Int32 | None
    """[n_seqs, max_slots] position by slot, -1 for none; None while all slots count up."""

    @property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Offsets of K and V in a page for each layer of the group that stores them."""
        return self.layout.offsets

    def part(self, part: Part) -> PageView:
        """What the kernels see when only a part of the new tokens is computed."""
        seqs, positions = part.seqs, self.slot_positions
        return PageView(
            self.address, self.page_bytes, self.page_tokens, self.layout, self.tables[seqs],
            self.first[seqs], self.length[seqs] - part.behind, self.slots[part.tokens],
            None if positions is None else positions[seqs],
        )  # fmt: skip


@dataclass(slots=True)
class MicroBatch:
    """Tokens that are computed together, and the memory they read and write."""

    tokens: Int32
    positions: Int32
    seq_rows: Int32
    """The row in `seqs`, and in every view, that each token belongs to."""
    seqs: list[int]
    views: dict[str, PageView | StateView]

    @property
    def counts(self) -> Int32:
        """How many new tokens each sequence has."""
        return np.bincount(self.seq_rows, minlength=len(self.seqs)).astype(np.int32)

    def part(self, seqs: Int32, starts: Int32, counts: Int32) -> MicroBatch:
        """`counts[i]` of the new tokens of the sequence in row `seqs[i]`, from `starts[i]` on.

        Those before must have been computed in the layers that this part is run through.
        """
        whole = self.counts
        rows = np.repeat(np.arange(len(seqs), dtype=np.int32), counts)
        ahead = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = ((np.cumsum(whole) - whole)[seqs] + starts)[rows] + ahead
        part = Part(seqs, tokens, starts, whole[seqs] - starts - counts)
        views = {name: view.part(part) for name, view in self.views.items()}
        ids = [self.seqs[i] for i in seqs.tolist()]
        return MicroBatch(self.tokens[tokens], self.positions[tokens], rows, ids, views)


class GroupStats(TypedDict):
    """Figures of one group. Sharing never makes a token smaller, so each is a number of its own."""

    pages_used: int
    pages_free: int
    """Pages that could be taken now; the budget may allow fewer than the pool has."""
    pages_shared: int
    """Pages with two holders or more."""
    tokens_used: int
    """Slots that hold a token somebody can see."""
    tokens_held: int
    """Slots of all pages in use."""
    bytes_per_token: int
    bytes_used: int
    bytes_held: int
    bytes_wasted: int
    """Bytes held for no token."""
    waste_percent: float
    bytes_unshared: int
    """What would be held if every holder had its own copy."""
    bytes_committed: int
    """What the pool takes from the budget."""


class MemoryContext(ABC):
    """Work that is prepared: `apply` does it, one micro-batch at a time; `next` moves on.

    A context holds the pages it will need until it is applied or closed, and no other operation
    may change the memory meanwhile. Use it in a `with` block, or walk it to the end.
    """

    status: Status
    error: Exception | None = None
    """Why `status` is a failure."""

    @property
    @abstractmethod
    def ubatch(self) -> MicroBatch:
        """The micro-batch that was applied last."""

    @abstractmethod
    def apply(self) -> None:
        """Does this part of the work; the only thing that changes what memory holds."""

    @abstractmethod
    def next(self) -> bool:
        """Moves on to the next part; False when there is none."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what was set aside and not applied."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


class Appends(ABC):
    """New tokens at the ends of sequences of one memory, with room set aside for all of them.

    `apply` puts one micro-batch in; then `keep` or `undo` settles it, and the next may follow.
    `close` gives back what is left. Leases and contexts are made of this, and so is a hybrid.
    """

    @abstractmethod
    def apply(self, entries: Sequence[SeqTokens]) -> MicroBatch:
        """Puts new tokens in; an exception leaves everything as it was."""

    @abstractmethod
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
        """Gives back what is set aside; memory is idle again."""


class Lease(ABC):
    """What one step has reserved: committed once, or everything back when the block is left."""

    ubatch: MicroBatch

    @property
    def tokens(self) -> Int32:
        """The new tokens of all sequences, one after the other."""
        return self.ubatch.tokens

    @property
    def positions(self) -> Int32:
        """The position of each new token."""
        return self.ubatch.positions

    @property
    def seq_rows(self) -> Int32:
        """The row in `seqs`, and in every view, that each token belongs to."""
        return self.ubatch.seq_rows

    @property
    def seqs(self) -> list[int]:
        """The sequences, row by row."""
        return self.ubatch.seqs

    @property
    def views(self) -> dict[str, PageView | StateView]:
        """Each group's memory for the kernels."""
        return self.ubatch.views

    @abstractmethod
    def commit(self, accepted: Mapping[int, int]) -> None:
        """Keeps the first `accepted[seq]` new tokens of each sequence and drops the rest."""

    @abstractmethod
    def abort(self) -> None:
        """Makes everything as it was; does nothing after `commit`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.abort()


class Returning(ABC):
    """A parked sequence on its way back: everything is in place, nothing has changed yet."""

    @abstractmethod
    def finish(self) -> None:
        """It is back, and its room in the tier is free."""

    @abstractmethod
    def cancel(self) -> None:
        """It stays parked."""


class Memory(ABC):
    """What all kinds of memory can do."""

    can_shift: bool
    """Whether `seq_add` and `seq_div` are possible."""
    checkpoints: Checkpoints[Any]
    """All checkpoints by name, and how long it took to save, restore and delete them."""

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Layers of the model that read this memory."""

    @property
    @abstractmethod
    def seqs(self) -> list[int]:
        """Ids of all sequences, in ascending order."""

    @abstractmethod
    def check_idle(self) -> None:
        """Raises RequestError while a lease or a context is open."""

    def fits(self, counts: Iterable[tuple[int, int]]) -> bool:
        """Whether (sequence, number of new tokens), all together, could be reserved now."""
        return fit_together(self.demand(list(counts)))

    @abstractmethod
    def demand(self, counts: Sequence[tuple[int, int]]) -> list[tuple[PagePool, int]]:
        """The pages that reserving (sequence, number of new tokens) takes, by pool.

        For a parked sequence it is a bound: the pages it takes to bring it back are in it.
        """

    @abstractmethod
    def room_for_draft(self, seq: int) -> int:
        """The most new tokens of which a step can keep any number; `fits` says if there is room."""

    @abstractmethod
    def prepare(self, parts: Sequence[Sequence[SeqTokens]]) -> Appends:
        """Room for these micro-batches, one after the other; or OutOfMemory, nothing changed."""

    @abstractmethod
    def reserve(self, entries: Sequence[SeqTokens]) -> Lease:
        """Room for one step, or PagesError/BudgetError and nothing changed."""

    @abstractmethod
    def init_batch(
        self, batch: Sequence[SeqTokens], n_ubatch: int, embd_all: bool = False
    ) -> MemoryContext:
        """Micro-batches of at most n_ubatch tokens, with room set aside for all of them.

        `embd_all` (every token's output is wanted) is for kinds that split differently then.
        """

    @abstractmethod
    def init_full(self) -> MemoryContext:
        """A context that pretends one sequence holds every page; applying it changes nothing."""

    @abstractmethod
    def init_update(self, optimize: bool = False) -> MemoryContext:
        """Pending work: rotating K that moved; with `optimize`, closing holes as well."""

    @abstractmethod
    def clear(self, data: bool) -> None:
        """Forgets all sequences and checkpoints; `data` also wipes bytes that stay committed."""

    @abstractmethod
    def seq_new(self) -> int:
        """The lowest sequence id nobody uses, now in use."""

    @abstractmethod
    def seq_free(self, seq: int) -> None:
        """Removes a sequence and frees its id."""

    @abstractmethod
    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Removes positions (seq < 0: of every sequence); False, and no change, if it cannot."""

    @abstractmethod
    def can_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Whether `seq_rm` would remove these positions."""

    @abstractmethod
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Shares positions of one sequence with another, which must not hold any of them."""

    @abstractmethod
    def check_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Raises RequestError if `seq_cp` would; changes nothing."""

    @abstractmethod
    def seq_keep(self, seq: int) -> None:
        """Empties every other sequence."""

    @abstractmethod
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Moves positions by delta; K is rotated by the next `init_update`."""

    @abstractmethod
    def check_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Raises RequestError if `seq_add` would; changes nothing."""

    @abstractmethod
    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divides positions, rounding down; K is rotated by the next `init_update`."""

    @abstractmethod
    def check_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Raises RequestError if `seq_div` would; changes nothing."""

    @abstractmethod
    def seq_pos_min(self, seq: int) -> int:
        """The smallest position a sequence holds, -1 when it is empty."""

    @abstractmethod
    def seq_pos_max(self, seq: int) -> int:
        """The largest position a sequence holds, -1 when it is empty."""

    @abstractmethod
    def park_bytes(self, seq: int) -> int:
        """Bytes that parking a sequence would move and free: what nobody else holds."""

    @abstractmethod
    def park(self, seq: int, tier: Tier) -> None:
        """Moves a sequence's own pages to a tier; until `unpark` it only has positions."""

    def unpark(self, seq: int) -> None:
        """Brings a parked sequence back; or an error, and it stays parked."""
        self.returning(seq).finish()

    @abstractmethod
    def returning(self, seq: int) -> Returning:
        """A parked sequence with its pages read back, about to be unparked."""

    @abstractmethod
    def checkpoint_supported(self) -> bool:
        """Whether checkpoints can be taken."""

    @abstractmethod
    def checkpoint_save(self, seq: int, name: str | None = None) -> str:
        """Keeps a sequence as it is now under a name (made up if None); moves no bytes."""

    @abstractmethod
    def checkpoint_restore(self, seq: int, name: str) -> None:
        """Makes a sequence what the checkpoint holds; the checkpoint stays."""

    @abstractmethod
    def checkpoint_delete(self, name: str) -> None:
        """Forgets a checkpoint and frees what nobody else holds."""

    @abstractmethod
    def checkpoint_to_bytes(self, name: str, model: str = "") -> bytes:
        """A checkpoint for another process or device; copies every page it holds."""

    @abstractmethod
    def checkpoint_from_bytes(self, data: bytes, name: str | None = None, model: str = "") -> str:
        """A new checkpoint, in pages of its own, of what `checkpoint_to_bytes` made; its name.

        Without a name it gets the one it had, or one that is made up where that is taken.
        """

    @abstractmethod
    def state_write(
        self, io: BinaryIO, seq: int = -1, flags: StateFlags = StateFlags.WHOLE, *,
        checkpoints: Sequence[str] = (), model: str = "", extra: Extra | None = None,
    ) -> None:  # fmt: skip
        """Writes a sequence and the checkpoints named; or (-1) all sequences and checkpoints.

        `model` says whose state it is. A partial state has no checkpoints.
        """

    @abstractmethod
    def state_read(
        self, io: BinaryIO, seq: int = -1, flags: StateFlags = StateFlags.WHOLE, *,
        model: str = "", source: str = "saved state",
        check: Callable[[Found], None] | None = None,
    ) -> StateRead:  # fmt: skip
        """Reads what `state_write` wrote: one sequence into `seq`, which is new or empty, or all.

        A partial state goes to sequences that hold the same positions in full attention. `check`
        may raise before anything is changed; `source` is the name for errors. SessionFileError,
        OutOfMemory or RequestError leave memory as it was.
        """

    @abstractmethod
    def checkpoint_pages(self, names: Collection[str]) -> dict[str, int]:
        """How many pages these checkpoints hold together, by group as in `stats`."""

    @abstractmethod
    def memory_breakdown(self) -> dict[str, dict[str, int]]:
        """Committed bytes by device and use; they add up to what is really held."""

    @abstractmethod
    def stats(self) -> dict[str, GroupStats]:
        """Figures by group."""

    @abstractmethod
    def audit(self) -> None:
        """Raises AuditError with every conservation law that does not hold."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; the memory is of no use afterwards."""
