"""Products with the matrices of experts: a token meets those that a router chose for it."""

from __future__ import annotations

import torch
import triton

from quire.ops import Array, Matrix
from quire.ops.cuda import launch, matrices
from quire.ops.cuda.arrays import CudaArray, array_of, need_same, row_of, values_of
from quire.ops.cuda.kernels import experts as kernels
from quire.ops.cuda.machine import need, power_of_two
from quire.ops.cuda.matrices import Segment
from quire.ops.cuda.multiply import MULTIPLY, tile_of
from quire.ops.cuda.products import Matrices, matrix_of

Tiles = tuple[torch.Tensor, torch.Tensor]
Entered = tuple[torch.Tensor, torch.Tensor, Tiles, CudaArray]


class Experts(Matrices):
    """The operation `experts` of the table, whole and in two halves."""

    def experts(
        self, x: Array, router: Matrix, gate_up: Matrix, down: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float, into: Array,
    ) -> Array:  # fmt: skip
        """Adds to `into` what the `n_used` likeliest experts make of rms_norm(x)."""
        need_same("experts", x, into)
        width, count = x.shape[1], router.rows
        need(gate_up.rows == 2 * count * down.cols, f"gate_up has {gate_up.rows} rows")
        downs = matrices.expert_segments(matrix_of(down), count, width, down.cols)
        entered = self._routed_in(x, router, gate_up, n_used, norm, eps, normalize, scale)
        if entered is not None:
            _, shares, tiles, middle = entered
            self._routed_out(middle, 1, downs, tiles, shares, into)
        return into

    def experts_in(
        self, x: Array, router: Matrix, gate_up: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float,
    ) -> tuple[Array, Array]:  # fmt: skip
        """The first half: the choice, and the middle."""
        entered = self._routed_in(x, router, gate_up, n_used, norm, eps, normalize, scale)
        if entered is None:
            ffn = gate_up.rows // router.rows // 2
            return self.new(self.machine.empty(0, 2 * n_used)), self.new(self.machine.empty(0, ffn))
        chosen, shares, _, middle = entered
        gate, up = middle.values.chunk(2, 1)
        acted = torch.nn.functional.silu(gate) * up
        return self.new(torch.hstack([chosen.float(), shares])), self.new(acted)

    def experts_out(
        self, middle: Array, chosen: Array, count: int, down: Matrix, into: Array
    ) -> Array:
        """The second half: adds to `into` what `down` makes of it."""
        n, width = into.shape
        used = chosen.shape[1] // 2
        need(chosen.shape == (n, 2 * used), f"a choice of {chosen.shape} for {n} rows")
        need(middle.shape == (n * used, down.cols), f"a middle of {middle.shape}")
        downs = matrices.expert_segments(matrix_of(down), count, width, down.cols)
        if n == 0:
            return into
        ids, shares = values_of(chosen).chunk(2, 1)
        tiles = self._tiles(ids.reshape(-1).int(), count)
        self._routed_out(array_of(middle), 0, downs, tiles, shares.contiguous(), into)
        return into

    def _routed_in(
        self, x: Array, router: Matrix, gate_up: Matrix, n_used: int, norm: Array, eps: float,
        normalize: bool, scale: float,
    ) -> Entered | None:  # fmt: skip
        """The choice, the experts' shares, tiles of pairs, and gate and up; None of no rows."""
        n, width = x.shape
        count = router.rows
        need(router.cols == width, f"router has {router.cols} columns")
        need(1 <= n_used <= count, f"n_used is {n_used}; there are {count} experts")
        rows = gate_up.rows // count
        ups = matrices.expert_segments(matrix_of(gate_up), count, rows, width)
        weight = row_of(norm, width, "norm")
        if n == 0:
            return None
        logits = self.linear_int16(x, router, norm, eps)
        chosen = self.machine.empty(n, n_used, dtype=torch.int32)
        shares = self.machine.empty(n, n_used)
        kernels.choose[(n,)](
            values_of(logits), chosen, shares, count, n_used, scale, NORMALIZE=normalize,
            BLOCK=power_of_two(count, 16), num_warps=1,
        )  # fmt: skip
        tiles = self._tiles(chosen.view(-1), count)
        middle = self._routed(array_of(x), weight, eps, 0, ups, tiles, n * n_used, n_used)
        return chosen, shares, tiles, middle

    def _routed_out(
        self, middle: CudaArray, act: int, downs: list[Segment], tiles: Tiles,
        shares: torch.Tensor, into: Array,
    ) -> None:  # fmt: skip
        (n, n_used), width = shares.shape, into.shape[1]
        y = self._routed(middle, None, 0.0, act, downs, tiles, n * n_used, 1)
        kernels.mix[(triton.cdiv(width, 256), n)](
            values_of(into), y.values, shares, n_used, width, BLOCK=256, num_warps=2
        )

    def _tiles(self, experts: torch.Tensor, count: int) -> Tiles:
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
        self, x: CudaArray, norm: torch.Tensor | None, eps: float, act: int,
        segments: list[Segment], tiles: Tiles, n_pairs: int,
        divide: int,
    ) -> CudaArray:  # fmt: skip
        """What each pair's expert makes of its token's row, or of its own."""
        owner, pairs = tiles
        out = self.machine.empty(n_pairs, sum(segment.part_rows[0] for segment in segments))
        start = 0
        for segment in segments:
            f, rows = segment.format, segment.part_rows[0]
            y = self.prepare(x, segment.cols, norm, eps, act, f.multiply)
            mine = out[:, start : start + rows]
            start += rows
            if launch.product_routed(self.machine, y, segment, owner, pairs, divide, mine):
                continue
            tile = tile_of(segment, pairs.shape[1]) | {"BT": pairs.shape[1]}
            kernels.routed[(triton.cdiv(rows, tile["BR"]), len(owner))](
                y.values, segment.q, mine, y.scales, owner, pairs, divide, segment.first,
                rows, segment.cols, out.stride(0), segment.slice_cols,
                BITS=f.bits, GROUP=f.group, MINIMUM=f.minimum,
                MULTIPLY=MULTIPLY[self.machine.half(f.multiply)], SCALED=y.scaled, **tile,
            )  # fmt: skip
        return self.new(out)
