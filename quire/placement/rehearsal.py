"""A model run without weights: its own layers over operations that only note what they take.

So what arrays will hold is known before anything is loaded, from the code that will run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.models.loader import Rows, loaded_type
from quire.models.tensor_check import TensorCheck, rows_taken
from quire.ops import Heads, Ops
from quire.placement.arena import Event, Trace
from quire.placement.cuda_sizes import format_of
from quire.placement.kernels import Kernels, Step, Tiles, fold_floats, panel_tokens, walks

_DENSE = (0, 1, 30)  # ggml's numbers of F32, F16 and BF16


class Shape:
    """An array that is only noted."""

    def __init__(self, ops: RehearsedOps, rows: int, cols: int) -> None:
        self.shape = rows, cols
        self.nbytes = 4 * rows * cols
        self._ops, self._key = ops, ops.take(rows * cols)
        self.held: object = None
        """What stays as long as this, or until it is read."""
        self.later = 0
        """Floats that are taken for a moment when it is first read."""

    def __del__(self) -> None:
        self._ops.events.append((self._key, 0))


@dataclass(frozen=True)
class MatrixShape:
    """A matrix that is not there: its shape, and which types its parts have."""

    rows: int
    cols: int
    nbytes: int
    quantized: bool
    dense: bool
    formats: int
    """Runs of parts that a GPU holds in one format."""


class RehearsedLoader(TensorCheck):
    """Gives shapes for matrices, and notes vectors."""

    def matrix(self, cols: int, *parts: Rows, exact: bool = False) -> Any:
        """The shape, and what types it is made of."""
        found = super().matrix(cols, *parts, exact=exact)
        return self._with_types(found, parts, exact)

    def experts(self, count: int, cols: int, *parts: Rows) -> Any:
        """The same of experts."""
        return self._with_types(super().experts(count, cols, *parts), parts, False)

    def _with_types(self, found: Any, parts: Sequence[Rows], exact: bool) -> MatrixShape:
        kinds = []
        for name, *_ in parts:
            tensor = self._file.tensors[name]
            kinds.append(int(tensor.type if exact else loaded_type(name, tensor, self._quantize)))
        dense = {kind in _DENSE for kind in kinds}
        formats = len(list(itertools.groupby(kinds, format_of)))
        sizes = found.rows, found.cols, found.nbytes
        return MatrixShape(*sizes, False in dense, True in dense, formats)

    def vector(self, *parts: Rows) -> Any:
        """A shape that stays."""
        super().vector(*parts)
        sizes = [rows_taken(rows, where) for _, rows, *where in parts]
        assert isinstance(self._ops, RehearsedOps)
        return Shape(self._ops, 1, sum(sizes))


class RehearsedOps:
    """Operations that return shapes. What they take for themselves is noted for a CPU."""

    def __init__(self, real: Ops, kernels: Kernels | None) -> None:
        self._real, self._kernels = real, kernels
        self._keys = itertools.count()
        self.events: list[Event] = []
        self.step = Step(1, 1, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # descriptions of layers, sizes of matrices

    def take(self, floats: int) -> int:
        """Notes a new array."""
        key = next(self._keys)
        self.events.append((key, max(floats, 1)))
        return key

    def noted(self) -> Trace:
        """What was noted since the last call, with numbers that begin at 0."""
        events, self.events = self.events, []
        known: dict[int, int] = {}
        return tuple((known.setdefault(key, len(known)), floats) for key, floats in events)

    # -- arrays -----------------------------------------------------------------------------------

    def vector(self, values: Any) -> Shape:
        return Shape(self, 1, values.size)

    def array(self, values: Any) -> Shape:
        return Shape(self, *values.shape)

    def take_rows(self, x: Shape, rows: Any) -> Shape:
        return Shape(self, len(rows), x.shape[1])

    def columns(self, x: Shape, start: int, count: int) -> Shape:
        return Shape(self, x.shape[0], count)

    def add_norm(self, into: Shape, x: Shape, weight: Any, eps: float) -> None:
        pass

    def gated_norm(self, x: Shape, *_: Any) -> Shape:
        return Shape(self, *x.shape)

    def gate_sigmoid(self, x: Shape, gate: Shape) -> Shape:
        return x

    def add_gated(self, into: Shape, y: Shape, gate: Shape) -> None:
        pass

    def softcap(self, x: Shape, cap: float) -> None:
        pass

    # -- products ---------------------------------------------------------------------------------

    def embed(self, table: MatrixShape, ids: Any, scale: float = 1.0) -> Shape:
        out = Shape(self, len(ids), table.cols)
        if k := self._kernels:
            Shape(self, k.threads, table.cols * k.lanes)
        return out

    def network(
        self, x: Shape, gate_up: MatrixShape, down: MatrixShape, norm: Any, eps: float, act: int,
        into: Shape | None = None,
    ) -> Shape:  # fmt: skip
        return self.linear(self.linear(x, gate_up, norm, eps), down, into=into)

    def linear(
        self, x: Shape, w: MatrixShape, norm: Any = None, eps: float = 0.0, *,
        bias: Any = None, into: Shape | None = None,
    ) -> Shape:  # fmt: skip
        out = into or Shape(self, x.shape[0], w.rows)
        self._panels(x.shape[0], w)
        return out

    def linear_int16(self, x: Shape, w: MatrixShape, norm: Any, eps: float) -> Shape:
        out, k, n = Shape(self, x.shape[0], w.rows), self._kernels, x.shape[0]
        if k and w.quantized and not k.exact:
            rows = Shape(self, 2 * n, w.cols)
            self._panels(2 * n, w)
            del rows
        else:
            self._panels(n, w)
        return out

    def experts(
        self, x: Shape, router: MatrixShape, gate_up: MatrixShape, down: MatrixShape, n_used: int,
        *, into: Shape, **_: Any,
    ) -> Shape:  # fmt: skip
        n, width = x.shape
        pairs = n * n_used
        middle = Shape(self, pairs, 2 * down.cols)
        enters = Shape(self, n, width), Shape(self, n, router.rows)
        self._panels(n, router, exact=True)
        self._panels(pairs, gate_up, shared=True)
        if self._kernels:
            del enters  # csrc/experts.cpp lets go of them before it leaves
        rows = Shape(self, pairs, width)
        self._panels(pairs, down, shared=True)
        if not self._kernels:  # what gate and up make, in 16 bits
            Shape(self, pairs, down.cols // 2)
            del enters
        del rows, middle
        return into

    def _panels(self, n: int, w: MatrixShape, exact: bool = False, shared: bool = False) -> None:
        """Room for the activations of a product, in a panel of each thread's: csrc/panels.h."""
        if (k := self._kernels) and n:
            exact = exact or k.exact
            quantized = w.cols // 32 * k.record if w.quantized and not exact else 0
            floats = w.cols * 4 if w.dense or exact else 0
            room = w.cols * (k.lanes if exact else 1)
            if not shared:
                n = k.threads * panel_tokens(n, k.threads, quantized + floats, w.rows)
            Shape(self, 1, n * (quantized + floats) // 4 + k.threads * room)

    # -- attention --------------------------------------------------------------------------------

    def heads(self, heads: Heads, *_: Any) -> Heads:
        return heads

    def rope_table(self, rope: Any, positions: Any) -> Shape:
        return Shape(self, len(positions), self.rotated)

    rotated = 0
    """Dimensions that the latest rope turns."""

    def rope(self, rope: Any) -> Any:
        self.rotated = max(self.rotated, rope.n_rot)
        return rope

    def attention(
        self, qkv: Shape, heads: Heads, pages: Any, rope: Any, k: int, v: int, store: bool = True
    ) -> Shape:
        out = Shape(self, qkv.shape[0], heads.n_heads * heads.head_dim_v)
        if kernels := self._kernels:
            tiles = Tiles(heads, self.step, kernels.threads)
            floats = tiles.partial + tiles.sums
            held = Shape(self, kernels.threads, tiles.scratch), Shape(self, 1, floats)
            del held
        return out

    # -- recurrence -------------------------------------------------------------------------------

    def delta_net(self, n_k: int, n_v: int, dk: int, dv: int, conv: Any, *rest: Any) -> Walked:
        real = self._real.delta_net(n_k, n_v, dk, dv, conv, *rest)
        return Walked.of(real, len(conv) + 2 * n_v + n_k, dk)

    def ssd(self, heads: int, groups: int, dim: int, dk: int, conv: Any, *rest: Any) -> Walked:
        real = self._real.ssd(heads, groups, dim, dk, conv, *rest)
        return Walked.of(real, len(conv) + 2 * heads + groups, dk)

    def short_conv(self, conv: Any, *rest: Any) -> Walked:
        return Walked.of(self._real.short_conv(conv, *rest), 0, 0)

    def state_parts(self, layer: Walked) -> None:
        """Of no use here."""

    def fold_logs(self, layers: Sequence[Walked], sequences: int) -> None:
        """Notes a fold of one full log of each sequence in all these layers."""
        if layers and (k := self._kernels):
            floats = fold_floats(sum(layer.prepared for layer in layers), sequences)
            self._walk(k, floats, max(layer.dk for layer in layers))

    def _walk(self, k: Kernels, floats: int, dk: int) -> None:
        """Room to prepare tokens, and for the states that threads walk: csrc/recurrent_work.h."""
        size = 1 << 12
        while size < floats:
            size *= 2
        held = Shape(self, 1, size), Shape(self, k.threads, k.slice * dk * 16)
        del held

    def recur(self, x: Shape, layer: Walked, states: Any, state: int, log: int) -> Shape:
        out = Shape(self, x.shape[0], layer.out_cols)
        if k := self._kernels:
            for tokens in walks(self.step):
                self._walk(k, tokens * layer.prepared, layer.dk)
        return out


@dataclass(frozen=True)
class Walked:
    """A recurrent layer, with what its kernels prepare of each token."""

    state_bytes: int
    log_bytes: int
    in_cols: int
    out_cols: int
    prepared: int
    dk: int

    @classmethod
    def of(cls, real: Any, prepared: int, dk: int) -> Walked:
        """One that a device described."""
        sizes = real.state_bytes, real.log_bytes, real.in_cols, real.out_cols
        return cls(*sizes, -(-prepared // 16) * 16, dk)
