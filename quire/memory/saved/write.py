"""Memory into saved state: what sequences and checkpoints hold, each page once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from time import perf_counter_ns
from typing import TYPE_CHECKING, BinaryIO

from quire.errors import RequestError
from quire.memory.saved.check import EXTRA, FORMAT, VERSION, flag_name, split_groups
from quire.memory.saved.format import Tensor, write_container
from quire.memory.saved.holders import Snapshot, describe, pools_of
from quire.memory.saved.sources import PAGES
from quire.memory.saved.types import Extra, StateFlags

if TYPE_CHECKING:
    from quire.memory.memory import Memory


@dataclass(frozen=True)
class Image:
    """Saved state that is ready to be written, from any thread.

    Pages are not copied: it is good as long as somebody holds them.
    """

    metadata: dict[str, str]
    tensors: dict[str, Tensor]

    def write(self, io: BinaryIO) -> None:
        """Writes it; `state_read` reads it."""
        write_container(io, self.metadata, self.tensors)


def state_image(
    memory: Memory, seq: int, flags: StateFlags, checkpoints: Sequence[str], model: str,
    extra: Extra, empty: Sequence[str] = (),
) -> Image:  # fmt: skip
    """A sequence and the checkpoints named; or (-1) all sequences and checkpoints.

    Those named in `empty` are written as if they held nothing.
    """
    memory.check_idle()
    snapshot = Snapshot(*split_groups(memory.groups, flags))
    partial = StateFlags.PARTIAL in flags
    if partial and checkpoints:
        raise RequestError("a partial state has no checkpoints; write the whole instead")
    for one in memory.seqs if seq < 0 else [seq]:
        snapshot.add_sequence(one, memory.by_group(memory.tables(one)))
    # What the prefix index keeps is nobody's to come back to.
    saved = [] if partial else memory.checkpoints.by_name.values()
    every = [one.name for one in saved if not one.cached]
    for name in every if seq < 0 else checkpoints:
        _add_checkpoint(memory, snapshot, name)
    for name in empty:
        snapshot.add_checkpoint(name, seq, {group.name: group.empty() for group in memory.groups})
    kind = "memory" if seq < 0 else "sequence"
    return _image(memory, kind, flags, snapshot, model, extra)


def checkpoint_to_bytes(memory: Memory, name: str, model: str) -> bytes:
    """A checkpoint with every page it holds."""
    memory.check_idle()
    start = perf_counter_ns()
    snapshot = Snapshot(memory.groups, ())
    _add_checkpoint(memory, snapshot, name)
    out = BytesIO()
    _image(memory, "checkpoint", StateFlags.WHOLE, snapshot, model, Extra()).write(out)
    memory.checkpoints.timings["to_bytes"].add(perf_counter_ns() - start)
    return out.getvalue()


def _add_checkpoint(memory: Memory, snapshot: Snapshot, name: str) -> None:
    saved = memory.checkpoints.get(name)
    if saved.parked is not None:
        raise RequestError(f"checkpoint {name!r} is parked; unpark it first")
    snapshot.add_checkpoint(name, saved.seq, memory.by_group(saved.tables))


def _image(
    memory: Memory, kind: str, flags: StateFlags, snapshot: Snapshot, model: str, extra: Extra
) -> Image:
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "kind": kind,
        "flags": flag_name(flags),
        "model": model,
        "layout": json.dumps({group.name: describe(group) for group in memory.groups}),
        "extra": json.dumps(dict(extra.facts)),
        "state": json.dumps(
            {"sequences": snapshot.sequences, "checkpoints": snapshot.checkpoints},
            separators=(",", ":"),
        ),
    }
    tensors = {EXTRA + name: Tensor.of(array) for name, array in extra.arrays.items()}
    for pool in pools_of(split_groups(memory.groups, flags)[0]):
        pages = snapshot.pages(pool)
        tensors[PAGES + pool.name] = Tensor((len(pages), pool.page_bytes), pages, "U8")
    return Image(metadata, tensors)
