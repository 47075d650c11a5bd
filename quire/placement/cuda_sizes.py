"""What matrices and logs take on a GPU, where neither it nor what computes on it is at hand.

A test on a GPU holds these sizes against those of `quire.ops.cuda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from quire.ops import Recurrent, Refused
from quire.ops.cpu import CpuOps

_DENSE = {0: 4, 1: 2, 30: 2}
_BLOCKS = {
    2: (4, 32, 2), 3: (4, 32, 2), 6: (8, 32, 1), 7: (8, 32, 2), 8: (8, 32, 1), 10: (4, 16, 2),
    11: (4, 16, 2), 12: (4, 32, 2), 13: (8, 32, 2), 14: (8, 16, 1), 20: (8, 32, 1), 23: (8, 32, 1),
}  # fmt: skip
"""By ggml's number of a type: bits, weights in a group, and float16 numbers of a group."""
_TILE, _UNIT = 16, 64
"""Rows and columns that lie together; what is missing of them is filled up."""


def format_of(kind: int) -> tuple[int, ...]:
    """What tells formats apart: parts of one are one matrix."""
    return (kind, _DENSE[kind]) if kind in _DENSE else _BLOCKS.get(kind, (kind,))


def _format(kind: int) -> tuple[int, ...]:
    if kind not in _DENSE and kind not in _BLOCKS:
        raise Refused(f"ggml type {kind} is not known on GPUs")
    return format_of(kind)


def packed_bytes(kind: int, rows: int, cols: int) -> int:
    """Bytes of rows of a ggml type on a GPU."""
    found = _format(kind)
    if kind in _DENSE:
        return rows * cols * found[1]
    bits, group, numbers = found
    unit = _TILE * (_UNIT * bits // 8 + _UNIT // group * 2 * numbers)
    return -(-rows // _TILE) * -(-cols // _UNIT) * unit


@dataclass(frozen=True)
class _Layer:
    """A recurrent layer of which only sizes are asked."""

    state_bytes: int
    log_bytes: int
    in_cols: int
    out_cols: int

    @classmethod
    def of(cls, host: Recurrent, derived: int) -> _Layer:
        """One whose logs have so many numbers more of each token: they are derived once."""
        return cls(host.state_bytes, host.log_bytes + 4 * derived, host.in_cols, host.out_cols)


class DescribedCuda(CpuOps):
    """Operations of a GPU that is only described: only sizes are asked of them."""

    def packed_bytes(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """What `pack` would hold for parts of these types, rows and columns."""
        runs = [list(run) for _, run in groupby(parts, key=lambda part: _format(part[0]))]
        return sum(packed_bytes(run[0][0], sum(r for _, r, _ in run), run[0][2]) for run in runs)

    def delta_net(self, n_k: int, n_v: int, dk: int, dv: int, *rest: Any, **how: Any) -> Recurrent:
        """A gated delta net."""
        host = super().delta_net(n_k, n_v, dk, dv, *rest, **how)
        return _Layer.of(host, n_k * dk + n_v * dv + n_v)

    def ssd(
        self, n_heads: int, n_groups: int, head_dim: int, state_dim: int, *rest: Any, **how: Any
    ) -> Recurrent:
        """A Mamba-2 layer."""
        host = super().ssd(n_heads, n_groups, head_dim, state_dim, *rest, **how)
        return _Layer.of(host, n_groups * state_dim + n_heads * head_dim + n_heads)
