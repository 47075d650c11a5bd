"""Saved state into memory: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from time import perf_counter_ns
from typing import TYPE_CHECKING, BinaryIO

from quire.errors import RequestError
from quire.memory.checkpoint import Checkpoint
from quire.memory.groups.group import AnyGroup
from quire.memory.groups.layout import Int32
from quire.memory.groups.state_table import StateTable
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
from quire.memory.saved.format import Container
from quire.memory.saved.fresh import FreshPages
from quire.memory.saved.holders import Held, parse_holders, pools_of, sharing, signature
from quire.memory.saved.regroup import Regrouping
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
    kind = "memory" if seq < 0 else "sequence"
    return _read(memory, Container(io, source), kind, seq, flags, model, check)


def checkpoint_from_bytes(memory: Memory, data: bytes, name: str | None, model: str) -> str:
    """A new checkpoint; its name."""
    start = perf_counter_ns()
    if name is not None:
        memory.checkpoints.new_name(name)  # refused here if it is taken
    container = Container(BytesIO(data), "checkpoint as bytes")
    read = _read(memory, container, "checkpoint", -1, StateFlags.WHOLE, model, None, name)
    memory.checkpoints.timings["from_bytes"].add(perf_counter_ns() - start)
    return next(iter(read.checkpoints.values()))


def _read(
    memory: Memory, container: Container, kind: str, seq: int, flags: StateFlags, model: str,
    check: Check | None, name: str | None = None,
) -> StateRead:  # fmt: skip
    memory.check_idle()
    regrouping = check_header(container, kind, flags, model, memory.groups)
    groups, left_out = split_groups(memory.groups, flags)
    state = container.json(container.metadata["state"])
    if regrouping is None:
        n_pages = page_counts(container, groups)
    else:
        state, n_pages = regrouping.tables(state, groups, left_out)
    held = parse_holders(groups, left_out, state, n_pages, container.refuse)
    check_kind(container, kind, flags, held)
    check_size(container, [(pool, n_pages[pool.name]) for pool in pools_of(groups)])
    if kind == "sequence":  # it gets the id that it is read into
        held = [replace(one, seq=seq) if one.name is None else one for one in held]
    for one in held:
        if one.name is None:
            _check_room(memory, one, left_out, StateFlags.PARTIAL in flags)
    extra = read_extra(container)
    if check is not None:
        check(findings(held, groups, extra))
    _bring_in(container, groups, held, n_pages, regrouping)
    names = _register(memory, held, name)
    seqs = tuple(one.seq for one in held if one.name is None)
    return StateRead(seqs, names, extra)


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


def _bring_in(
    container: Container, groups: Sequence[AnyGroup], held: Sequence[Held],
    n_pages: Mapping[str, int], regrouping: Regrouping | None,
) -> None:  # fmt: skip
    """Pages for everything, filled and given to who holds them; or nothing."""
    shared = {
        pool.name: sharing(group, pool, held, n_pages[pool.name])
        for group in groups
        for pool in group.pools
    }
    for name, counts in shared.items():
        if not counts.refs.all():
            container.refuse(f"it has pages of {name} that nobody holds")
    check_fits([(pool, n_pages[pool.name]) for pool in pools_of(groups)])
    fresh = _filled(container, groups, held, n_pages, regrouping)
    for group in groups:
        for one in held:
            numbers = [group.held_pages(pool, one.tables[group.name])[0] for pool in group.pools]
            ids = [fresh[p.name][n] for p, n in zip(group.pools, numbers, strict=True)]
            one.tables[group.name] = group.repaged(one.tables[group.name], ids)
        for pool in group.pools:
            counts = shared[pool.name]
            pool.hand_over(fresh[pool.name], counts.refs, counts.frozen, counts.appender)


def _register(memory: Memory, held: Sequence[Held], name: str | None) -> dict[str, str]:
    """Tables take their places; returns the names of checkpoints, old and new."""
    names: dict[str, str] = {}
    for one in held:
        if one.name is None:
            memory.adopt(one.seq, one.tables)
            continue
        wanted = name or one.name
        taken = wanted in memory.checkpoints.by_name
        now = memory.checkpoints.new_name(None if taken else wanted)
        names[one.name] = now
        tables = tuple(one.tables[group.name] for group in memory.groups)
        memory.checkpoints.by_name[now] = Checkpoint(now, one.seq, tables)
    return names


def _filled(
    container: Container, groups: Sequence[AnyGroup], held: Sequence[Held],
    n_pages: Mapping[str, int], regrouping: Regrouping | None,
) -> dict[str, Int32]:  # fmt: skip
    """Ids of fresh pages, by pool, that hold what the file has; or an error and no change."""
    fresh: dict[str, FreshPages] = {}
    try:
        for pool in pools_of(groups):
            fresh[pool.name] = FreshPages(pool, n_pages[pool.name])
        ids = {name: pages.ids for name, pages in fresh.items()}
        if regrouping is None:
            for pool in pools_of(groups):
                with pool.bytes.writing(ids[pool.name]) as arrays:
                    container.read_into(PAGES + pool.name, arrays)
            return ids
        regrouping.fill(groups, ids)
        for group in groups:
            if group.kind == "recurrent" and regrouping.incomplete(group):
                _derive(group, held, [ids[pool.name] for pool in group.pools])
    except BaseException:
        for pages in fresh.values():
            pages.give_back()
        raise
    return ids


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
