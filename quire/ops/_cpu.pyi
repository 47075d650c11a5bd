"""The types of the C++ extension. A handle must be one that this extension made."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.ops import handles
from quire.ops.handles import Float32, HeadsHandle, Int32, Int64, Part, Recurrent, RopeHandle

class Array:
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    def numpy(self) -> Float32: ...

class RopeTable(Array): ...

class Matrix:
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def formats(self) -> list[str]: ...
    def unpack(self) -> Float32: ...

class Rope:
    def __init__(
        self, n_rot: int, freqs: NDArray[np.float64], neox: bool, mscale: float = 1.0
    ) -> None: ...
    @property
    def n_rot(self) -> int: ...
    @property
    def neox(self) -> bool: ...

class AttentionSpec:
    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int,
        type_k: str,
        type_v: str,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        q_norm: handles.Array | None = None,
        k_norm: handles.Array | None = None,
        eps: float = 0.0,
    ) -> None: ...
    def k_bytes(self, page_tokens: int) -> int: ...
    def v_bytes(self, page_tokens: int) -> int: ...

class Pages:
    def __init__(
        self,
        base: int,
        page_bytes: int,
        page_tokens: int,
        tables: Int32,
        first: Int32,
        length: Int32,
        slots: Int32,
        positions: Int32,
        seq_rows: Int32,
        slot_positions: Int32 | None = None,
    ) -> None: ...

class States:
    def __init__(
        self,
        state_base: int,
        state_page_bytes: int,
        log_base: int,
        log_page_bytes: int,
        log_stride: int,
        log_tokens: int,
        state_in: Int32,
        state_out: Int32,
        log_in: Int32,
        log_length: Int32,
        log_out: Int32,
        tail: Int32,
        seq_rows: Int32,
    ) -> None: ...

class RecurrentLayer:
    @staticmethod
    def delta_net(
        n_k: int,
        n_v: int,
        dk: int,
        dv: int,
        conv: Float32,
        conv_bias: Float32 | None,
        ssm_a: Float32,
        dt_bias: Float32,
        tiled: bool = False,
    ) -> RecurrentLayer: ...
    @staticmethod
    def ssd(
        n_heads: int,
        n_groups: int,
        head_dim: int,
        state_dim: int,
        conv: Float32,
        conv_bias: Float32 | None,
        ssm_a: Float32,
        dt_bias: Float32,
        d: Float32,
        dt_low: float = 0.0,
        dt_high: float = ...,
    ) -> RecurrentLayer: ...
    @staticmethod
    def short_conv(conv: Float32, conv_bias: Float32 | None = None) -> RecurrentLayer: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def log_bytes(self) -> int: ...
    @property
    def in_cols(self) -> int: ...
    @property
    def out_cols(self) -> int: ...

class Sampler:
    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        bias_ids: Int32 | None = None,
        bias_values: Float32 | None = None,
    ) -> None: ...
    def observe(self, ids: Int32) -> None: ...
    def observe_prompt(self, ids: Int32) -> None: ...
    def unobserve(self, ids: Int32) -> None: ...

class Cpu:
    def __init__(self, threads: int, isa: str = "auto", exact: bool = False) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def arena_bytes(self) -> int: ...
    def trim(self) -> None: ...
    def empty(self, rows: int, cols: int) -> Array: ...
    def array(self, values: Float32) -> Array: ...
    def take_rows(self, x: handles.Array, rows: Int32) -> Array: ...
    def columns(self, x: handles.Array, start: int, count: int) -> Array: ...
    def pack(self, parts: Sequence[Part]) -> Matrix: ...
    def packed_bytes(self, parts: Sequence[tuple[int, int, int]]) -> int: ...
    def embed(self, table: handles.Matrix, ids: Int32, scale: float = 1.0) -> Array: ...
    def linear(
        self,
        x: handles.Array,
        w: handles.Matrix,
        norm: handles.Array | None = None,
        eps: float = 0.0,
        act: int = 0,
        bias: handles.Array | None = None,
        into: handles.Array | None = None,
    ) -> Array: ...
    def linear_int16(
        self, x: handles.Array, w: handles.Matrix, norm: handles.Array, eps: float
    ) -> Array: ...
    def experts(
        self,
        x: handles.Array,
        router: handles.Matrix,
        gate_up: handles.Matrix,
        down: handles.Matrix,
        n_used: int,
        norm: handles.Array,
        eps: float,
        normalize: bool,
        scale: float,
        into: handles.Array,
    ) -> Array: ...
    def experts_in(
        self,
        x: handles.Array,
        router: handles.Matrix,
        gate_up: handles.Matrix,
        n_used: int,
        norm: handles.Array,
        eps: float,
        normalize: bool,
        scale: float,
    ) -> tuple[Array, Array]: ...
    def experts_out(
        self,
        middle: handles.Array,
        chosen: handles.Array,
        count: int,
        down: handles.Matrix,
        into: handles.Array,
    ) -> Array: ...
    def rms_norm(self, x: handles.Array, weight: handles.Array, eps: float) -> Array: ...
    def act_mul(self, x: handles.Array, act: int) -> Array: ...
    def add_norm(
        self, into: handles.Array, x: handles.Array, weight: handles.Array, eps: float
    ) -> None: ...
    def gated_norm(
        self,
        x: handles.Array,
        gate: handles.Array,
        weight: handles.Array,
        eps: float,
        group: int,
        gate_first: bool,
    ) -> Array: ...
    def gate_sigmoid(self, x: handles.Array, gate: handles.Array) -> Array: ...
    def add_gated(self, into: handles.Array, y: handles.Array, gate: handles.Array) -> None: ...
    def softcap(self, x: handles.Array, cap: float) -> None: ...
    def rope_table(self, rope: RopeHandle, positions: Int32) -> RopeTable: ...
    def attention(
        self,
        qkv: handles.Array,
        heads: HeadsHandle,
        pages: handles.Pages,
        rope: handles.Array | None,
        k_offset: int,
        v_offset: int,
        store: bool = True,
    ) -> Array: ...
    def recur(
        self,
        x: handles.Array,
        layer: Recurrent,
        states: handles.States,
        state_offset: int,
        log_offset: int,
    ) -> Array: ...
    def copy_pages(self, base: int, page_bytes: int, sources: Int32, targets: Int32) -> None: ...
    def rotate_pages(
        self,
        heads: HeadsHandle,
        rope: RopeHandle,
        base: int,
        page_bytes: int,
        page_tokens: int,
        pages: Int32,
        deltas: Int32,
        k_offsets: Int64,
    ) -> None: ...
    def move_tokens(
        self,
        heads: HeadsHandle,
        base: int,
        page_bytes: int,
        page_tokens: int,
        from_pages: Int32,
        from_slots: Int32,
        to_pages: Int32,
        to_slots: Int32,
        k_offsets: Int64,
        v_offsets: Int64,
    ) -> None: ...
    def fold(
        self,
        layers: Sequence[Recurrent],
        offsets: Sequence[tuple[int, int]],
        state_base: int,
        state_page_bytes: int,
        log_base: int,
        log_page_bytes: int,
        log_stride: int,
        state_in: Int32,
        log: Int32,
        n_entries: Int32,
        state_out: Int32,
    ) -> None: ...
    def sample(
        self,
        logits: handles.Array,
        rows: Int32,
        samplers: list[handles.Sampler],
        uniforms: NDArray[np.float64],
        masks: NDArray[np.uint32] | None = None,
    ) -> Int32: ...
    def probabilities(
        self,
        logits: handles.Array,
        rows: Int32,
        samplers: list[handles.Sampler],
        masks: NDArray[np.uint32] | None = None,
    ) -> Float32: ...
    def argmax(self, logits: handles.Array) -> Int32: ...
    def logprobs(
        self, logits: handles.Array, ids: Int32, top: int
    ) -> tuple[Float32, Int32, Float32]: ...
