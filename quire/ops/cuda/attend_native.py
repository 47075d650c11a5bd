"""Who launches attend.cu: attention of one token of each sequence, where its shape allows it."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from quire.ops.cuda.launch import at
from quire.ops.cuda.machine import Machine
from quire.ops.cuda.nvrtc import Kernel, native
from quire.ops.cuda.paged import Layer, Paged, RopeTable

FILES = ("common", "heads", "slots", "attend")
NAMES = {torch.float16: "Half", torch.bfloat16: "Bfloat"}
DIMS = (64, 128, 256)
QUERIES = 16
"""Heads that share a KV head, at most."""
CLUSTER = 8
"""Blocks that read each other's memory, at most."""
LONG = 16
"""Spans that a block takes, at most, where sequences alone fill a GPU."""
_THREADS, _WARPS = 256, 8
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


class _Attend(ctypes.Structure):
    """AttendArgs of attend.cu."""

    _fields_ = (
        ("qkv", _P), ("out", _P), ("parts", _P), ("tops", _P), ("masses", _P), ("arrived", _P),
        ("base", _P), ("tables", _P), ("first", _P), ("length", _P), ("slots", _P),
        ("positions", _P), ("q_norm", _P), ("k_norm", _P), ("rope", _P), ("page_bytes", _L),
        ("k_offset", _L), ("v_offset", _L), ("stride", _L), ("seqs", _I), ("table_cols", _I),
        ("heads", _I), ("kv_heads", _I), ("page_tokens", _I), ("n_rot", _I), ("neox", _I),
        ("store", _I), ("window", _I), ("least", _I), ("eps", _F), ("scale", _F),
    )  # fmt: skip


class Cut(NamedTuple):
    """How work is cut into blocks: it changes no bit."""

    stages: int
    """Tiles of keys or of values in flight."""
    blocks: int
    """On a multiprocessor."""
    programs: int
    """Blocks that share the spans of a KV head, at most."""
    least: int
    """Spans that a block takes, at least."""
    cluster: bool
    """Whether they read each other's memory."""
    each: int = 1
    """KV heads of a sequence that a block takes, one after the other."""


def takes(machine: Machine, layer: Layer) -> bool:
    """Whether keys and values are rows of 16 bits that `attend.cu` is written for."""
    h = layer.heads
    shaped = h.head_dim_k == h.head_dim_v and h.head_dim_k in DIMS and not h.softcap
    few = h.n_heads <= QUERIES * h.n_kv_heads
    same = layer.k == layer.v and layer.k.dtype in NAMES
    return shaped and few and same and not machine.interpreted


def cut(dims: int, rows: int, spans: int, processors: int, clusters: bool) -> Cut:
    """For so many KV heads of sequences."""
    stages, blocks = {64: (5, 2), 128: (3, 2), 256: (3, 1)}[dims]
    full = processors * blocks
    if rows >= full:
        return Cut(stages, blocks, -(-spans // LONG), LONG, False)
    programs = min(max(-(-full // rows), -(-spans // LONG)), spans)
    return Cut(stages, blocks, programs, 1, clusters and 1 < programs <= CLUSTER)


def shared_bytes(dims: int, stages: int, each: int = 1) -> int:
    """Shared memory of a block."""
    tile, row = 128 if dims <= 128 else 64, 2 * dims
    own = 16 * (row + 16) + 2 * row
    return stages * tile * row + each * own + 16 * (2 * tile + 16) + _WARPS * 16 * 4


def _kernel(machine: Machine, layer: Layer, how: Cut) -> tuple[Kernel, int]:
    """The kernel and its shared memory: of fewer stages where a GPU has less room."""
    on, dims = native(machine.device), layer.heads.head_dim_k
    for stages in range(how.stages, 0, -1):
        kernel = on.kernel(
            FILES, "attend", _THREADS, TYPE=NAMES[layer.k.dtype], DIMS=dims, STAGES=stages,
            BLOCKS=how.blocks, EACH=how.each,
        )  # fmt: skip
        shared = shared_bytes(dims, stages, how.each)
        if kernel.resident(shared):
            return kernel, shared
    raise AssertionError(f"a GPU without room for {dims} dimensions")


def decode(
    machine: Machine, layer: Layer, pages: Paged, rope: RopeTable | None, qkv: torch.Tensor,
    out: torch.Tensor, offsets: tuple[int, int], store: bool, arrived: torch.Tensor,
) -> None:  # fmt: skip
    """What `kernels.decode` does, in the same bits; `arrived` is 0 before and after."""
    h, shape, on = layer.heads, pages.shape, native(machine.device)
    rows, queries = shape.seqs * h.n_kv_heads, shape.seqs * h.n_heads
    how = cut(h.head_dim_k, rows, shape.spans, on.processors, on.clusters)
    kernel, shared = _kernel(machine, layer, how)
    parts = tops = masses = None
    if how.programs > 1:
        parts = machine.empty(shape.spans, queries, h.head_dim_k)
        tops, masses = machine.empty(2, shape.spans, queries)
    given = _Attend(
        at(qkv), at(out), at(parts), at(tops), at(masses), at(arrived), pages.base,
        at(pages.tables), at(pages.first), at(pages.length), at(pages.slots), at(pages.positions),
        at(layer.q_norm), at(layer.k_norm), at(None if rope is None else rope.values),
        shape.page_bytes, *offsets, qkv.shape[1], shape.seqs, shape.pages, h.n_heads, h.n_kv_heads,
        shape.page_tokens, 0 if rope is None else rope.shape[1], rope is not None and rope.neox,
        store, h.window, how.least, layer.eps, h.scale,
    )  # fmt: skip
    grid = shape.seqs, h.n_kv_heads // how.each, how.programs
    kernel.launch(on.stream, grid, shared, given, how.programs if how.cluster else 1)
