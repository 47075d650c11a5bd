"""Attention of prompts in CUDA C++, where a GPU can: prompt.cu, with the bits of Triton's."""

from __future__ import annotations

import ctypes

import torch

from quire.ops.cuda.launch import at
from quire.ops.cuda.machine import Machine
from quire.ops.cuda.many import DTYPES, TensorMap, tensor_map
from quire.ops.cuda.nvrtc import native
from quire.ops.cuda.paged import TILES, Layer, Paged

_QUERIES, _DIMS, _ROW = 64, 128, 256
_THREADS, _SHARED = 256, 115_264
_BLOCKS = 128
"""With fewer blocks, spans are better taken in parallel."""
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class _Prompt(ctypes.Structure):
    """PromptArgs of prompt.cu."""

    _fields_ = (
        ("pages", TensorMap), ("q", _P), ("out", _P), ("tables", _P), ("first", _P), ("length", _P),
        ("positions", _P), ("tile_row", _P), ("tile_count", _P), ("tile_seq", _P),
        ("page_rows", _I), ("k_row", _I), ("v_row", _I), ("page_tokens", _I), ("table_cols", _I),
        ("heads", _I), ("kv_heads", _I), ("window", _I), ("scale", _F),
        ("pad", ctypes.c_ubyte * 20),
    )  # fmt: skip


def prompt_tile(machine: Machine, layer: Layer, pages: Paged, offsets: tuple[int, int]) -> int:
    """Tokens of a tile of the kernel for prompts; 0 where it does not take these."""
    h, shape = layer.heads, pages.shape
    group = h.n_heads // h.n_kv_heads
    size = max((size for size in TILES if size * group <= _QUERIES), default=0)
    plain = layer.k == layer.v and layer.k.kind == 0 and layer.k.dtype in DTYPES
    wide = h.head_dim_k == h.head_dim_v == _DIMS and h.softcap == 0 and shape.holes == 0
    whole = all(each % _ROW == 0 for each in (shape.page_bytes, *offsets))
    full = size * group > _QUERIES // 2 and shape.tiles(size) * h.n_kv_heads >= _BLOCKS
    return size if plain and wide and whole and full and machine.hopper else 0


def attend_prompt(
    machine: Machine, layer: Layer, pages: Paged, offsets: tuple[int, int], size: int,
    queries: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """What queries find in the pages."""
    on, h, shape = native(machine.device), layer.heads, pages.shape
    kind, name = DTYPES[queries.dtype]
    kernel = on.kernel(
        ("common", "hopper", "prompt"), "attend_prompt", _THREADS, TYPE=name,
        BFLOAT=int(out.dtype is torch.bfloat16),
    )  # fmt: skip
    tiles = pages.tiles(size)
    given = _Prompt(
        tensor_map(pages.base, 1 << 31, _DIMS, 16, kind), at(queries), at(out), at(pages.tables),
        at(pages.first), at(pages.length), at(pages.positions), *(at(each) for each in tiles),
        shape.page_bytes // _ROW, *(each // _ROW for each in offsets), shape.page_tokens,
        shape.pages, h.n_heads, h.n_kv_heads, h.window, h.scale,
    )  # fmt: skip
    kernel.launch(on.stream, (tiles.shape[1], h.n_kv_heads, 1), _SHARED, given)
