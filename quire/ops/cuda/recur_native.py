"""Who launches the CUDA C++ kernels of recurrent layers, where their shape allows it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from quire.ops.cuda.machine import Machine
from quire.ops.cuda.nvrtc import Kernel, native

THREADS, ENTRIES = 128, 16
ROWS = 64
"""Rows of a state in a block of recur_scan.cu."""
RELATED = 2 * ENTRIES + 4
FILES = {"decode": "one", "relate": "relate", "recur": "scan", "fold": "fold"}
"""Where each kernel is: recur_….cu."""
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


class _Recur(ctypes.Structure):
    """RecurArgs of recur.cu."""

    _fields_ = (
        ("x", _P), ("mixed", _P), ("out", _P), ("a", _P), ("dt_bias", _P), ("skip", _P),
        ("states", _P), ("logs", _P), ("columns", _P * 12), ("related", _P), ("state_at", _L),
        ("log_at", _L), ("state_words", _L), ("log_words", _L), ("log_stride", _L), ("cols", _I),
        ("channels", _I), ("log_tokens", _I), ("dt_low", _F), ("dt_high", _F),
    )  # fmt: skip


class _Fold(ctypes.Structure):
    """FoldArgs of recur_fold.cu."""

    _fields_ = (
        ("states", _P), ("logs", _P), ("offsets", _P), ("columns", _P * 4), ("state_words", _L),
        ("log_words", _L), ("log_stride", _L), ("n_layers", _I), ("tail_words", _I), ("cols", _I),
    )  # fmt: skip


class Shaped(Protocol):
    """A layer, as far as kernels are compiled for it."""

    @property
    def kind(self) -> str: ...
    @property
    def in_cols(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def k_heads(self) -> int: ...
    @property
    def dk(self) -> int: ...
    @property
    def dv(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def tiled(self) -> bool: ...


def takes(machine: Machine, layer: Shaped, log_tokens: int) -> bool:
    """Whether rows are whole groups of 32 values at multiples of 16 bytes, and logs short."""
    whole = layer.dk % 32 == 0 and layer.dk <= 256 and log_tokens <= ENTRIES
    aligned = (layer.in_cols | layer.channels | layer.dv) % 4 == 0
    return not machine.interpreted and whole and aligned


def kernel_of(machine: Machine, layer: Shaped, name: str, **more: int) -> Kernel:
    """A kernel for a layer's shape."""
    return native(machine.device).kernel(
        ("common", "recur", f"recur_{FILES[name]}"), name, THREADS, DK=layer.dk, DV=layer.dv,
        HEADS=layer.heads, K_HEADS=layer.k_heads, TILED=int(layer.tiled),
        DELTA=int(layer.kind == "delta"), **more,
    )  # fmt: skip


def _parts(layer: Shaped, rows: int) -> int:
    """Blocks that share a state, with so many rows each."""
    return layer.heads * -(-layer.dv // rows)


def _scan_bytes(layer: Shaped) -> int:
    """Of Scan of recur_scan.cu: two Chunks, sums with keys and queries, u and what is left."""
    chunk = 2 * layer.dk + ROWS + RELATED + 2
    return 4 * ENTRIES * (2 * chunk + 3 * ROWS + 1)


def _columns(layer: Shaped, n_seqs: int, processors: int) -> int:
    """Rows of a state for a block that has one token: many, unless too few blocks were left.

    At 64 sequences of 48 heads of 128, blocks of 128, 64 and 32 took 3.5, 3.7 and 3.9 ms.
    """
    sizes = [size for size in (128, 64, 32, 16) if layer.dv % size == 0]
    for size in sizes:
        if layer.heads * (layer.dv // size) * n_seqs >= 2 * processors:
            return size
    return sizes[-1]


def recur(
    machine: Machine, layer: Shaped, tensors: Sequence[torch.Tensor], bases: tuple[int, int],
    columns: Sequence[torch.Tensor], offsets: tuple[int, int], words: tuple[int, int, int],
    log_tokens: int, dt_limits: tuple[float, float], single: bool,
) -> None:  # fmt: skip
    """x, mixed, out, a, dt_bias and skip; then what `kernels.recur` takes as well.

    `single`: each sequence has one token, which goes into its log.
    """
    arguments = _Recur(
        *(each.data_ptr() for each in tensors), *bases,
        (_P * 12)(*(column.data_ptr() for column in columns)), None, *offsets, *words,
        layer.in_cols, layer.channels, log_tokens, *dt_limits,
    )  # fmt: skip
    stream, n_seqs, n_tokens = native(machine.device).stream, len(columns[0]), len(columns[-1])
    if single and layer.dv % 16 == 0:
        columns_each = _columns(layer, n_seqs, native(machine.device).processors)
        shared = 4 * (columns_each * (layer.dk + ENTRIES + 2) + 2 * ENTRIES)
        decode = kernel_of(machine, layer, "decode", COLUMNS=columns_each)
        grid = _parts(layer, columns_each), n_seqs, 1
        decode.launch(stream, grid, shared, arguments)
        return
    related = machine.empty(n_tokens, layer.heads, RELATED)
    arguments.related = related.data_ptr()
    relate = kernel_of(machine, layer, "relate")
    shared = 8 * ENTRIES * (1 + layer.heads // layer.k_heads)
    relate.launch(stream, (n_tokens, layer.k_heads, 1), shared, arguments)
    grid = _parts(layer, ROWS), n_seqs, 1
    kernel_of(machine, layer, "recur").launch(stream, grid, _scan_bytes(layer), arguments)


def fold(
    machine: Machine, layer: Shaped, bases: tuple[int, int], offsets: torch.Tensor,
    columns: Sequence[torch.Tensor], words: tuple[int, int, int], tail_words: int,
) -> None:  # fmt: skip
    """What `kernels.fold` does."""
    layers = len(offsets) // 2
    arguments = _Fold(
        *bases, offsets.data_ptr(), (_P * 4)(*(column.data_ptr() for column in columns)), *words,
        layers, tail_words, layer.in_cols,
    )  # fmt: skip
    rows = 16 if layer.dv % 64 else 64
    grid = _parts(layer, rows), len(columns[0]), layers
    shared = 4 * ENTRIES * (layer.dk + rows + 4)
    kernel_of(machine, layer, "fold").launch(native(machine.device).stream, grid, shared, arguments)
