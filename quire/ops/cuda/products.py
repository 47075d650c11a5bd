"""The group `MatrixOps` of the table: who launches products, and in which shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops import Array, Int32, Matrix, Part
from quire.ops.cuda import matrices
from quire.ops.cuda.arrays import Arrays, block_of, need_same, row_of, values_of
from quire.ops.cuda.formats import Format
from quire.ops.cuda.kernels import product as kernels
from quire.ops.cuda.kernels import rows as row_kernels
from quire.ops.cuda.machine import OnDevice, need, power_of_two
from quire.ops.cuda.matrices import CudaMatrix, Segment

_FEW = 64
"""Up to so many tokens the slices of K run in parallel."""
MULTIPLY = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Prepared:
    """Activations as a product takes them."""

    values: torch.Tensor
    scales: torch.Tensor
    """What undoes the scale of each row; of float16 alone."""
    n: int
    fine: bool
    """As many rows again hold what rounding has lost."""

    @property
    def scaled(self) -> bool:
        """Whether rows have scales."""
        return self.values.dtype is torch.float16


def matrix_of(w: Matrix) -> CudaMatrix:
    """A matrix that this device made."""
    if not isinstance(w, CudaMatrix):
        raise TypeError(f"{type(w).__name__} is not a matrix of the GPU")
    return w


def _tile(segment: Segment, tokens: int) -> dict[str, Any]:
    """The shape of a product's tiles: which one makes no difference to any bit."""
    wide = segment.format.multiply is torch.float32
    few = tokens <= _FEW
    size = {"BR": 64, "BT": min(power_of_two(tokens, 16), 64), "BK": 32 if wide else 128}
    if not few and not wide:
        size = {"BR": 128, "BT": 128, "BK": 64}
    if segment.format.bits == 4:
        size["BK"] = segment.format.unit(segment.cols)
        size |= {"BR": 64, "BT": min(size["BT"], 64)}
    elif segment.format.bits == 8:
        size["BK"] = 64
    return size | {
        "num_warps": 4 if few or wide else 8,
        "num_stages": 2 if wide or segment.format.bits == 4 else 3,
    }


class Matrices(Arrays):
    """The group `MatrixOps` of the table."""

    def pack(self, parts: Sequence[Part]) -> Matrix:
        """One matrix from parts stacked along rows."""
        made = matrices.pack(parts, self.machine)
        self.packed_total += made.nbytes
        return made

    def packed_bytes(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """What `pack` would hold for parts of these types, rows and columns."""
        return matrices.packed_bytes(parts)

    def embed(self, table: Matrix, ids: Int32 | OnDevice, scale: float = 1.0) -> Array:
        """Rows of a matrix by id, times scale."""
        if not isinstance(ids, OnDevice):
            need(((ids >= 0) & (ids < table.rows)).all(), f"an id outside {table.rows} rows")
        rows = matrices.embed(matrix_of(table), self.machine.integers(ids), self.machine)
        return self.new(rows if scale == 1.0 else rows * scale)

    def linear(
        self, x: Array, w: Matrix, norm: Array | None = None, eps: float = 0.0, act: int = 0,
        bias: Array | None = None, into: Array | None = None,
    ) -> Array:  # fmt: skip
        """w · prologue(x) + bias; added to `into` and returned when that is given."""
        return self._linear(x, w, norm, eps, act, bias, into, fine=False)

    def linear_int16(self, x: Array, w: Matrix, norm: Array, eps: float) -> Array:
        """w · rms_norm(x) with activations of twice 16 bits."""
        return self._linear(x, w, norm, eps, 0, None, None, fine=True)

    def _linear(
        self, x: Array, w: Matrix, norm: Array | None, eps: float, act: int, bias: Array | None,
        into: Array | None, fine: bool,
    ) -> Array:  # fmt: skip
        matrix = matrix_of(w)
        need(act in (0, 1, 2) and not (act and norm), f"act {act} beside a norm, or unknown")
        cols, n = matrix.cols, x.shape[0]
        wanted = 2 * cols if act else cols
        need(x.shape[1] == wanted, f"x of shape {x.shape} where {wanted} columns are needed")
        shape = n, matrix.rows
        need(into is None or into.shape == shape, f"into must be {shape}")
        weight = None if norm is None else row_of(norm, cols, "norm")
        added = None if bias is None else row_of(bias, matrix.rows, "bias")
        out = self.new(self.machine.empty(*shape)) if into is None else into
        if n:
            self._multiply(x, matrix, weight, eps, act, added, values_of(out), into, fine)
        return out

    def _multiply(
        self, x: Array, w: CudaMatrix, norm: torch.Tensor | None, eps: float, act: int,
        bias: torch.Tensor | None, out: torch.Tensor, into: Array | None, fine: bool,
    ) -> None:  # fmt: skip
        made: dict[torch.dtype, Prepared] = {}
        start = 0
        for segment in w.segments:
            kind = segment.format.multiply
            if kind not in made:
                made[kind] = self.prepare(values_of(x), w.cols, norm, eps, act, kind, fine)
            mine = slice(start, start + segment.rows)
            self._product(
                made[kind], segment, out[:, mine], None if bias is None else bias[mine],
                into is not None,
            )  # fmt: skip
            start += segment.rows

    def prepare(
        self, x: torch.Tensor, cols: int, norm: torch.Tensor | None, eps: float, act: int,
        kind: torch.dtype, fine: bool = False,
    ) -> Prepared:  # fmt: skip
        """Activations in the type that a weight is multiplied in."""
        n = len(x)
        fine = fine and kind is not torch.float32
        dtype = self.machine.half(kind)
        if kind is torch.float32 and norm is None and not act:
            return Prepared(x, x, n, False)
        values = self.machine.empty(n * (1 + fine), cols, dtype=dtype)
        scales = self.machine.empty(n)
        row_kernels.prepare[(n,)](
            x, x if norm is None else norm, values, scales, n, cols, eps,
            NORM=norm is not None, ACT=act, SCALED=kind is torch.float16, FINE=fine,
            BLOCK=block_of(cols),
        )  # fmt: skip
        return Prepared(values, scales, n, fine)

    def _product(
        self, x: Prepared, w: Segment, out: torch.Tensor, bias: torch.Tensor | None, into: bool
    ) -> None:
        """One segment's columns of the output; with `into`, added to what they hold."""
        few = len(x.values) <= _FEW
        adds = {"BIAS": bias is not None, "SCALED": x.scaled}
        if few:
            parts = self._launch(x.values, x, w, None, bias, True, adds | {"INTO": False})
            n_slices, n_rows = parts.shape[0], w.rows
            block = 128
            kernels.join[(triton.cdiv(n_rows, block), x.n)](
                parts, out, out if bias is None else bias, out, x.scales, x.n, len(x.values),
                n_rows, out.stride(0), n_slices, BLOCK=block, FINE=x.fine, INTO=into, **adds,
                num_warps=1,
            )  # fmt: skip
            return
        w = self._expanded(w)
        self._launch(x.values[: x.n], x, w, out, bias, False, adds | {"INTO": into})
        if x.fine:
            rest = adds | {"INTO": True, "BIAS": False}
            self._launch(x.values[x.n :], x, w, out, None, False, rest)

    def _expanded(self, w: Segment) -> Segment:
        """For many tokens: quantised weights unpacked once, instead of by every tile."""
        f = w.format
        if not f.bits:
            return w
        dense = Format(0, dtype=torch.float16)
        values = self.machine.empty(w.rows, w.cols, dtype=torch.float16)
        unit = f.unit(w.cols)
        kernels.expand[(triton.cdiv(w.rows, 32), triton.cdiv(w.cols, unit))](
            w.q, w.scales, w.minima, values, w.rows, w.cols, w.q.stride(0), w.groups, BR=32,
            BK=unit, BITS=f.bits, UNIT=unit, GROUP=f.group, MINIMUM=f.minimum,
        )  # fmt: skip
        return Segment(dense, w.cols, (w.rows,), values, w.scales, w.minima)

    def _launch(
        self, values: torch.Tensor, x: Prepared, w: Segment, out: torch.Tensor | None,
        bias: torch.Tensor | None, split: bool, adds: dict[str, bool],
    ) -> torch.Tensor:  # fmt: skip
        n, f = len(values), w.format
        n_slices = triton.cdiv(w.cols, w.slice_cols)
        if out is None:
            out = self.machine.empty(n_slices, n, w.rows)
        tile = _tile(w, n)
        grid = (
            triton.cdiv(w.rows, tile["BR"]), triton.cdiv(n, tile["BT"]), n_slices if split else 1
        )  # fmt: skip
        kernels.product[grid](
            values, w.q, w.scales, w.minima, out, out if bias is None else bias, out, x.scales,
            n, w.rows, w.cols, w.q.stride(0), w.groups, out.stride(-2), w.slice_cols,
            BITS=f.bits, UNIT=f.unit(w.cols), GROUP=f.group, MINIMUM=f.minimum,
            MULTIPLY=MULTIPLY[self.machine.half(f.multiply)], SPLIT=split, **adds, **tile,
        )  # fmt: skip
        return out

    # ---- experts --------------------------------------------------------------------------------

    def experts(
        self, x: Array, router: Matrix, gate_up: Matrix, down: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float, into: Array,
    ) -> Array:  # fmt: skip
        """Adds to `into` what the `n_used` likeliest experts make of rms_norm(x)."""
        need_same("experts", x, into)
        n, width = x.shape
        count = router.rows
        need(router.cols == width, f"router has {router.cols} columns")
        need(1 <= n_used <= count, f"n_used is {n_used}; there are {count} experts")
        ups = matrices.expert_segments(matrix_of(gate_up), count, 2 * down.cols, width)
        downs = matrices.expert_segments(matrix_of(down), count, width, down.cols)
        weight = row_of(norm, width, "norm")
        if n == 0:
            return into
        logits = self._linear(x, router, norm, eps, 0, None, None, fine=True)
        chosen = self.machine.empty(n, n_used, dtype=torch.int32)
        shares = self.machine.empty(n, n_used)
        kernels.choose[(n,)](
            values_of(logits), chosen, shares, count, n_used, scale, NORMALIZE=normalize,
            BLOCK=power_of_two(count, 16), num_warps=1,
        )  # fmt: skip
        tiles = self._tiles(chosen.view(-1), count)
        middle = self._routed(values_of(x), weight, eps, 0, ups, tiles, n * n_used, n_used)
        y = self._routed(middle, None, 0.0, 1, downs, tiles, n * n_used, 1)
        kernels.mix[(triton.cdiv(width, 256), n)](
            values_of(into), y, shares, n_used, width, BLOCK=256, num_warps=2
        )
        return into

    def _tiles(self, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs sorted by expert, in tiles of one expert each: their experts, and their pairs.

        There are as many tiles as there could be at most, so that nobody waits for a count.
        """
        n_pairs = len(experts)
        size = 16 if n_pairs < 4 * count else 64
        n_tiles = min(n_pairs, n_pairs // size + count)
        device = experts.device
        order = torch.argsort(experts, stable=True)
        by_expert = torch.zeros(count, dtype=torch.int64, device=device)
        by_expert.scatter_add_(0, experts.long(), torch.ones_like(experts, dtype=torch.int64))
        tiles = (by_expert + size - 1) // size
        tile_ends, pair_ends = tiles.cumsum(0), by_expert.cumsum(0)
        numbers = torch.arange(n_tiles, device=device)
        owner = torch.searchsorted(tile_ends, numbers, right=True)
        owner = torch.where(owner < count, owner, -1).int()
        sorted_experts = experts[order].long()
        rank = torch.arange(n_pairs, device=device) - (pair_ends - by_expert)[sorted_experts]
        place = (tile_ends - tiles)[sorted_experts] * size + rank
        pairs = torch.full((n_tiles * size,), -1, dtype=torch.int32, device=device)
        pairs[place] = order.int()
        return owner, pairs.view(n_tiles, size)

    def _routed(
        self, x: torch.Tensor, norm: torch.Tensor | None, eps: float, act: int,
        segments: list[Segment], tiles: tuple[torch.Tensor, torch.Tensor], n_pairs: int,
        divide: int,
    ) -> torch.Tensor:  # fmt: skip
        """What each pair's expert makes of its token's row, or of its own."""
        owner, pairs = tiles
        out = self.machine.empty(n_pairs, sum(segment.part_rows[0] for segment in segments))
        start = 0
        for segment in segments:
            f, rows = segment.format, segment.part_rows[0]
            y = self.prepare(x, segment.cols, norm, eps, act, f.multiply)
            tile = _tile(segment, pairs.shape[1]) | {"BT": pairs.shape[1]}
            kernels.routed[(triton.cdiv(rows, tile["BR"]), len(owner))](
                y.values, segment.q, segment.scales, segment.minima, out[:, start:], y.scales,
                owner, pairs, divide, rows, segment.cols, segment.q.stride(0), segment.groups,
                out.stride(0), segment.slice_cols,
                BITS=f.bits, UNIT=f.unit(segment.cols), GROUP=f.group, MINIMUM=f.minimum,
                MULTIPLY=MULTIPLY[self.machine.half(f.multiply)], SCALED=y.scaled, **tile,
            )  # fmt: skip
            start += rows
        return out
