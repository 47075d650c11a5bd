"""The CPU's operations: a thin table over the C++ extension."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import quire.ops._cpu as _cpu
from quire.ops import (
    Array,
    Float32,
    Heads,
    HeadsHandle,
    Int32,
    Matrix,
    Pages,
    PageTables,
    Part,
    Recurrent,
    Rope,
    RopeHandle,
    Sampler,
    States,
    StateTables,
)
from quire.ops.passing import InPlace, Passage


class CpuOps:
    """Operations on the CPU, with their own persistent threads.

    `exact=True` keeps activations in float32 instead of int8. Hot operations are the extension's
    own bound methods, so that a call costs no Python frame.
    """

    def __init__(self, threads: int, exact: bool = False, isa: str = "auto") -> None:
        self.cpu = cpu = _cpu.Cpu(threads, isa, exact)
        self.take_rows = cpu.take_rows
        self.columns = cpu.columns
        self.add_norm = cpu.add_norm
        self.gated_norm = cpu.gated_norm
        self.gate_sigmoid = cpu.gate_sigmoid
        self.add_gated = cpu.add_gated
        self.softcap = cpu.softcap
        self.embed = cpu.embed
        self.linear = cpu.linear
        self.linear_int16 = cpu.linear_int16
        self.experts = cpu.experts
        self.experts_in = cpu.experts_in
        self.experts_out = cpu.experts_out
        self.rope_table = cpu.rope_table
        self.attention = cpu.attention
        self.recur = cpu.recur
        self.copy_pages = cpu.copy_pages
        self.rotate_pages = cpu.rotate_pages
        self.move_tokens = cpu.move_tokens
        self.fold = cpu.fold
        self.sample = cpu.sample
        self.logprobs = cpu.logprobs

    @property
    def name(self) -> str:
        """The device and its instruction set, for people."""
        return f"cpu ({self.cpu.isa}, {self.cpu.threads} threads)"

    @property
    def arithmetic(self) -> str:
        """The instruction set and what activations are rounded to; threads change no bit."""
        return f"cpu {self.cpu.isa} {'f32' if self.cpu.exact else 'int8'}"

    @property
    def page_layout(self) -> str:
        """The order of bytes inside pages: keys and states in blocks of 16, on every CPU."""
        return "lanes16"

    @property
    def folds_at_positions(self) -> bool:
        """No: tokens are replayed, so where a log was folded changes no bit."""
        return False

    def state_parts(self, layer: Recurrent) -> None:
        """Nothing that others need to be told."""

    def derive(self, *_: object) -> None:
        """Logs have raw inputs and nothing else."""

    @property
    def compute_bytes(self) -> int:
        """Bytes held for arrays."""
        return self.cpu.arena_bytes

    def trim(self) -> None:
        """Returns to the system what no array uses."""
        self.cpu.trim()

    def vector(self, values: Float32) -> Array:
        """A one-row array from host values."""
        return self.cpu.array(np.ascontiguousarray(values, np.float32).reshape(1, -1))

    def array(self, values: Float32) -> Array:
        """An array from host values: a matrix, or one row."""
        return self.cpu.array(np.ascontiguousarray(np.atleast_2d(values), np.float32))

    def numpy(self, x: Array) -> Float32:
        """The array's values, without a copy."""
        assert isinstance(x, _cpu.Array)
        return x.numpy()

    def expect(self, n_bytes: int) -> None:
        """Matrices are mapped one by one, to the byte."""

    def passage(self, n_bytes: int) -> Passage:
        """Matrices that are packed again, and let go."""
        return InPlace(self)

    def pack(self, parts: Sequence[Part]) -> Matrix:
        """One matrix from parts stacked along rows, in the tiles of this instruction set."""
        return self.cpu.pack(list(parts))

    def packed_bytes(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """What `pack` would hold for parts of these types, rows and columns."""
        return self.cpu.packed_bytes(list(parts))

    def network(
        self, x: Array, gate_up: Matrix, down: Matrix, norm: Array, eps: float, act: int,
        into: Array | None = None,
    ) -> Array:  # fmt: skip
        """down · (act(gate) · up), with gate and up of rms_norm(x); added to `into` if given."""
        linear = self.cpu.linear
        return linear(linear(x, gate_up, norm, eps), down, None, 0.0, act, None, into)

    def rope(self, rope: Rope) -> RopeHandle:
        """The handle of a rotary embedding."""
        return RopeHandle(_cpu.Rope(rope.n_rot, rope.freqs, rope.neox, rope.mscale))

    def heads(
        self, heads: Heads, type_k: str, type_v: str, q_norm: Array | None, k_norm: Array | None,
        eps: float,
    ) -> HeadsHandle:  # fmt: skip
        """The handle of a layer's attention; the norms are per head and may be None."""
        return HeadsHandle(_cpu.AttentionSpec(
            heads.n_heads, heads.n_kv_heads, heads.head_dim_k, heads.head_dim_v, type_k, type_v,
            heads.scale, heads.window, heads.softcap, q_norm, k_norm, eps,
        ))  # fmt: skip

    def pages(self, view: PageTables, base: int, positions: Int32, seq_rows: Int32) -> Pages:
        """One group's pages as the kernels of a step see them."""
        return Pages(_cpu.Pages(
            base, view.page_bytes, view.page_tokens, view.tables, view.first, view.length,
            view.slots, positions, seq_rows, view.slot_positions,
        ))  # fmt: skip

    def states(self, view: StateTables, state_base: int, log_base: int, seq_rows: Int32) -> States:
        """One recurrent group's states and logs as the kernels of a step see them."""
        return States(_cpu.States(
            state_base, view.state_page_bytes, log_base, view.log_page_bytes, view.log_stride,
            view.layout.log_tokens, view.state_in, view.state_out, view.log_in, view.log_length,
            view.log_out, view.tail, seq_rows,
        ))  # fmt: skip

    def delta_net(
        self, n_k: int, n_v: int, dk: int, dv: int, conv: Float32, conv_bias: Float32 | None,
        ssm_a: Float32, dt_bias: Float32, tiled: bool = False,
    ) -> Recurrent:  # fmt: skip
        """A gated delta net; its input is [q | k | v | b | a], `ssm_a` is -exp(A_log)."""
        return _cpu.RecurrentLayer.delta_net(
            n_k, n_v, dk, dv, conv, conv_bias, ssm_a, dt_bias, tiled
        )

    def ssd(
        self, n_heads: int, n_groups: int, head_dim: int, state_dim: int, conv: Float32,
        conv_bias: Float32 | None, ssm_a: Float32, dt_bias: Float32, d: Float32,
        dt_limits: tuple[float, float] = (0.0, np.inf),
    ) -> Recurrent:  # fmt: skip
        """A Mamba-2 layer; its input is [x | B | C | dt], `ssm_a` is -exp(A_log)."""
        return _cpu.RecurrentLayer.ssd(
            n_heads, n_groups, head_dim, state_dim, conv, conv_bias, ssm_a, dt_bias, d, *dt_limits
        )

    def short_conv(self, conv: Float32, conv_bias: Float32 | None = None) -> Recurrent:
        """A gated short convolution; its input is [B | C | x]."""
        return _cpu.RecurrentLayer.short_conv(conv, conv_bias)

    def sampler(
        self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
        repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0, bias_ids: Int32 | None = None,
        bias_values: Float32 | None = None,
    ) -> Sampler:  # fmt: skip
        """A sampler for one generation; 0 turns top_k off."""
        return _cpu.Sampler(
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, bias_ids, bias_values,
        )  # fmt: skip
