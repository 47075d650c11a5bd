"""The CPU's operations: a thin table over the C++ extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import quire.ops._cpu as _cpu
from quire.ops import Array, Heads, Matrix, Pages, Part, Recurrent, Rope, States


class CpuOps:
    """Operations on the CPU, with their own persistent threads.

    `exact=True` keeps activations in float32 instead of int8. Hot operations are the extension's
    own bound methods, so that a call costs no Python frame.
    """

    def __init__(self, threads: int, exact: bool = False, isa: str = "auto") -> None:
        self.cpu = cpu = _cpu.Cpu(threads, isa, exact)
        self.embed: Any = cpu.embed
        self.linear: Any = cpu.linear
        self.linear_fine: Any = cpu.linear_fine
        self.add_norm: Any = cpu.add_norm
        self.softcap: Any = cpu.softcap
        self.experts: Any = cpu.experts
        self.add_gated: Any = cpu.add_gated
        self.take_rows: Any = cpu.take_rows
        self.rope_table: Any = cpu.rope_table
        self.attention: Any = cpu.attention
        self.rotate_pages: Any = cpu.rotate_pages
        self.move_tokens: Any = cpu.move_tokens
        self.recur: Any = cpu.recur
        self.fold: Any = cpu.fold
        self.gated_norm: Any = cpu.gated_norm
        self.gate_sigmoid: Any = cpu.gate_sigmoid
        self.columns: Any = cpu.columns
        self.sample: Any = cpu.sample
        self.logprobs: Any = cpu.logprobs

    @property
    def name(self) -> str:
        """The device and its instruction set, for people."""
        return f"cpu ({self.cpu.isa}, {self.cpu.threads} threads)"

    @property
    def compute_bytes(self) -> int:
        """Bytes held for arrays."""
        return int(self.cpu.arena_bytes)

    def trim(self) -> None:
        """Returns to the system what no array uses."""
        self.cpu.trim()

    def pack(self, parts: Sequence[Part]) -> Matrix:
        """One matrix from parts stacked along rows, in the tiles of this instruction set."""
        return self.cpu.pack(list(parts))

    def vector(self, values: NDArray[np.float32]) -> Array:
        """A one-row array from host values."""
        return self.cpu.array(np.ascontiguousarray(values, np.float32).reshape(1, -1))

    def numpy(self, x: Array) -> NDArray[np.float32]:
        """The array's values, without a copy."""
        view: NDArray[np.float32] = x.numpy()
        return view

    def rope(self, rope: Rope) -> Any:
        """The handle of a rotary embedding."""
        return _cpu.Rope(rope.n_rot, rope.freqs, rope.neox, rope.mscale)

    def array(self, values: NDArray[np.float32]) -> Array:
        """An array from host values: a matrix, or one row."""
        return self.cpu.array(np.ascontiguousarray(np.atleast_2d(values), np.float32))

    def sampler(self, *settings: Any) -> Any:
        """A sampler for one generation; it counts the tokens that penalties are about."""
        return _cpu.Sampler(*settings)

    def pages(self, view: Any, positions: NDArray[np.int32], seq_rows: NDArray[np.int32]) -> Pages:
        """One group's pages as the kernels of a step see them."""
        return _cpu.Pages(
            view.address, view.page_bytes, view.page_tokens, view.tables, view.first, view.length,
            view.slots, positions, seq_rows, view.slot_positions,
        )  # fmt: skip

    def heads(
        self, heads: Heads, type_k: str, type_v: str, q_norm: Array, k_norm: Array, eps: float
    ) -> Any:
        """The handle of a layer's attention; the norms are per head and may be None."""
        return _cpu.AttentionSpec(
            heads.n_heads, heads.n_kv_heads, heads.head_dim_k, heads.head_dim_v, type_k, type_v,
            heads.scale, heads.window, heads.softcap, q_norm, k_norm, eps,
        )  # fmt: skip

    def states(self, view: Any, seq_rows: NDArray[np.int32]) -> States:
        """One recurrent group's states and logs as the kernels of a step see them."""
        return _cpu.States(
            view.state_address, view.state_page_bytes, view.log_address, view.log_page_bytes,
            view.log_stride, view.layout.log_tokens, view.state_in, view.state_out, view.log_in,
            view.log_length, view.log_out, view.tail, seq_rows,
        )  # fmt: skip

    def delta_net(
        self, n_k: int, n_v: int, dk: int, dv: int, conv: NDArray[np.float32],
        conv_bias: NDArray[np.float32] | None, ssm_a: NDArray[np.float32],
        dt_bias: NDArray[np.float32], tiled: bool = False,
    ) -> Recurrent:  # fmt: skip
        """A gated delta net; its input is [q | k | v | b | a], `ssm_a` is -exp(A_log)."""
        return _cpu.RecurrentLayer.delta_net(
            n_k, n_v, dk, dv, conv, conv_bias, ssm_a, dt_bias, tiled
        )

    def ssd(
        self, n_heads: int, n_groups: int, head_dim: int, state_dim: int,
        conv: NDArray[np.float32], conv_bias: NDArray[np.float32] | None,
        ssm_a: NDArray[np.float32], dt_bias: NDArray[np.float32], d: NDArray[np.float32],
        dt_limits: tuple[float, float] = (0.0, np.inf),
    ) -> Recurrent:  # fmt: skip
        """A Mamba-2 layer; its input is [x | B | C | dt], `ssm_a` is -exp(A_log)."""
        return _cpu.RecurrentLayer.ssd(
            n_heads, n_groups, head_dim, state_dim, conv, conv_bias, ssm_a, dt_bias, d, *dt_limits
        )

    def short_conv(
        self, conv: NDArray[np.float32], conv_bias: NDArray[np.float32] | None = None
    ) -> Recurrent:
        """A gated short convolution; its input is [B | C | x]."""
        return _cpu.RecurrentLayer.short_conv(conv, conv_bias)
