"""The table of operations that each device implements, in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.ops.handles import (
    Array,
    Float32,
    Heads,
    HeadsHandle,
    Int32,
    Int64,
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

if TYPE_CHECKING:
    from quire.ops.passing import Passage


class ArrayOps(Protocol):
    """Arrays: from the host and back, their parts, what is done to each of their values."""

    def vector(self, values: Float32) -> Array:
        """A one-row array from host values."""

    def array(self, values: Float32) -> Array:
        """An array from host values: a matrix, or one row."""

    def numpy(self, x: Array) -> Float32:
        """The array's values on the host, valid while it lives."""

    def take_rows(self, x: Array, rows: Int32) -> Array:
        """Some rows of x."""

    def columns(self, x: Array, start: int, count: int) -> Array:
        """A copy of some columns."""

    def add_norm(self, into: Array, x: Array, weight: Array, eps: float) -> None:
        """Adds rms_norm(x) · weight to `into`."""

    def gated_norm(
        self, x: Array, gate: Array, weight: Array, eps: float, group: int, gate_first: bool
    ) -> Array:
        """rms_norm over groups of columns, times weight, times silu(gate).

        `gate_first`: rms_norm(x * silu(gate)) * weight instead. There are as many weights as
        columns in a group, or as columns.
        """

    def gate_sigmoid(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate), in place."""

    def add_gated(self, into: Array, y: Array, gate: Array) -> None:
        """into += sigmoid(gate) · y, with one gate for each row."""

    def softcap(self, x: Array, cap: float) -> None:
        """Turns x into cap · tanh(x / cap), in place."""

    @property
    def compute_bytes(self) -> int:
        """Bytes held for arrays."""

    def trim(self) -> None:
        """Returns to the system what no array uses."""


class MatrixOps(Protocol):
    """Products with weights."""

    def pack(self, parts: Sequence[Part]) -> Matrix:
        """One matrix from parts stacked along rows, in the device's tile format."""

    def expect(self, n_bytes: int) -> None:
        """So many bytes of matrices are about to be packed: a device may take them in one piece."""

    def passage(self, n_bytes: int) -> Passage:
        """Two rooms of so many bytes that matrices pass through, taken when they are first used."""

    def packed_bytes(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """What `pack` would hold for parts of these ggml types, rows and columns."""

    def embed(self, table: Matrix, ids: Int32, scale: float = 1.0) -> Array:
        """Rows of a matrix by id, times scale."""

    def linear(
        self, x: Array, w: Matrix, norm: Array | None = None, eps: float = 0.0, *,
        bias: Array | None = None, into: Array | None = None,
    ) -> Array:  # fmt: skip
        """w · x + bias, or of rms_norm(x); added to `into` (not x) and returned if given."""

    def linear_int16(self, x: Array, w: Matrix, norm: Array, eps: float) -> Array:
        """w · rms_norm(x) with 16 bits of each activation instead of 8.

        For the product that ends a model: nothing after it evens out its error.
        """

    def network(
        self, x: Array, gate_up: Matrix, down: Matrix, norm: Array, eps: float, act: int,
        into: Array | None = None,
    ) -> Array:  # fmt: skip
        """down · (act(gate) · up), with gate and up of rms_norm(x); added to `into` if given.

        `gate_up` has the rows of gate, then as many of up.
        """

    def experts(
        self, x: Array, router: Matrix, gate_up: Matrix, down: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float, into: Array,
    ) -> Array:  # fmt: skip
        """Adds to `into` what the `n_used` likeliest experts make of rms_norm(x).

        The experts' matrices have one part per tensor and expert: all of the first tensor's, then
        the next one's. `normalize` lets the chosen experts' shares add up to `scale`.
        """

    def experts_in(
        self, x: Array, router: Matrix, gate_up: Matrix, n_used: int, *,
        norm: Array, eps: float, normalize: bool, scale: float,
    ) -> tuple[Array, Array]:  # fmt: skip
        """The first half of `experts`, for a `down` on another device: the choice, and the middle.

        The choice has a row for each token: numbers of experts, then their shares. The middle,
        act(gate) · up, has one for each of a token's experts, token by token.
        """

    def experts_out(
        self, middle: Array, chosen: Array, count: int, down: Matrix, into: Array
    ) -> Array:
        """The second half: adds to `into` what `down` of the chosen of `count` experts makes."""


class AttentionOps(Protocol):
    """Attention over pages."""

    def rope(self, rope: Rope) -> RopeHandle:
        """The handle of a rotary embedding."""

    def rope_table(self, rope: RopeHandle, positions: Int32) -> Array:
        """Cosines and sines for each position, shared by the layers of a step."""

    def heads(
        self, heads: Heads, type_k: str, type_v: str, q_norm: Array | None, k_norm: Array | None,
        eps: float,
    ) -> HeadsHandle:  # fmt: skip
        """The handle of a layer's attention; the norms are per head and may be None."""

    def pages(self, view: PageTables, base: int, positions: Int32, seq_rows: Int32) -> Pages:
        """One group's pages as the kernels of a step see them; page 0 lies at `base`."""

    def attention(
        self, qkv: Array, heads: HeadsHandle, pages: Pages, rope: Array | None, k_offset: int,
        v_offset: int, store: bool = True,
    ) -> Array:  # fmt: skip
        """Norms and rotates q and k, stores k and v in their pages and attends; qkv is used up.

        `store=False` is for a layer that reads another layer's keys and values: qkv is then q
        alone, and the pages hold the keys and values of these tokens already.
        """


class RecurrentOps(Protocol):
    """Layers that remember a state."""

    def delta_net(
        self, n_k: int, n_v: int, dk: int, dv: int, conv: Float32, conv_bias: Float32 | None,
        ssm_a: Float32, dt_bias: Float32, tiled: bool = False,
    ) -> Recurrent:  # fmt: skip
        """A gated delta net; its input is [q | k | v | b | a], `ssm_a` is -exp(A_log).

        Value head h reads key head h // (n_v / n_k), or h % n_k where heads are tiled.
        """

    def ssd(
        self, n_heads: int, n_groups: int, head_dim: int, state_dim: int, conv: Float32,
        conv_bias: Float32 | None, ssm_a: Float32, dt_bias: Float32, d: Float32,
        dt_limits: tuple[float, float] = (0.0, np.inf),
    ) -> Recurrent:  # fmt: skip
        """A Mamba-2 layer; its input is [x | B | C | dt], `ssm_a` is -exp(A_log)."""

    def short_conv(self, conv: Float32, conv_bias: Float32 | None = None) -> Recurrent:
        """A gated short convolution; its input is [B | C | x]."""

    def states(self, view: StateTables, state_base: int, log_base: int, seq_rows: Int32) -> States:
        """One recurrent group's states and logs as the kernels of a step see them."""

    def recur(
        self, x: Array, layer: Recurrent, states: States, state_offset: int, log_offset: int
    ) -> Array:
        """Takes tokens into their logs or states, and returns the layer's outputs."""


class PageOps(Protocol):
    """Work on pages by id, between steps: page i of a range lies at base + i · page_bytes."""

    @property
    def page_layout(self) -> str:
        """A name for the order of bytes inside pages and logs; pages of one name are the same."""

    @property
    def folds_at_positions(self) -> bool:
        """Whether outputs have equal bits only if logs are folded at multiples of their length."""

    def copy_pages(self, base: int, page_bytes: int, sources: Int32, targets: Int32) -> None:
        """Copies whole pages; no target may be a source, or a target twice."""

    def rotate_pages(
        self, heads: HeadsHandle, rope: RopeHandle, base: int, page_bytes: int, page_tokens: int,
        pages: Int32, deltas: Int32, k_offsets: Int64,
    ) -> None:  # fmt: skip
        """Turns stored keys on by deltas[i, slot] positions in each of these pages."""

    def move_tokens(
        self, heads: HeadsHandle, base: int, page_bytes: int, page_tokens: int,
        from_pages: Int32, from_slots: Int32, to_pages: Int32, to_slots: Int32,
        k_offsets: Int64, v_offsets: Int64,
    ) -> None:  # fmt: skip
        """Copies tokens, one after the other, from a slot of a page to a slot of a page."""

    def fold(
        self, layers: Sequence[Recurrent], offsets: Sequence[tuple[int, int]],
        state_base: int, state_page_bytes: int, log_base: int, log_page_bytes: int, log_stride: int,
        state_in: Int32, log: Int32, n_entries: Int32, state_out: Int32,
    ) -> None:  # fmt: skip
        """Replays log pages on state pages (-1: zeros) into other state pages, in all layers.

        No page that one fold writes may be read or written by another.
        """

    def state_parts(self, layer: Recurrent) -> tuple[int, int, int, int, int, int] | None:
        """Floats of a convolution's tail, heads, dk, dv, floats of a token's raw inputs and of what
        is derived from them; None where pages are in the order of CPUs, which others know.
        """

    def derive(
        self, layers: Sequence[Recurrent], offsets: Sequence[tuple[int, int]],
        state_base: int, state_page_bytes: int, log_base: int, log_page_bytes: int, log_stride: int,
        state_in: Int32, log: Int32, n_entries: Int32,
    ) -> None:  # fmt: skip
        """Completes the first entries of log pages, which have raw inputs alone, in all layers."""


class SamplingOps(Protocol):
    """From logits to tokens."""

    def sampler(
        self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
        repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0, bias_ids: Int32 | None = None,
        bias_values: Float32 | None = None,
    ) -> Sampler:  # fmt: skip
        """A sampler for one generation; 0 turns top_k off."""

    def sample(
        self, logits: Array, rows: Int32, samplers: list[Sampler], uniforms: NDArray[np.float64],
        masks: NDArray[np.uint32] | None = None,
    ) -> Int32:  # fmt: skip
        """A token for each of these rows, by its sampler and its random number in [0, 1).

        Masks are rows of bits, one per token, that allow it.
        """

    def logprobs(self, logits: Array, ids: Int32, top: int) -> tuple[Float32, Int32, Float32]:
        """Log-probabilities of ids, and the likeliest tokens with theirs, row by row."""


class Ops(
    ArrayOps, MatrixOps, AttentionOps, RecurrentOps, PageOps, SamplingOps, Protocol
):  # fmt: skip
    """What a device can do. A call with wrong sizes raises `Refused` before anything is done."""

    @property
    def name(self) -> str:
        """The device and its instruction set, for people."""

    @property
    def arithmetic(self) -> str:
        """A name for how it computes: the same inputs have the same bits under one name."""
