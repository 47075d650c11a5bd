"""Saved state: from memory into a file of any kind, and back, all of it or nothing."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from time import perf_counter_ns
from typing import Any, BinaryIO

from quire.errors import RequestError
from quire.memory.checkpoint import Checkpoint, Checkpoints
from quire.memory.container import Container, Tensor, write_container
from quire.memory.interface import Memory
from quire.memory.layout import Int32
from quire.memory.saved import Extra, Found, StateFlags, StateRead
from quire.memory.saved_tables import Leaf
from quire.memory.snapshot import (
    FreshPages,
    Held,
    Snapshot,
    describe,
    group_of,
    parse_holders,
    pools_of,
    sharing,
)
from quire.memory.state_checks import (
    EXTRA,
    FORMAT,
    PAGES,
    VERSION,
    check_fits,
    check_header,
    check_kept,
    check_kind,
    findings,
    flag_name,
    page_counts,
    read_extra,
    split_leaves,
)


class SavedState(Memory):
    """A memory whose sequences and checkpoints can be written and read."""

    checkpoints: Checkpoints[Any]

    @property
    @abstractmethod
    def leaves(self) -> tuple[Leaf, ...]:
        """The memories with pages of their own that this one is made of."""

    def state_write(
        self, io: BinaryIO, seq: int = -1, flags: StateFlags = StateFlags.WHOLE, *,
        checkpoints: Sequence[str] = (), model: str = "", extra: Extra | None = None,
    ) -> None:  # fmt: skip
        self.check_idle()
        snapshot = Snapshot(*split_leaves(self.leaves, flags))
        partial = StateFlags.PARTIAL in flags
        if partial and checkpoints:
            raise RequestError("a partial state has no checkpoints; write the whole instead")
        for one in self.seqs if seq < 0 else [seq]:
            snapshot.add_sequence(one)
        all_names = [] if partial else list(self.checkpoints.by_name)
        for name in all_names if seq < 0 else checkpoints:
            snapshot.add_checkpoint(name)
        kind = "memory" if seq < 0 else "sequence"
        _write(io, kind, self.leaves, flags, snapshot, model, extra or Extra())

    def state_read(
        self, io: BinaryIO, seq: int = -1, flags: StateFlags = StateFlags.WHOLE, *,
        model: str = "", source: str = "saved state",
        check: Callable[[Found], None] | None = None,
    ) -> StateRead:  # fmt: skip
        kind = "memory" if seq < 0 else "sequence"
        return self._read(io, kind, seq, flags, model, source, check or _accept)

    def checkpoint_to_bytes(self, name: str, model: str = "") -> bytes:
        self.check_idle()
        start = perf_counter_ns()
        self.checkpoints.get(name)
        snapshot = Snapshot(self.leaves, ())
        snapshot.add_checkpoint(name)
        out = BytesIO()
        _write(out, "checkpoint", self.leaves, StateFlags.WHOLE, snapshot, model, Extra())
        self.checkpoints.timings["to_bytes"].add(perf_counter_ns() - start)
        return out.getvalue()

    def checkpoint_from_bytes(self, data: bytes, name: str | None = None, model: str = "") -> str:
        start = perf_counter_ns()
        if name is not None:
            self.checkpoints.new_name(name)  # refused here if it is taken
        source = "checkpoint as bytes"
        read = self._read(
            BytesIO(data), "checkpoint", -1, StateFlags.WHOLE, model, source, _accept, name
        )
        self.checkpoints.timings["from_bytes"].add(perf_counter_ns() - start)
        return next(iter(read.checkpoints.values()))

    def _read(
        self, io: BinaryIO, kind: str, seq: int, flags: StateFlags, model: str, source: str,
        check: Callable[[Found], None], name: str | None = None,
    ) -> StateRead:  # fmt: skip
        self.check_idle()
        container = Container(io, source)
        check_header(container, kind, flags, model, self.leaves)
        leaves, left_out = split_leaves(self.leaves, flags)
        n_pages = page_counts(container, pools_of(leaves))
        state = container.json(container.metadata["state"])
        held = parse_holders(leaves, left_out, state, n_pages, container.refuse)
        check_kind(container, kind, flags, held)
        held = [_moved(one, seq) if kind == "sequence" else one for one in held]
        self._check_room(held, left_out, flags)
        extra = read_extra(container)
        check(findings(held, leaves, extra))
        self._bring_in(container, leaves, held, n_pages)
        names = self._register(leaves, held, name)
        seqs = tuple(one.seq for one in held if one.name is None)
        return StateRead(seqs, names, extra)

    def _check_room(
        self, held: Sequence[Held], left_out: Sequence[Leaf], flags: StateFlags
    ) -> None:
        """Sequences are new or empty, or in a partial state hold what it goes with."""
        for one in held:
            if one.name is not None:
                continue
            for leaf in self.leaves:
                leaf._check_here(one.seq)
            for leaf in left_out:
                check_kept(leaf, one)
            if StateFlags.PARTIAL not in flags and self.seq_pos_max(one.seq) >= 0:
                raise RequestError(
                    f"sequence {one.seq} holds tokens up to {self.seq_pos_max(one.seq)}, and what "
                    "is read does not go on top of them; free it first, or read into another"
                )

    def _bring_in(
        self, container: Container, leaves: Sequence[Leaf], held: Sequence[Held],
        n_pages: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Pages for everything, filled and given to who holds them; or nothing."""
        shared = {
            pool.name: sharing(leaf, pool, held, n_pages[pool.name])
            for leaf in leaves
            for pool in leaf.pools
        }
        for name, counts in shared.items():
            if not counts.refs.all():
                container.refuse(f"it has pages of {name} that nobody holds")
        check_fits([(pool, n_pages[pool.name]) for pool in pools_of(leaves)])
        fresh = _filled(container, leaves, n_pages)
        for leaf in leaves:
            group = group_of(leaf)
            for one in held:
                numbers = [leaf._held_pages(pool, one.tables[group])[0] for pool in leaf.pools]
                ids = [fresh[p.name][n] for p, n in zip(leaf.pools, numbers, strict=True)]
                one.tables[group] = leaf._repaged(one.tables[group], ids)
            for pool in leaf.pools:
                counts = shared[pool.name]
                pool.hand_over(fresh[pool.name], counts.refs, counts.frozen, counts.appender)

    def _register(
        self, leaves: Sequence[Leaf], held: Sequence[Held], name: str | None
    ) -> dict[str, str]:
        """Tables take their places; returns the names of checkpoints, old and new."""
        names: dict[str, str] = {}
        for one in held:
            if one.name is None:
                for leaf in leaves:
                    leaf._replace(one.seq, one.tables[group_of(leaf)])
                continue
            wanted = name or one.name
            now = self.checkpoints.new_name(None if wanted in self.checkpoints.by_name else wanted)
            names[one.name] = now
            self.checkpoints.by_name[now] = Checkpoint(now, one.seq, None)
            for leaf in leaves:
                leaf.checkpoints.by_name[now] = Checkpoint(now, one.seq, one.tables[group_of(leaf)])
        return names


def _accept(found: Found) -> None:
    """Whatever it is."""


def _write(
    io: BinaryIO, kind: str, leaves: Sequence[Leaf], flags: StateFlags, snapshot: Snapshot,
    model: str, extra: Extra,
) -> None:  # fmt: skip
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "kind": kind,
        "flags": flag_name(flags),
        "model": model,
        "layout": json.dumps({group_of(leaf): describe(leaf) for leaf in leaves}),
        "extra": json.dumps(dict(extra.facts)),
        "state": json.dumps(
            {"sequences": snapshot.sequences, "checkpoints": snapshot.checkpoints},
            separators=(",", ":"),
        ),
    }
    tensors = {EXTRA + name: Tensor.of(array) for name, array in extra.arrays.items()}
    for pool in pools_of(split_leaves(leaves, flags)[0]):
        pages = snapshot.pages(pool)
        tensors[PAGES + pool.name] = Tensor((len(pages), pool.page_bytes), pages, "U8")
    write_container(io, metadata, tensors)


def _filled(
    container: Container, leaves: Sequence[Leaf], n_pages: Mapping[str, int]
) -> dict[str, Int32]:
    """Ids of fresh pages, by pool, that hold what the file has; or an error and no change."""
    fresh: dict[str, FreshPages] = {}
    try:
        for pool in pools_of(leaves):
            pages = fresh[pool.name] = FreshPages(pool, n_pages[pool.name])
            container.read_into(PAGES + pool.name, (pool.view(int(page)) for page in pages.ids))
    except BaseException:
        for pages in fresh.values():
            pages.give_back()
        raise
    return {name: pages.ids for name, pages in fresh.items()}


def _moved(one: Held, seq: int) -> Held:
    """The single sequence of a file gets the id that it is read into."""
    return Held(seq if one.name is None else one.seq, one.name, one.tables, one.kept)
