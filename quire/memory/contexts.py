"""Work that is prepared, and done part by part: `init_batch`, `init_full` and `init_update`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from quire.errors import OutOfMemory, RequestError
from quire.memory.batch import MicroBatch, SeqTokens, split_batch
from quire.memory.groups.group import GroupUpdate
from quire.memory.lease import AppendTransaction, check_entries
from quire.memory.pages.reserved import ReservedPages
from quire.memory.status import Status

if TYPE_CHECKING:
    from quire.memory.books import Books


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

    def next(self) -> bool:
        """Moves on to the next part; False when there is none."""
        return False

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


class BatchContext(MemoryContext):
    """A batch in micro-batches; room for all of them is set aside from the start."""

    def __init__(self, memory: Books, batch: Sequence[SeqTokens], n_ubatch: int) -> None:
        self._parts = split_batch(batch, n_ubatch)
        check_entries(batch)
        self._at = 0
        self._ubatch: MicroBatch | None = None
        self._appends: AppendTransaction | None = None
        self.status = Status.SUCCESS
        try:
            self._appends = AppendTransaction(memory, self._parts)
        except OutOfMemory as error:
            self.status, self.error = Status.FAILED_PREPARE, error

    @property
    def ubatch(self) -> MicroBatch:
        if self._ubatch is None:
            raise RequestError("this micro-batch is not in memory yet; apply() puts it there")
        return self._ubatch

    def apply(self) -> None:
        if self._appends is None or self._ubatch is not None:
            raise RequestError(f"there is nothing to apply: {self.error or 'next() comes first'}")
        try:
            self._ubatch = self._appends.apply(self._at)
        except BaseException:
            self.status = Status.FAILED_COMPUTE
            self.close()
            raise

    def next(self) -> bool:
        self._settle()
        self._at += 1
        if self._at < len(self._parts) and self._appends is not None:
            return True
        self.close()
        return False

    def close(self) -> None:
        self._settle()
        if self._appends is not None:
            appends, self._appends = self._appends, None
            appends.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """A micro-batch whose computing failed goes; those before it stay."""
        if error is not None and self._ubatch is not None and self._appends is not None:
            self._ubatch = None
            self._appends.undo()
        self.close()

    def _settle(self) -> None:
        """What was applied has been computed, and stays."""
        if self._ubatch is not None:
            self._ubatch = None
            if self._appends is not None:
                self._appends.keep({seq: len(t) for seq, t in self._parts[self._at]})


class FullContext(MemoryContext):
    """Pretends that memory is full; changes nothing."""

    status = Status.SUCCESS

    def __init__(self, ubatch: MicroBatch) -> None:
        self._ubatch = ubatch

    @property
    def ubatch(self) -> MicroBatch:
        return self._ubatch

    def apply(self) -> None:
        """Nothing to do: the point is the sizes in `ubatch`."""

    def close(self) -> None:
        """Nothing was set aside."""


class UpdateContext(MemoryContext):
    """Pending work, group by group: holes are closed, then keys are turned.

    It changes no content, only where and how it is stored: what fails is still pending, and is
    done later.
    """

    def __init__(self, memory: Books, optimize: bool) -> None:
        self._memory = memory
        self._updates: list[GroupUpdate] = []
        memory.begin(self, ())
        self._open = True
        try:
            for group, tables in memory.tables_by_group():
                if update := group.update(tables, optimize):
                    self._updates.append(update)
            self.status = Status.SUCCESS if self._updates else Status.NO_UPDATE
        except OutOfMemory as error:
            self.status, self.error = Status.FAILED_PREPARE, error
        except BaseException:
            self.close()
            raise
        if self.status is not Status.SUCCESS:
            self.close()

    @property
    def reserved(self) -> list[ReservedPages]:
        """Pages that are set aside."""
        return [reserved for update in self._updates for reserved in update.reserved]

    @property
    def ubatch(self) -> MicroBatch:
        raise RequestError("an update has no micro-batch; it works on what memory holds already")

    def apply(self) -> None:
        """Has the devices do it, then lets the tables show it, one group after the other."""
        if self.status is not Status.SUCCESS or not self._open:
            raise RequestError(f"there is nothing to apply: {self.error or 'no update is pending'}")
        try:
            for update in self._updates:
                for work in update.phases():
                    self._memory.run(work)
            self.status = Status.NO_UPDATE
        except BaseException:
            self.status = Status.FAILED_COMPUTE
            raise
        finally:
            self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            for update in self._updates:
                update.close()
            self._memory.end(())
