"""What arrays of steps take on a GPU: as `quire.ops.cuda` makes them, and as torch holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.ops import Heads
from quire.placement.arena import Trace
from quire.placement.rehearsal import MatrixShape, RehearsedOps, Shape, Walked

_FEW, _SOME = 4, 64  # tokens that products have kernels of their own for
_SLICES, _SLICED_BELOW = 8, 1300 * 16  # of a product of some tokens with few rows
_SPAN, _RELATED = 128, 36  # tokens that attention joins; floats that a recurrence prepares
_TILES, _FULL, _BLOCKS = (16, 64), 264, 128  # of prompts' attention: tokens, and programs
_LEAST_PAGES = 32
_MIB = 1 << 20
_ROUND, _SMALL, _LARGE, _OWN = 512, _MIB, 20 * _MIB, 10 * _MIB


class RehearsedCuda(RehearsedOps):
    """Operations of a GPU that return shapes, and note what they take for themselves."""

    def __init__(self, real: Any, hopper: bool) -> None:
        super().__init__(real, None)
        self._hopper = hopper  # quantised weights are multiplied as they are, even by prompts
        self._types = "f16", "f16"  # of keys and of values

    def _half(self, rows: int, cols: int) -> Shape:
        """Values of 16 bits."""
        return Shape(self, rows, -(-cols // 2))

    def linear(
        self, x: Shape, w: MatrixShape, norm: Any = None, eps: float = 0.0, *,
        bias: Any = None, into: Shape | None = None,
    ) -> Shape:  # fmt: skip
        out = into or Shape(self, x.shape[0], w.rows)
        self._multiply(x, w)
        return out

    def linear_int16(self, x: Shape, w: MatrixShape, norm: Any, eps: float) -> Shape:
        out = Shape(self, x.shape[0], w.rows)
        self._half(2 * x.shape[0], w.cols)
        return out

    def _multiply(self, x: Shape, w: MatrixShape, gated: bool = False) -> None:
        n = x.shape[0]
        if n > _FEW:
            held = [self._half(n, w.cols)]  # the activations
            self._read(x)
            if n <= _SOME and w.rows < _SLICED_BELOW and not gated:
                held.append(Shape(self, _SLICES * n, w.rows))
            if n > _SOME and w.quantized and (w.formats > 1 or not self._hopper):
                held.append(self._half(w.rows, w.cols))
            del held

    def _read(self, x: Shape) -> None:
        """Values that were left for later are computed."""
        if x.later:
            Shape(self, 1, x.later)
        x.later, x.held = 0, None

    def gate_sigmoid(self, x: Shape, gate: Shape) -> Shape:
        self._read(x)
        return x

    def network(
        self, x: Shape, gate_up: MatrixShape, down: MatrixShape, norm: Any, eps: float, act: int,
        into: Shape | None = None,
    ) -> Shape:  # fmt: skip
        n = x.shape[0]
        if gate_up.formats > 1:
            return self.linear(self.linear(x, gate_up), down, into=into)
        narrow = n > _FEW and not down.quantized
        middle = (self._half if narrow else self._whole)(n, down.cols)
        self._multiply(x, gate_up, gated=True)
        out = into or Shape(self, n, down.rows)
        if not narrow:
            self._multiply(middle, down)
        return out

    def _whole(self, rows: int, cols: int) -> Shape:
        return Shape(self, rows, cols)

    def experts(
        self, x: Shape, router: MatrixShape, gate_up: MatrixShape, down: MatrixShape, n_used: int,
        *, into: Shape, **_: Any,
    ) -> Shape:  # fmt: skip
        n, width = x.shape
        pairs = n * n_used
        logits = self.linear_int16(x, router, None, 0.0)
        sorted_ = Shape(self, pairs, 12), Shape(self, pairs, 12)
        middle = Shape(self, pairs, 2 * down.cols)
        self._half(n, width)
        y = Shape(self, pairs, width)
        self._half(pairs, down.cols)
        del logits, sorted_, middle, y
        return into

    def heads(self, heads: Heads, type_k: str, type_v: str, *_: Any) -> Heads:
        self._types = type_k, type_v
        return heads

    def attention(
        self, qkv: Shape, heads: Heads, pages: Any, rope: Any, k: int, v: int, store: bool = True
    ) -> Shape:
        n, step = qkv.shape[0], self.step
        out = Shape(self, n, heads.n_heads * heads.head_dim_v)
        if step.tokens > 1:  # what it asks with, until somebody reads what it finds
            out.held = qkv, self._half(n, heads.n_heads * heads.head_dim_k)
            out.later = self._spans(heads) * n * heads.n_heads * (heads.head_dim_v + 2)
        else:
            spans = -(-step.context // _SPAN)
            Shape(self, spans * n, heads.n_heads * (heads.head_dim_v + 2))
        return out

    def _spans(self, heads: Heads) -> int:
        """Spans of a prompt's attention that run in parallel: `spans_at_once` of attention.py."""
        step, kv, wide = self.step, heads.n_kv_heads, max(heads.head_dim_k, heads.head_dim_v)
        group = heads.n_heads // kv

        def programs(size: int) -> int:
            return (step.tokens * step.sequences // size + step.sequences) * kv

        size = max((size for size in _TILES if size * group <= 64), default=0)
        narrow = heads.head_dim_k == heads.head_dim_v == 128 and not heads.softcap
        plain = self._types in (("f16", "f16"), ("bf16", "bf16"))
        takes = self._hopper and plain and narrow and size * group > 32
        if takes and programs(size) >= _BLOCKS:
            return 0
        finest = {kind if kind in ("f32", "bf16") else "f16" for kind in self._types}
        queries = 32 if len(finest) > 1 or "f32" in finest else 64 if wide > 128 else 128
        size = _TILES[group * _TILES[1] <= queries]
        pages = max(1 << (-(-step.context // 16) - 1).bit_length(), _LEAST_PAGES)
        most = (pages * 16 - 1) // _SPAN + 2
        few = programs(size)
        return min(1 + -(-2 * _FULL // few), most) if few < _FULL else 0

    def recur(self, x: Shape, layer: Walked, states: Any, state: int, log: int) -> Shape:
        n = x.shape[0]
        mixed = Shape(self, n, layer.in_cols)
        out = Shape(self, n, layer.out_cols)
        if self.step.tokens > 1:
            Shape(self, n, layer.out_cols // max(layer.dk, 64) * _RELATED)
        del mixed
        return out


class TorchArena:
    """Memory as torch takes it of a GPU: in segments, which are cut up and stay."""

    def __init__(self) -> None:
        self.held = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._taken: dict[int, tuple[bool, int, int, int]] = {}
        self._segments = 0

    def take(self, key: int, floats: int) -> None:
        """An array is made: of the smallest piece that is free and large enough."""
        size = -(-floats * 4 // _ROUND) * _ROUND
        small = size <= _SMALL
        free = self._free[small]
        fitting = min((piece for piece in free if piece[0] >= size), default=None)
        if fitting is None:
            fitting = self._segment(size, small)
        else:
            free.remove(fitting)
        whole, segment, at = fitting
        if whole - size >= (_ROUND if small else _SMALL + 1):
            free.append((whole - size, segment, at + size))
            whole = size
        self._taken[key] = small, whole, segment, at

    def _segment(self, size: int, small: bool) -> tuple[int, int, int]:
        whole = 2 * _MIB if small else _LARGE if size < _OWN else -(-size // (2 * _MIB)) * 2 * _MIB
        self.held += whole
        self._segments += 1
        return whole, self._segments, 0

    def give(self, key: int) -> None:
        """An array is gone; its piece is joined to free ones beside it."""
        small, size, segment, at = self._taken.pop(key)
        free = self._free[small]
        for piece in list(free):
            if piece[1] == segment and piece[2] in (at - piece[0], at + size):
                free.remove(piece)
                size, at = size + piece[0], min(at, piece[2])
        free.append((size, segment, at))

    def run(self, traces: Iterable[Trace]) -> None:
        """What traces take and give, one after the other."""
        for trace in traces:
            for key, floats in trace:
                self.take(key, floats) if floats else self.give(key)
