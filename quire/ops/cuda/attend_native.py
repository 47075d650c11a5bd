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
CLUSTER, ALONE = 8, 32
"""Spans up to which blocks of few sequences are a cluster, and have a multiprocessor each."""
LONG = 16
"""Spans that a block takes, at most."""
_THREADS, _WARPS = 256, 8
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


class _Attend(ctypes.Structure):
    """AttendArgs of attend.cu."""

    _fields_ = (
        ("qkv", _P), ("out", _P), ("parts", _P), ("tops", _P), ("arrived", _P), ("base", _P),
        ("tables", _P), ("first", _P), ("length", _P), ("slots", _P),
        ("positions", _P), ("q_norm", _P), ("k_norm", _P), ("rope", _P), ("page_bytes", _L),
        ("k_offset", _L), ("v_offset", _L), ("stride", _L), ("seqs", _I), ("table_cols", _I),
        ("heads", _I), ("kv_heads", _I), ("page_tokens", _I), ("page_bits", _I), ("n_rot", _I),
        ("neox", _I), ("store", _I), ("window", _I), ("shares", _I), ("most", _I), ("rooms", _I),
        ("eps", _F), ("scale", _F),
    )  # fmt: skip


class Cut(NamedTuple):
    """How work is cut into blocks: it changes no bit."""

    stages: int
    """Tiles of keys or of values in flight."""
    blocks: int
    """On a multiprocessor."""
    shares: int
    """Blocks that share the spans of a KV head, if none has more than LONG."""
    programs: int
    """Blocks that there are for them."""
    rooms: int = 0
    """Spans of a block that the others read in its memory; 0: they are no cluster."""


def takes(machine: Machine, layer: Layer, page_tokens: int) -> bool:
    """Whether keys and values are rows of 16 bits that `attend.cu` is written for."""
    h = layer.heads
    shaped = h.head_dim_k == h.head_dim_v and h.head_dim_k in DIMS and not h.softcap
    fits = layer.group <= QUERIES and page_tokens & page_tokens - 1 == 0
    same = layer.k == layer.v and layer.k.dtype in NAMES
    return shaped and fits and same and not machine.interpreted


def cut(dims: int, rows: int, spans: int, processors: int, clusters: bool) -> Cut:
    """For so many KV heads of sequences."""
    if 4 * rows <= processors and spans <= ALONE:
        if clusters and CLUSTER * rows <= processors and spans <= CLUSTER:
            return Cut(2, 2 if dims <= 128 else 1, spans, spans, rooms=1)
        stages, blocks = 4 if dims <= 128 else 3, 1
    else:
        stages, blocks = {64: (5, 2), 128: (2, 2), 256: (3, 1)}[dims]
    shares = min(max(processors * blocks // rows, 1), spans)
    return Cut(stages, blocks, shares, max(shares, -(-spans // LONG)))


def shared_bytes(dims: int, how: Cut, stages: int, group: int) -> int:
    """Shared memory of a block."""
    tile, row = 128 if dims <= 128 else 64, 2 * dims
    own, kept = 16 * (row + 16) + 2 * row, group * (4 * dims + 8)
    between = 16 * (2 * tile + 16) + _WARPS * 16 * 4
    return stages * tile * row + own + between + how.rooms * kept


def _kernel(machine: Machine, layer: Layer, how: Cut) -> tuple[Kernel, int]:
    """The kernel and its shared memory: of fewer stages where a GPU has less room."""
    on, dims = native(machine.device), layer.heads.head_dim_k
    for stages in range(how.stages, 0, -1):
        kernel = on.kernel(
            FILES, "attend", _THREADS, TYPE=NAMES[layer.k.dtype], DIMS=dims, STAGES=stages,
            BLOCKS=how.blocks,
        )  # fmt: skip
        shared = shared_bytes(dims, how, stages, layer.group)
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
    parts = tops = None
    if how.programs > 1:
        parts = machine.empty(shape.spans, queries, h.head_dim_k)
        tops = machine.empty(shape.spans, queries, 2)
    turns, neox = (0, False) if rope is None else (rope.shape[1], rope.neox)
    given = _Attend(
        at(qkv), at(out), at(parts), at(tops), at(arrived), pages.base, at(pages.tables),
        at(pages.first), at(pages.length), at(pages.slots), at(pages.positions), at(layer.q_norm),
        at(layer.k_norm), at(None if rope is None else rope.values), shape.page_bytes, *offsets,
        qkv.shape[1], shape.seqs, shape.pages, h.n_heads, h.n_kv_heads, shape.page_tokens,
        shape.page_tokens.bit_length() - 1, turns, neox, store, h.window, how.shares, LONG,
        how.rooms, layer.eps, h.scale,
    )  # fmt: skip
    grid = shape.seqs, h.n_kv_heads, how.programs
    kernel.launch(on.stream, grid, shared, given, how.programs if how.rooms else 1)
