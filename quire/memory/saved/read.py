"""Saved state into memory: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from time import perf_counter_ns
from typing import TYPE_CHECKING, BinaryIO

from quire.errors import RequestError, SessionFileError
from quire.memory.checkpoint import Checkpoint
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import Int32
from quire.memory.groups.state_table import StateTable
from quire.memory.pages.pool import PagePool
from quire.memory.saved.check import (
    check_fits,
    check_header,
    check_kind,
    check_size,
    findings,
    page_counts,
    read_extra,
    split_groups,
)
from quire.memory.saved.convert import Bytes
from quire.memory.saved.format import Container
from quire.memory.saved.fresh import FreshPages
from quire.memory.saved.holders import Held, Sharing, parse_holders, pools_of, sharing, signature
from quire.memory.saved.sources import PAGES
from quire.memory.saved.types import Found, StateFlags, StateRead

if TYPE_CHECKING:
    from quire.memory.memory import Memory

Check = Callable[[Found], None]


def state_read(
    memory: Memory, io: BinaryIO, seq: int, flags: StateFlags, model: str, source: str,
    check: Check | None,
) -> StateRead:  # fmt: skip
    """One sequence into `seq`, or everything."""
    memory.check_idle()
    kind = "memory" if seq < 0 else "sequence"
    return _whole(Reading(memory, Container(io, source), kind, flags, model, check), seq)


def checkpoint_from_bytes(memory: Memory, data: bytes, name: str | None, model: str) -> str:
    """A new checkpoint; its name."""
    memory.check_idle()
    start = perf_counter_ns()
    if name is not None:
        memory.checkpoints.new_name(name)  # refused here if it is taken
    container = Container(BytesIO(data), "checkpoint as bytes")
    read = _whole(Reading(memory, container, "checkpoint", StateFlags.WHOLE, model, name=name), -1)
    memory.checkpoints.timings["from_bytes"].add(perf_counter_ns() - start)
    return next(iter(read.checkpoints.values()))


def _whole(reading: Reading, seq: int) -> StateRead:
    """From the beginning to the end; memory is as it was where that fails."""
    reading.take_pages(seq)
    try:
        reading.fill()
        return reading.finish()
    except BaseException:
        reading.give_back()
        raise


class Reading:
    """Saved state on its way into memory.

        Reading(…)  ──▶  take_pages  ──▶  fill  ──▶  finish
        any thread       in turn         any        in turn, or `give_back`

    What happens *in turn* is one of the changes of memory, which come one after the other. The
    rest, which takes the time, may run beside whatever else memory does: the pages that are filled
    are nobody else's, and count as set aside (`Memory.incoming`).
    """

    def __init__(
        self, memory: Memory, container: Container, kind: str, flags: StateFlags, model: str,
        check: Check | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        """Checks everything but the bytes of pages."""
        self._memory = memory
        self._container = container
        self._partial = StateFlags.PARTIAL in flags
        self._name = name
        self._regrouping = check_header(container, kind, flags, model, memory.groups)
        self._groups, self._left_out = split_groups(memory.groups, flags)
        state = container.json(container.metadata["state"])
        if self._regrouping is None:
            n_pages = page_counts(container, self._groups)
        else:
            state, n_pages = self._regrouping.tables(state, self._groups, self._left_out)
        held = parse_holders(self._groups, self._left_out, state, n_pages, container.refuse)
        check_kind(container, kind, flags, held)
        self._held = held
        self._demand = [(pool, n_pages[pool.name]) for pool in pools_of(self._groups)]
        self._extra = read_extra(container)
        if check is not None:
            check(findings(held, self._groups, self._extra))
        self._shared: dict[str, Sharing] = {}
        self._fresh: dict[str, FreshPages] = {}
        self._writing = ExitStack()
        self._arrays: dict[str, list[Bytes]] = {}

    @property
    def set_aside(self) -> list[tuple[PagePool, list[int]]]:
        """The pages that are being filled."""
        return [(pages.pool, pages.ids.tolist()) for pages in self._fresh.values()]

    def take_pages(self, seq: int) -> None:
        """Pages for all of it, which nobody else gets; OutOfMemory, and no change, if they lack.

        One sequence gets the id `seq`.
        """
        memory = self._memory
        memory.check_idle()
        check_size(self._container, self._demand)
        if seq >= 0:
            self._held = [replace(one, seq=seq) if one.name is None else one for one in self._held]
        for one in self._held:
            if one.name is None:
                _check_room(memory, one, self._left_out, self._partial)
        self._count_holders()
        check_fits(self._demand)
        memory.incoming.append(self)
        try:
            for pool, n in self._demand:
                self._fresh[pool.name] = fresh = FreshPages(pool, n)
                self._arrays[pool.name] = self._writing.enter_context(pool.bytes.writing(fresh.ids))
        except BaseException:
            self.give_back()
            raise

    def _count_holders(self) -> None:
        n_pages = {pool.name: n for pool, n in self._demand}
        for group in self._groups:
            for pool in group.pools:
                counts = sharing(group, pool, self._held, n_pages[pool.name])
                if not counts.refs.all():
                    self._container.refuse(f"it has pages of {pool.name} that nobody holds")
                self._shared[pool.name] = counts

    def fill(self) -> None:
        """Reads the bytes of pages; SessionFileError if they are not what was written."""
        try:
            if self._regrouping is not None:
                self._regrouping.fill(self._groups, self._arrays)
                return
            for pool, _ in self._demand:
                self._container.read_into(PAGES + pool.name, self._wanted(self._arrays[pool.name]))
        except SessionFileError:
            self._check_open()  # what was given back has no checksum
            raise

    def _wanted(self, pages: list[Bytes]) -> Iterator[Bytes]:
        """One page after the other, as long as memory is there."""
        for page in pages:
            self._check_open()
            yield page

    def _check_open(self) -> None:
        if self not in self._memory.incoming:
            raise RequestError("memory was closed while saved state was read into it")

    def finish(self) -> StateRead:
        """Tables take their places. OutOfMemory where states lack room to be put together in."""
        self._memory.check_idle()
        if self._regrouping is not None:
            self._regrouping.merge(self._groups, self._arrays)
        self._writing.close()  # a device that has memory of its own gets the bytes here
        ids = {name: pages.ids for name, pages in self._fresh.items()}
        regrouping = self._regrouping
        for group in self._groups:
            if group.kind == "recurrent" and regrouping and regrouping.incomplete(group):
                _derive(group, self._held, [ids[pool.name] for pool in group.pools])
        for group in self._groups:  # from here on nothing fails
            self._hand_over(group, ids)
        self._memory.incoming.remove(self)
        self._fresh.clear()
        names = self._register()
        seqs = tuple(one.seq for one in self._held if one.name is None)
        return StateRead(seqs, names, self._extra)

    def give_back(self) -> None:
        """As if nothing had been read; once is enough.

        Nobody may fill pages any more, unless memory is closed: then their bytes are nobody's.
        """
        if self in self._memory.incoming:
            self._memory.incoming.remove(self)
        self._writing.pop_all()  # what was filled goes nowhere
        while self._fresh:
            self._fresh.popitem()[1].give_back()

    def _hand_over(self, group: AnyGroup, fresh: dict[str, Int32]) -> None:
        """Pages become those of who holds them."""
        for one in self._held:
            numbers = [group.held_pages(pool, one.tables[group.name])[0] for pool in group.pools]
            ids = [fresh[p.name][n] for p, n in zip(group.pools, numbers, strict=True)]
            one.tables[group.name] = group.repaged(one.tables[group.name], ids)
        for pool in group.pools:
            counts = self._shared[pool.name]
            pool.hand_over(fresh[pool.name], counts.refs, counts.frozen, counts.appender)

    def _register(self) -> dict[str, str]:
        """Tables take their places; returns the names of checkpoints, old and new."""
        memory, names = self._memory, dict[str, str]()
        for one in self._held:
            if one.name is None:
                memory.adopt(one.seq, one.tables)
                continue
            wanted = self._name or one.name
            taken = wanted in memory.checkpoints.by_name
            now = memory.checkpoints.new_name(None if taken else wanted)
            names[one.name] = now
            tables = tuple(one.tables[group.name] for group in memory.groups)
            memory.checkpoints.by_name[now] = Checkpoint(now, one.seq, tables)
        return names


def _check_room(memory: Memory, one: Held, left_out: Sequence[AnyGroup], partial: bool) -> None:
    """Sequences are new or empty, or in a partial state hold what it goes with."""
    end = memory.seq_pos_max(one.seq) + 1
    here = memory.tables(one.seq) if one.seq in memory.seqs else None
    for group, table in zip(memory.groups, here or [None] * len(memory.groups), strict=True):
        if group in left_out and (table is None or signature(table) != one.kept[group.name]):
            raise RequestError(
                f"the partial state of sequence {one.seq} goes with {one.end} positions of group "
                f"{group.name!r}, and the sequence ends at {end} or holds others; bring it there "
                "first, or read a whole state"
            )
    if end > 0 and not partial:
        raise RequestError(
            f"sequence {one.seq} holds tokens up to {end - 1}, and what is read does not go on "
            "top of them; free it first, or read into another"
        )


def _derive(group: AnyGroup, held: Sequence[Held], ids: Sequence[Int32]) -> None:
    """Lets the device compute what its logs have besides raw inputs."""
    states, logs = ids
    longest: dict[int, tuple[int, int]] = {}
    for one in held:
        table = one.tables[group.name]
        if isinstance(table, StateTable) and table.log >= 0:
            state = int(states[table.state]) if table.state >= 0 else -1
            length = max(longest.get(table.log, (0, 0))[1], table.log_length)
            longest[table.log] = state, length
    if longest:
        rows = [(state, int(logs[log]), n) for log, (state, n) in longest.items()]
        group.device.derive(group.name, rows)
