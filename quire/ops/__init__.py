"""The operations a model is made of, as one table that each device implements.

Models see arrays and matrices as opaque handles of their device and pass them from one operation
to the next, so the same model file runs on every device. `reference.py` says in NumPy what each
operation means; `cpu.py` runs it in C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any
"""A float32 matrix [rows, cols] on the device."""
Matrix = Any
"""A weight [rows, cols] in the device's own tile format."""
Pages = Any
"""One group's pages as the kernels of a step see them."""
States = Any
"""One recurrent group's states and logs as the kernels of a step see them."""
Recurrent = Any
"""A recurrent layer. Its `state_bytes` and `log_bytes` are what a model declares to memory."""
Part = tuple[int, int, int, NDArray[np.uint8]]
"""Rows of a matrix as the file has them: ggml type number, rows, cols, bytes."""


class Refused(ValueError):
    """Sizes or values that a device's kernels cannot work with."""


SILU_MUL = 1
"""`act` of linear: x is [gate | up] and silu(gate) * up is what is multiplied."""
GELU_MUL = 2
"""The same with gelu (tanh approximation)."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `n_rot` dimensions; `neox` pairs i with i + n_rot/2."""

    n_rot: int
    freqs: NDArray[np.float64]
    neox: bool
    mscale: float = 1.0


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention."""

    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int = 0
    softcap: float = 0.0


class Ops(Protocol):
    """What a device can do."""

    @property
    def name(self) -> str:
        """The device and its instruction set, for people."""

    def pack(self, parts: Sequence[Part]) -> Matrix:
        """One matrix from parts stacked along rows, in the device's tile format."""

    def vector(self, values: NDArray[np.float32]) -> Array:
        """A one-row array from host values."""

    def array(self, values: NDArray[np.float32]) -> Array:
        """An array from host values: a matrix, or one row."""

    def numpy(self, x: Array) -> NDArray[np.float32]:
        """The array's values on the host, valid while it lives."""

    def rope(self, rope: Rope) -> Any:
        """The handle of a rotary embedding."""

    def heads(
        self, heads: Heads, type_k: str, type_v: str, q_norm: Array, k_norm: Array, eps: float
    ) -> Any:
        """The handle of a layer's attention; the norms are per head and may be None."""

    def pages(self, view: Any, positions: NDArray[np.int32], seq_rows: NDArray[np.int32]) -> Pages:
        """One group's pages as the kernels of a step see them."""

    def states(self, view: Any, seq_rows: NDArray[np.int32]) -> States:
        """One recurrent group's states and logs as the kernels of a step see them."""

    def delta_net(
        self, n_k: int, n_v: int, dk: int, dv: int, conv: NDArray[np.float32],
        conv_bias: NDArray[np.float32] | None, ssm_a: NDArray[np.float32],
        dt_bias: NDArray[np.float32], tiled: bool = False,
    ) -> Recurrent:  # fmt: skip
        """A gated delta net; its input is [q | k | v | b | a], `ssm_a` is -exp(A_log).

        Value head h reads key head h // (n_v / n_k), or h % n_k where heads are tiled.
        """

    def ssd(
        self, n_heads: int, n_groups: int, head_dim: int, state_dim: int,
        conv: NDArray[np.float32], conv_bias: NDArray[np.float32] | None,
        ssm_a: NDArray[np.float32], dt_bias: NDArray[np.float32], d: NDArray[np.float32],
        dt_limits: tuple[float, float] = (0.0, np.inf),
    ) -> Recurrent:  # fmt: skip
        """A Mamba-2 layer; its input is [x | B | C | dt], `ssm_a` is -exp(A_log)."""

    def short_conv(
        self, conv: NDArray[np.float32], conv_bias: NDArray[np.float32] | None = None
    ) -> Recurrent:
        """A gated short convolution; its input is [B | C | x]."""

    def recur(
        self, x: Array, layer: Recurrent, states: States, state_offset: int, log_offset: int
    ) -> Array:
        """Takes tokens into their logs or states, and returns the layer's outputs."""

    def fold(
        self, layers: Sequence[Recurrent], offsets: Sequence[tuple[int, int]],
        state_page_bytes: int, log_page_bytes: int, log_stride: int, state_in: int, log: int,
        n_entries: int, state_out: int,
    ) -> None:  # fmt: skip
        """Replays a log page on a state page (address 0: zeros) into another, in all layers."""

    def gated_norm(
        self, x: Array, gate: Array, weight: Array, eps: float, group: int, gate_first: bool
    ) -> Array:
        """rms_norm over groups of columns, times weight, times silu(gate).

        `gate_first`: rms_norm(x * silu(gate)) * weight instead. There are as many weights as
        columns in a group, or as columns.
        """

    def gate_sigmoid(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate), in place."""

    def columns(self, x: Array, start: int, count: int) -> Array:
        """A copy of some columns."""

    def embed(self, table: Matrix, ids: NDArray[np.int32], scale: float = 1.0) -> Array:
        """Rows of a matrix by id, times scale."""

    def linear(
        self, x: Array, w: Matrix, norm: Array | None = None, eps: float = 0.0, act: int = 0,
        bias: Array | None = None, into: Array | None = None,
    ) -> Array:  # fmt: skip
        """w · prologue(x) + bias; added to `into` and returned when that is given."""

    def linear_fine(self, x: Array, w: Matrix, norm: Array, eps: float) -> Array:
        """w · rms_norm(x) with 16 bits of each activation instead of 8.

        For the product that ends a model: nothing after it evens out its error.
        """

    def add_norm(self, into: Array, x: Array, weight: Array, eps: float) -> None:
        """Adds rms_norm(x) · weight to `into`."""

    def softcap(self, x: Array, cap: float) -> None:
        """Turns x into cap · tanh(x / cap), in place."""

    def experts(
        self, x: Array, router: Matrix, gate_up: Matrix, down: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float, into: Array,
    ) -> Array:  # fmt: skip
        """Adds to `into` what the `n_used` likeliest experts make of rms_norm(x).

        The experts' matrices have one part per tensor and expert: all of the first tensor's, then
        the next one's. `normalize` lets the chosen experts' shares add up to `scale`.
        """

    def add_gated(self, into: Array, y: Array, gate: Array) -> None:
        """into += sigmoid(gate) · y, with one gate for each row."""

    def take_rows(self, x: Array, rows: NDArray[np.int32]) -> Array:
        """Some rows of x."""

    def rope_table(self, rope: Any, positions: NDArray[np.int32]) -> Array:
        """Cosines and sines for each position, shared by the layers of a step."""

    def attention(
        self, qkv: Array, heads: Any, pages: Pages, rope: Array, k_offset: int, v_offset: int
    ) -> Array:
        """Rotates q and k, stores k and v in their pages and attends; qkv is used up."""

    def rotate_pages(
        self, heads: Any, rope: Any, address: int, page_bytes: int, page_tokens: int,
        pages: NDArray[np.int32], deltas: NDArray[np.int32], k_offsets: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Turns stored keys on by deltas[i, slot] positions in each of these pages."""

    def move_tokens(
        self, heads: Any, from_page: int, to_page: int, page_bytes: int, page_tokens: int,
        from_slots: NDArray[np.int32], to_slots: NDArray[np.int32],
        k_offsets: NDArray[np.int64], v_offsets: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Copies tokens from slots of one page, by address, to slots of another."""

    def sampler(self, *settings: Any) -> Any:
        """A sampler for one generation; it counts the tokens that penalties are about."""

    def sample(
        self, logits: Array, rows: NDArray[np.int32], samplers: list[Any],
        uniforms: NDArray[np.float64], masks: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.int32]:  # fmt: skip
        """A token for each of these rows, by its sampler and its random number."""

    def logprobs(
        self, logits: Array, ids: NDArray[np.int32], top: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Log-probabilities of ids, and the likeliest tokens with theirs, row by row."""

    @property
    def compute_bytes(self) -> int:
        """Bytes held for arrays."""

    def trim(self) -> None:
        """Returns to the system what no array uses."""
