"""Steps and batches as their callers see them, over any kind of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.errors import OutOfMemory, RequestError
from quire.memory.batch import check_entries, split_batch
from quire.memory.interface import (
    Appends,
    Lease,
    MemoryContext,
    MicroBatch,
    SeqTokens,
    Status,
)

Prepare = Callable[[Sequence[Sequence[SeqTokens]]], Appends]
"""`Memory.prepare` of some memory."""


class AppendLease(Lease):
    """One step's new tokens."""

    def __init__(self, prepare: Prepare, entries: Sequence[SeqTokens]) -> None:
        check_entries(entries)
        self._counts = {seq: len(tokens) for seq, tokens in entries}
        self._appends = prepare([entries])
        self._open = False
        try:
            self.ubatch = self._appends.apply(entries)
            self._open = True
        finally:
            if not self._open:
                self._appends.close()

    def commit(self, accepted: Mapping[int, int]) -> None:
        if not self._open:
            raise RequestError("a lease is committed once; this one has ended")
        for seq, count in self._counts.items():
            if not 0 <= accepted.get(seq, -1) <= count:
                raise RequestError(
                    f"commit needs 0 to {count} tokens to keep for sequence {seq}; "
                    f"it got {accepted.get(seq, 'no entry')}"
                )
        if len(accepted) != len(self._counts):
            raise RequestError(
                f"commit names the sequences {sorted(accepted)}; the lease is of {self.seqs}"
            )
        self._appends.check(accepted)
        self._open = False
        self._appends.keep(accepted)
        self._appends.close()

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._appends.undo()
            self._appends.close()


class BatchContext(MemoryContext):
    """A batch in micro-batches; room for all of them is set aside from the start."""

    def __init__(self, prepare: Prepare, batch: Sequence[SeqTokens], n_ubatch: int) -> None:
        self._parts = split_batch(batch, n_ubatch)
        check_entries(batch)
        self._at = 0
        self._ubatch: MicroBatch | None = None
        self._appends: Appends | None = None
        self.status = Status.SUCCESS
        try:
            self._appends = prepare(self._parts)
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
            self._ubatch = self._appends.apply(self._parts[self._at])
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

    def next(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing was set aside."""


class IdleContext(MemoryContext):
    """No work is pending."""

    status = Status.NO_UPDATE

    @property
    def ubatch(self) -> MicroBatch:
        raise RequestError("an update has no micro-batch; it works on what memory holds already")

    def apply(self) -> None:
        raise RequestError("there is nothing to apply: no update is pending")

    def next(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing was set aside."""
