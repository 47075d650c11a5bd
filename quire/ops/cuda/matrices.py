"""Weights on the GPU, and products with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from quire.ops import Part
from quire.ops.cuda.formats import FORMATS, TILE, UNIT, Format, dense, levels, tiles
from quire.ops.cuda.kernels import product as kernels
from quire.ops.cuda.machine import Machine, need
from quire.ops.passing import PIECE

_SLICES = 8
_CHUNK = 1 << 25  # bytes of a file that are turned into levels at a time


@dataclass(frozen=True)
class Segment:
    """Parts of one format, one under the other."""

    format: Format
    cols: int
    part_rows: tuple[int, ...]
    q: torch.Tensor
    """Of dense weights [rows, cols], of others [tiles, bytes]; rows before the first part's too."""
    first: int = 0
    """The row of `q` at which the first part starts."""

    @property
    def rows(self) -> int:
        """Rows of all its parts."""
        return sum(self.part_rows)

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self.format.nbytes(self.rows, self.cols)

    @property
    def slice_cols(self) -> int:
        """Columns that are summed on their own: a matter of the weight alone."""
        return -(-self.cols // (_SLICES * UNIT)) * UNIT

    @property
    def slices(self) -> int:
        """How many of them there are: eight at most."""
        return -(-self.cols // self.slice_cols)


@dataclass(frozen=True)
class CudaMatrix:
    """A weight on the GPU."""

    segments: tuple[Segment, ...]
    cols: int

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(segment.rows for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes it takes on the device."""
        return sum(segment.nbytes for segment in self.segments)


def format_of(kind: int) -> Format:
    """How weights of a type are held."""
    need(kind in FORMATS, f"tensors of ggml type {kind} cannot be multiplied with on a GPU")
    return FORMATS[kind]


def pack(parts: Sequence[Part], machine: Machine) -> CudaMatrix:
    """One matrix from parts stacked along rows."""
    need(parts, "a matrix needs at least one part")
    need(len({cols for _, _, cols, _ in parts}) == 1, "parts of several widths")
    need(all(rows > 0 and cols > 0 for _, rows, cols, _ in parts), "an empty part")
    runs = [list(run) for _, run in groupby(parts, key=lambda part: format_of(part[0]))]
    return CudaMatrix(tuple(_segment(run, machine) for run in runs), parts[0][2])


def _segment(parts: list[Part], machine: Machine) -> Segment:
    cols, format = parts[0][2], format_of(parts[0][0])
    rows = tuple(part[1] for part in parts)
    q = machine.weight(format.stored(sum(rows), cols), format.dtype)
    if format.bits:
        _fill_tiles(format, parts, q, machine)
    else:
        start = 0
        for kind, raw, count in _chunks(parts, machine):
            q[start : start + count].copy_(dense(raw, kind, count, cols))
            start += count
    return Segment(format, cols, rows, q)


def _chunks(parts: list[Part], machine: Machine) -> Iterator[tuple[int, torch.Tensor, int]]:
    """The type, bytes and count of some rows after the other, on the device."""
    ring = machine.ring
    upload, most = (machine.upload, _CHUNK) if ring is None else (ring.upload, PIECE)
    for kind, count, data in _joined(parts):
        need(data.size > 0 and data.size % count == 0, f"a part of {data.size} bytes")
        row_bytes = data.size // count
        step = max(most // row_bytes, TILE)
        for at in range(0, count, step):
            some = min(step, count - at)
            yield kind, upload(data[at * row_bytes : (at + some) * row_bytes]), some


def _joined(parts: list[Part]) -> list[tuple[int, int, Any]]:
    """Types, rows and bytes; of parts that lie one behind the other in a file, as one."""
    found: list[tuple[int, int, Any]] = []
    for kind, rows, _, data in parts:
        if found and not isinstance(data, np.ndarray) and found[-1][0] == kind:
            before = found[-1]
            if (both := before[2].with_next(data)) is not None:
                found[-1] = kind, before[1] + rows, both
                continue
        found.append((kind, rows, data))
    return found


def _fill_tiles(format: Format, parts: list[Part], q: torch.Tensor, machine: Machine) -> None:
    """Rows as tiles; a tile may have rows of two parts."""
    held: list[torch.Tensor] = []  # levels, scales, minima of rows that fill no tile yet
    done = 0
    for kind, raw, count in _chunks(parts, machine):
        made = [each.reshape(count, -1) for each in levels(raw, kind) if each is not None]
        held = [torch.cat(two) for two in zip(held, made, strict=True)] if held else made
        whole = len(held[0]) // TILE
        if whole:
            some = [each[: whole * TILE] for each in held]
            q[done : done + whole] = tiles(format, *some)
            done += whole
        held = [each[whole * TILE :] for each in held]
    if len(held[0]):
        missing = TILE - len(held[0])
        q[done:] = tiles(format, *(torch.nn.functional.pad(e, (0, 0, 0, missing)) for e in held))


def packed_bytes(parts: Sequence[tuple[int, int, int]]) -> int:
    """What `pack` would hold for parts of these types, rows and columns."""
    need(all(rows > 0 and cols > 0 for _, rows, cols in parts), "an empty part")
    runs = groupby(parts, key=lambda part: format_of(part[0]))
    found = ((format, list(run)) for format, run in runs)
    return sum(format.nbytes(sum(rows for _, rows, _ in run), run[0][2]) for format, run in found)


def expert_segments(w: CudaMatrix, count: int, rows: int, cols: int) -> list[Segment]:
    """The tensors of experts' matrices: each a segment with one part per expert."""
    need(w.cols == cols, f"{w.cols} columns where {cols} are needed")
    found = []
    for segment in w.segments:
        sizes = segment.part_rows
        need(len(sizes) % count == 0, f"{len(sizes)} parts for {count} experts")
        for at in range(0, len(sizes), count):
            mine = sizes[at : at + count]
            need(len(set(mine)) == 1, "experts of several sizes")
            found.append(Segment(segment.format, cols, mine, segment.q, sum(sizes[:at])))
    total = sum(segment.part_rows[0] for segment in found)
    need(total == rows, f"an expert has {total} rows, not {rows}")
    return found


def embed_ids(table: CudaMatrix, ids: torch.Tensor, scale: float, machine: Machine) -> torch.Tensor:
    """Rows of a matrix by ids that lie on the device, times scale: nobody looks at the ids."""
    out, start = machine.empty(len(ids), table.cols), 0
    for segment in table.segments:
        f = segment.format
        kernels.embed[(len(ids), -(-table.cols // 256))](
            segment.q, ids, out, start, segment.rows, table.cols, scale, BITS=f.bits, GROUP=f.group,
            MINIMUM=f.minimum, BLOCK=256, num_warps=2,
        )  # fmt: skip
        start += segment.rows
    return out
