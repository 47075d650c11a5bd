"""Weights on the GPU, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.ops import Part
from quire.ops.cuda.formats import FORMATS, Format, dense, from_nibbles, levels, nibbles
from quire.ops.cuda.machine import Machine, need

_SLICES = 8
_CHUNK = 1 << 25  # bytes of a file that are turned into levels at a time


@dataclass(frozen=True)
class Segment:
    """Parts of one format, one under the other."""

    format: Format
    cols: int
    part_rows: tuple[int, ...]
    q: torch.Tensor
    """Levels or, of dense weights, the weights: [rows, row_bytes]."""
    scales: torch.Tensor
    minima: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows of all its parts."""
        return sum(self.part_rows)

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self.format.nbytes(self.rows, self.cols)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.cols // self.format.group if self.format.bits else 0

    @property
    def slice_cols(self) -> int:
        """Columns that are summed on their own: a matter of the weight alone."""
        unit = 256
        return max(-(-self.cols // (_SLICES * unit)) * unit, unit)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Some of its rows, in float32."""
        q = self.q.index_select(0, ids)
        if not self.format.bits:
            return q.float()
        if self.format.bits == 4:
            q = from_nibbles(q, self.format.unit(self.cols), self.cols)
        value = q.reshape(len(ids), self.groups, -1).float()
        value *= self.scales.index_select(0, ids).float()[..., None]
        if self.format.minimum:
            value += self.minima.index_select(0, ids).float()[..., None]
        return value.to(self.format.multiply).float().view(len(ids), self.cols)


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
    runs: list[list[Part]] = []
    for part in parts:
        if runs and format_of(runs[-1][0][0]) == format_of(part[0]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return CudaMatrix(tuple(_segment(run, machine) for run in runs), parts[0][2])


def _segment(parts: list[Part], machine: Machine) -> Segment:
    kind, cols = parts[0][0], parts[0][2]
    format, rows = format_of(kind), sum(part[1] for part in parts)
    q = machine.empty(rows, format.row_bytes(cols), dtype=format.dtype)
    groups = cols // format.group if format.bits else 0
    scales, minima = (
        machine.empty(rows if wanted else 0, groups, dtype=torch.float16)
        for wanted in (format.bits, format.minimum)
    )
    start = 0
    for kind, count, _, data in parts:
        need(data.size > 0 and data.size % count == 0, f"a part of {data.size} bytes")
        row_bytes = data.size // count
        step = max(_CHUNK // row_bytes, 1)
        for at in range(0, count, step):
            some = min(step, count - at)
            raw = machine.upload(data[at * row_bytes : (at + some) * row_bytes])
            to = slice(start + at, start + at + some)
            _fill(format, kind, raw, some, cols, q[to], scales[to], minima[to])
        start += count
    return Segment(format, cols, tuple(part[1] for part in parts), q, scales, minima)


def _fill(
    format: Format, kind: int, raw: torch.Tensor, rows: int, cols: int, q: torch.Tensor,
    scales: torch.Tensor, minima: torch.Tensor,
) -> None:  # fmt: skip
    """Writes some rows of a part where they belong."""
    if not format.bits:
        q.copy_(dense(raw, kind, rows, cols))
        return
    level, scale, minimum = levels(raw, kind)
    level = level.reshape(rows, cols)
    q.copy_(nibbles(level, format.unit(cols)) if format.bits == 4 else level)
    scales.copy_(scale.reshape(rows, -1))
    if minimum is not None:
        minima.copy_(minimum.reshape(rows, -1))


def packed_bytes(parts: Sequence[tuple[int, int, int]]) -> int:
    """What `pack` would hold for parts of these types, rows and columns."""
    need(all(rows > 0 and cols > 0 for _, rows, cols in parts), "an empty part")
    return sum(format_of(kind).nbytes(rows, cols) for kind, rows, cols in parts)


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
            first = sum(sizes[:at])
            part = slice(first, first + sum(mine))
            found.append(
                Segment(
                    segment.format,
                    cols,
                    mine,
                    segment.q[part],
                    segment.scales[part],
                    segment.minima[part],
                )
            )
    total = sum(segment.part_rows[0] for segment in found)
    need(total == rows, f"an expert has {total} rows, not {rows}")
    return found


def embed(table: CudaMatrix, wanted: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Rows of a matrix by id, in float32."""
    if len(table.segments) == 1:
        return table.segments[0].take(wanted)
    out, start = machine.empty(len(wanted), table.cols), 0
    for segment in table.segments:
        inside = (wanted >= start) & (wanted < start + segment.rows)
        mine = segment.take((wanted - start).clamp(0, segment.rows - 1))
        out = torch.where(inside[:, None], mine, out)
        start += segment.rows
    return out
