"""Several kinds of memory for the layers of one model, in step with each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from time import perf_counter_ns
from typing import Any

from quire.errors import ModelError, RequestError
from quire.memory.audit import AuditError
from quire.memory.checkpoint import Checkpoint, Checkpoints
from quire.memory.interface import (
    Appends,
    GroupStats,
    Lease,
    Memory,
    MemoryContext,
    MicroBatch,
    PageView,
    Returning,
    SeqTokens,
    Status,
    status_combine,
)
from quire.memory.lease import AppendLease, BatchContext, FullContext
from quire.memory.pool import PagePool
from quire.memory.sequences import SequenceMemory
from quire.memory.state_io import SavedState
from quire.memory.state_layout import StateView
from quire.memory.tiers import Tier


class HybridMemory(SavedState):
    """Parts of any kind that always hold the same sequences, positions and checkpoints.

    Whatever only some parts might refuse is asked of all of them first, so a refusal changes
    nothing. What all of them refuse alike, the first one refuses before any has changed.
    """

    def __init__(self, parts: Sequence[Memory]) -> None:
        self.parts = tuple(parts)
        names = [name for part in parts for name in part.stats()]
        if len(set(names)) != len(names) or not parts:
            raise ModelError(f"groups need names of their own; they are {names}")
        assert len({id(pool.budget) for pool, _ in self.demand([])}) == 1, "one budget for all"
        self.can_shift = all(part.can_shift for part in parts)
        self.checkpoints: Checkpoints[None] = Checkpoints()

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(layer for part in self.parts for layer in part.layers))

    @property
    def leaves(self) -> tuple[SequenceMemory[Any], ...]:
        leaves = [part for part in self.parts if isinstance(part, SequenceMemory)]
        assert len(leaves) == len(self.parts), "a hybrid has no hybrids as parts"
        return tuple(leaves)

    @property
    def seqs(self) -> list[int]:
        return self.parts[0].seqs

    def check_idle(self) -> None:
        for part in self.parts:
            part.check_idle()

    # -- steps ----------------------------------------------------------------------------------

    def demand(self, counts: Sequence[tuple[int, int]]) -> list[tuple[PagePool, int]]:
        return [wanted for part in self.parts for wanted in part.demand(counts)]

    def room_for_draft(self, seq: int) -> int:
        return min(part.room_for_draft(seq) for part in self.parts)

    def prepare(self, parts: Sequence[Sequence[SeqTokens]]) -> Appends:
        ready: list[Appends] = []
        try:
            for part in self.parts:
                ready.append(part.prepare(parts))
        except BaseException:
            for appends in reversed(ready):
                appends.close()
            raise
        return HybridAppends(ready)

    def reserve(self, entries: Sequence[SeqTokens]) -> Lease:
        return AppendLease(self.prepare, entries)

    def init_batch(
        self, batch: Sequence[SeqTokens], n_ubatch: int, embd_all: bool = False
    ) -> MemoryContext:
        return BatchContext(self.prepare, batch, n_ubatch)

    def init_full(self) -> MemoryContext:
        return FullContext(_together([part.init_full().ubatch for part in self.parts]))

    def init_update(self, optimize: bool = False) -> MemoryContext:
        self.check_idle()
        contexts: list[MemoryContext] = []
        try:
            for part in self.parts:
                contexts.append(part.init_update(optimize))
        except BaseException:
            for context in contexts:
                context.close()
            raise
        return HybridUpdate(contexts)

    # -- sequences ------------------------------------------------------------------------------

    def clear(self, data: bool) -> None:
        self.check_idle()
        self.checkpoints.by_name.clear()
        for part in self.parts:
            part.clear(data)

    def seq_new(self) -> int:
        self.check_idle()
        ids = {part.seq_new() for part in self.parts}
        assert len(ids) == 1, "parts hold the same sequences"
        return ids.pop()

    def seq_free(self, seq: int) -> None:
        self.check_idle()
        for part in self.parts:
            part.seq_free(seq)

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        self.check_idle()
        if not self.can_rm(seq, p0, p1):
            return False
        for part in self.parts:
            done = part.seq_rm(seq, p0, p1)
            assert done, "a part that can remove positions does"
        return True

    def can_rm(self, seq: int, p0: int, p1: int) -> bool:
        return all(part.can_rm(seq, p0, p1) for part in self.parts)

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self.check_idle()
        self.check_cp(src, dst, p0, p1)
        for part in self.parts:
            part.seq_cp(src, dst, p0, p1)

    def check_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        for part in self.parts:
            part.check_cp(src, dst, p0, p1)

    def seq_keep(self, seq: int) -> None:
        self.check_idle()
        for part in self.parts:
            part.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.check_idle()
        self.check_add(seq, p0, p1, delta)
        for part in self.parts:
            part.seq_add(seq, p0, p1, delta)

    def check_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        for part in self.parts:
            part.check_add(seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self.check_idle()
        self.check_div(seq, p0, p1, divisor)
        for part in self.parts:
            part.seq_div(seq, p0, p1, divisor)

    def check_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        for part in self.parts:
            part.check_div(seq, p0, p1, divisor)

    def seq_pos_min(self, seq: int) -> int:
        """A position is there when all parts hold it."""
        return max(part.seq_pos_min(seq) for part in self.parts)

    def seq_pos_max(self, seq: int) -> int:
        return self.parts[0].seq_pos_max(seq)

    # -- tiers ----------------------------------------------------------------------------------

    def park_bytes(self, seq: int) -> int:
        return sum(part.park_bytes(seq) for part in self.parts)

    def park(self, seq: int, tier: Tier) -> None:
        self.check_idle()
        tier.check(self.park_bytes(seq))  # so that only a failing disk is found out in the middle
        done: list[Memory] = []
        try:
            for part in self.parts:
                part.park(seq, tier)
                done.append(part)
        except BaseException:
            for part in done:
                part.unpark(seq)  # the pages it needs were freed just now
            raise

    def returning(self, seq: int) -> Returning:
        self.check_idle()
        ready: list[Returning] = []
        try:
            for part in self.parts:
                ready.append(part.returning(seq))
        except BaseException:
            for returning in ready:
                returning.cancel()
            raise
        return HybridReturning(ready)

    # -- checkpoints ----------------------------------------------------------------------------

    def checkpoint_supported(self) -> bool:
        return all(part.checkpoint_supported() for part in self.parts)

    def checkpoint_save(self, seq: int, name: str | None = None) -> str:
        self.check_idle()
        start = perf_counter_ns()
        name = self.checkpoints.new_name(name)
        for part in self.parts:
            part.checkpoint_save(seq, name)
        self.checkpoints.by_name[name] = Checkpoint(name, seq, None)
        self.checkpoints.timings["save"].add(perf_counter_ns() - start)
        return name

    def checkpoint_restore(self, seq: int, name: str) -> None:
        self.check_idle()
        start = perf_counter_ns()
        for part in self.parts:
            part.checkpoint_restore(seq, name)
        self.checkpoints.timings["restore"].add(perf_counter_ns() - start)

    def checkpoint_delete(self, name: str) -> None:
        self.check_idle()
        start = perf_counter_ns()
        for part in self.parts:
            part.checkpoint_delete(name)
        del self.checkpoints.by_name[name]
        self.checkpoints.timings["delete"].add(perf_counter_ns() - start)

    # -- figures --------------------------------------------------------------------------------

    def checkpoint_pages(self, names: Collection[str]) -> dict[str, int]:
        return {pool: n for part in self.parts for pool, n in part.checkpoint_pages(names).items()}

    def memory_breakdown(self) -> dict[str, dict[str, int]]:
        whole: dict[str, dict[str, int]] = {}
        for part in self.parts:
            for device, sizes in part.memory_breakdown().items():
                whole.setdefault(device, {}).update(sizes)
        return whole

    def stats(self) -> dict[str, GroupStats]:
        return {name: figures for part in self.parts for name, figures in part.stats().items()}

    def audit(self) -> None:
        wrong: list[str] = []
        for part in self.parts:
            try:
                part.audit()
            except AuditError as error:
                wrong.append(str(error))
            if part.seqs != self.seqs:
                wrong.append(f"parts hold the sequences {self.seqs} and {part.seqs}")
        for seq in self.seqs:
            ends = [part.seq_pos_max(seq) for part in self.parts]
            if len(set(ends)) > 1:
                wrong.append(f"sequence {seq} ends at {ends} in the parts")
        if wrong:
            raise AuditError("; ".join(wrong))

    def close(self) -> None:
        self.check_idle()
        for part in self.parts:
            part.close()


class HybridAppends(Appends):
    """New tokens in all parts, or in none."""

    def __init__(self, parts: list[Appends]) -> None:
        self._parts = parts

    def apply(self, entries: Sequence[SeqTokens]) -> MicroBatch:
        done: list[Appends] = []
        ubatches: list[MicroBatch] = []
        try:
            for part in self._parts:
                ubatches.append(part.apply(entries))
                done.append(part)
        except BaseException:
            for part in reversed(done):
                part.undo()
            raise
        return _together(ubatches)

    def check(self, accepted: Mapping[int, int]) -> None:
        for part in self._parts:
            part.check(accepted)

    def keep(self, accepted: Mapping[int, int]) -> None:
        for part in self._parts:
            part.keep(accepted)

    def undo(self) -> None:
        for part in self._parts:
            part.undo()

    def close(self) -> None:
        for part in self._parts:
            part.close()


class HybridReturning(Returning):
    """A sequence on its way back into all parts."""

    def __init__(self, parts: list[Returning]) -> None:
        self._parts = parts

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()


class HybridUpdate(MemoryContext):
    """Pending work of all parts. It changes no content, so a part that fails is finished later."""

    def __init__(self, contexts: list[MemoryContext]) -> None:
        self._contexts = contexts
        self.status = reduce(status_combine, [context.status for context in contexts])
        if self.status is not Status.SUCCESS:
            failed = [context.error for context in contexts if context.error is not None]
            self.error = failed[0] if failed else None
            self.close()

    @property
    def ubatch(self) -> MicroBatch:
        return self._contexts[0].ubatch

    def apply(self) -> None:
        if self.status is not Status.SUCCESS:
            raise RequestError(f"there is nothing to apply: {self.error or 'no update is pending'}")
        try:
            for context in self._contexts:
                if context.status is Status.SUCCESS:
                    context.apply()
            self.status = Status.NO_UPDATE
        except BaseException:
            self.status = Status.FAILED_COMPUTE
            raise
        finally:
            self.close()

    def next(self) -> bool:
        return False

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def _together(ubatches: list[MicroBatch]) -> MicroBatch:
    """One micro-batch with the views of all parts."""
    first = ubatches[0]
    views: dict[str, PageView | StateView] = {}
    for ubatch in ubatches:
        views |= ubatch.views
    return MicroBatch(first.tokens, first.positions, first.seq_rows, first.seqs, views)
