"""What the kernels of a CPU take for themselves, beside what they are given and return."""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops import Heads

_LOG = 16  # tokens of a log, unless a model says otherwise
_MOST_FLOATS = 4 << 20  # that are prepared of logs at once


@dataclass(frozen=True)
class Kernels:
    """The figures of a CPU's kernels that what they take for themselves depends on."""

    threads: int
    exact: bool
    lanes: int
    record: int
    """Bytes of 32 quantised activations."""
    slice: int
    """Blocks of a state that a thread walks at once."""

    @classmethod
    def of(cls, isa: str, threads: int, exact: bool) -> Kernels:
        """By the name of an instruction set."""
        if isa.startswith("avx512"):
            return cls(threads, exact, 16, 52, 2)
        if isa == "avx-vnni":
            return cls(threads, exact, 8, 52, 1)
        arm = isa in ("neon-dotprod", "i8mm")
        return cls(threads, exact, 8, 48 if arm else 44, 1)


@dataclass(frozen=True)
class Step:
    """Tokens of a step: so many of each of so many sequences, which then have so many in all."""

    tokens: int
    sequences: int
    context: int


def panel_tokens(n: int, threads: int, token_bytes: int, rows: int) -> int:
    """Tokens of a thread's panel in a product of n with so many rows: csrc/panels.h."""
    most = max((384 << 10) // token_bytes // 4, 1) * 4
    share = -(-n // (4 * threads if rows < 8192 * threads else 4)) * 4
    return min(most, max(share, min(-(-n // 4) * 4, 32)))


def fold_floats(prepared: int, sequences: int) -> int:
    """Floats that are prepared when a full log of each sequence is folded, in all layers."""
    return min(prepared * _LOG * sequences, _MOST_FLOATS)


def walks(step: Step) -> list[int]:
    """Tokens that are walked: of a prompt 64 at once, then its tail; else those of a full log."""
    if step.tokens > _LOG:
        return [64 * step.sequences, _LOG // 2 * step.sequences]
    return [_LOG * step.sequences]


class Tiles:
    """What attention takes for itself: csrc/attention_plan.h and attention.cpp."""

    def __init__(self, heads: Heads, step: Step, threads: int) -> None:
        group = heads.n_heads // heads.n_kv_heads
        most = max(96 // group, 1)
        padded = -(-heads.head_dim_v // 16) * 16
        state = padded + 16
        n = min(max(step.tokens, step.sequences), most) * group
        self.scratch = -(-n * heads.head_dim_k // 16) * 16 + 6 * 128 + 2 * n * state
        self.scratch += 128 * (heads.head_dim_k + padded)
        tiles = []
        for first in range(0, step.tokens, most):
            rows = min(most, step.tokens - first)
            end = step.context - step.tokens + first + rows
            seen = end if not heads.window else min(end, heads.window + rows - 1)
            segments = (end - 1) // 128 + 1 - (end - seen) // 128
            tiles.append((rows, seen, segments))
        tiles *= step.sequences
        scores = sum(seen * rows for rows, seen, _ in tiles) * group * heads.n_kv_heads
        share = max(scores // (threads * 4), 1)
        partial = 0
        for rows, seen, segments in tiles:
            parts = min(max(seen * rows * group // share, 1), max(segments, 1))
            if threads > 1 and parts > 1:
                partial += heads.n_kv_heads * segments * rows * group
        self.partial = partial * state
        # What pages come to that several read together, a token each.
        self.sums = step.sequences * heads.n_heads * state if step.sequences > 1 else 0
