"""Who launches the CUDA C++ kernels of recurrent layers, where their shape allows it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quire.ops.cuda.machine import Machine
from quire.ops.cuda.nvrtc import Kernel, Native, native
from quire.ops.cuda.recurrent_layer import CudaLayer, CudaStates, Places

THREADS, ENTRIES = 128, 16
ROWS = 32
"""Rows of a state in a block of recur_scan.cu."""
RELATED = 2 * ENTRIES + 4
TOKENS, MANY = 4, 256
"""Tokens that a warp of recur_mix.cu takes if there are many, and how many these are."""
FILES = {"mix": "mix", "decode": "one", "relate": "relate", "recur": "scan", "fold": "fold"}
"""Where each kernel is: recur_….cu."""
_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


class RecurArgs(ctypes.Structure):
    """RecurArgs of recur.cu."""

    _fields_ = (
        ("x", _P), ("weight", _P), ("bias", _P), ("a", _P), ("dt_bias", _P), ("skip", _P),
        ("mixed", _P), ("out", _P), ("states", _P), ("logs", _P), ("columns", _P * 12),
        ("related", _P), ("tail_at", _L), ("state_at", _L), ("log_at", _L), ("state_words", _L),
        ("log_words", _L), ("log_stride", _L), ("tokens", _I), ("cols", _I), ("channels", _I),
        ("log_tokens", _I), ("dt_low", _F), ("dt_high", _F),
    )  # fmt: skip


class _Fold(ctypes.Structure):
    """FoldArgs of recur_fold.cu."""

    _fields_ = (
        ("states", _P), ("logs", _P), ("offsets", _P), ("columns", _P * 4), ("state_words", _L),
        ("log_words", _L), ("log_stride", _L), ("n_layers", _I), ("tail_words", _I), ("cols", _I),
    )  # fmt: skip


def takes(machine: Machine, layer: CudaLayer, log_tokens: int) -> bool:
    """Whether rows are whole groups of 32 values at multiples of 16 bytes, and logs short."""
    whole = layer.kind != "conv" and layer.dk % 32 == 0 and layer.dk <= 256
    aligned = (layer.in_cols | layer.channels | layer.dv) % 4 == 0
    return not machine.interpreted and whole and aligned and log_tokens <= ENTRIES


def kernel_of(machine: Machine, layer: CudaLayer, name: str, **more: int) -> Kernel:
    """A kernel for a layer's shape."""
    return native(machine.device).kernel(
        ("common", "recur", f"recur_{FILES[name]}"), name, THREADS, DK=layer.dk, DV=layer.dv,
        HEADS=layer.heads, K_HEADS=layer.k_heads, TILED=int(layer.tiled),
        DELTA=int(layer.kind == "delta"), **more,
    )  # fmt: skip


def _parts(layer: CudaLayer, rows: int) -> int:
    """Blocks that share a state, with so many rows each."""
    return layer.heads * -(-layer.dv // rows)


def _scan_bytes(layer: CudaLayer) -> int:
    """Of Scan of recur_scan.cu: two Chunks, sums with keys and queries, u and what is left."""
    chunk = 2 * layer.dk + ROWS + RELATED + 2
    return 4 * ENTRIES * (2 * chunk + 3 * ROWS + 1)


def _columns(layer: CudaLayer, n_seqs: int, processors: int) -> int:
    """Rows of a state that a block of `decode` has at a time: many, unless too few were left.

    Up to 64 KiB, so that three blocks fit on a multiprocessor.
    """
    fits = [size for size in (128, 64, 32, 16) if size * layer.dk <= 1 << 14]
    sizes = [size for size in fits if layer.dv % size == 0]
    for size in sizes:
        if _parts(layer, size) * n_seqs >= 2 * processors:
            return size
    return sizes[-1]


def _each(parts: int, n_seqs: int, places: int) -> int:
    """How many parts of a state a block of `decode` has, one after the other.

    As many as take no longer than if all places on the GPU had as much to do: a block that goes on
    fetches, where one that starts waits.
    """
    sizes = [size for size in range(1, parts + 1) if parts % size == 0]
    rounds = {size: -(-parts // size * n_seqs // places) * size for size in sizes}
    return max(size for size in sizes if rounds[size] == min(rounds.values()))


def _apart(on: Native, blocks: int, shared: int) -> int:
    """Bytes with which no multiprocessor takes more of these blocks than it must.

    Blocks that start while others still run would gather where those end first.
    """
    most = -(-blocks // on.processors)
    return max(shared, (on.most_shared + 1024) // (most + 1) - 1008)


def arguments(
    layer: CudaLayer, states: CudaStates, state_at: int, log_at: int, x: torch.Tensor,
    mixed: torch.Tensor, out: torch.Tensor,
) -> RecurArgs:  # fmt: skip
    """What kernels are told of a step."""
    bias = None if layer.bias is None else layer.bias.data_ptr()
    values = (layer.a, layer.dt_bias, layer.d, mixed, out)
    at = states.places
    return RecurArgs(
        x.data_ptr(), layer.weight.data_ptr(), bias, *(each.data_ptr() for each in values),
        *at.bases, (_P * 12)(*(column.data_ptr() for column in states.columns)), None,
        state_at // 4, state_at // 4 + layer.tail_words, log_at // 4, *at.words,
        states.shape.tokens, layer.in_cols, layer.channels, at.log_tokens, *layer.dt_limits,
    )  # fmt: skip


def mix(machine: Machine, layer: CudaLayer, told: RecurArgs) -> None:
    """What the recurrence takes, raw inputs and keys in logs, and tails of states."""
    tokens = TOKENS if told.tokens >= MANY else 1
    kernel = kernel_of(machine, layer, "mix", WIDTH=layer.width, TOKENS=tokens)
    grid = -(-told.tokens // tokens), -(-(2 * layer.k_heads + layer.heads) // 4), 1
    kernel.launch(native(machine.device).stream, grid, 0, told)


def recur(
    machine: Machine, layer: CudaLayer, states: CudaStates, state_at: int, log_at: int,
    x: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Takes new tokens through a layer: outputs, states, logs and tails."""
    n_tokens, n_seqs, single = states.shape
    mixed = machine.empty(n_tokens, layer.channels)
    out = machine.empty(n_tokens, layer.out_cols)
    told = arguments(layer, states, state_at, log_at, x, mixed, out)
    mix(machine, layer, told)
    on = native(machine.device)
    if single and layer.dv % 16 == 0:
        columns = _columns(layer, n_seqs, on.processors)
        shared = 4 * (columns * (layer.dk + 2) + 2 * ENTRIES)
        parts, once = (
            _parts(layer, columns),
            kernel_of(machine, layer, "decode", COLUMNS=columns, EACH=1),
        )
        each = _each(parts, n_seqs, once.resident(shared) * on.processors)
        decode = kernel_of(machine, layer, "decode", COLUMNS=columns, EACH=each)
        decode.launch(on.stream, (parts // each, n_seqs, 1), shared, told)
        return out
    related = machine.empty(n_tokens, layer.heads, RELATED)
    told.related = related.data_ptr()
    shared = 8 * ENTRIES * (1 + layer.heads // layer.k_heads)
    relate = kernel_of(machine, layer, "relate")
    relate.launch(on.stream, (n_tokens, layer.k_heads, 1), shared, told)
    blocks = _parts(layer, ROWS)
    shared = _apart(on, blocks * n_seqs, _scan_bytes(layer))
    kernel_of(machine, layer, "recur").launch(on.stream, (blocks, n_seqs, 1), shared, told)
    return out


def fold(
    machine: Machine, layer: CudaLayer, places: Places, offsets: torch.Tensor,
    columns: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Folds logs into states in all layers: `recurrent_rows.fold` without tails."""
    layers = len(offsets) // 2
    told = _Fold(
        *places.bases, offsets.data_ptr(), (_P * 4)(*(column.data_ptr() for column in columns)),
        *places.words, layers, layer.tail_words, layer.in_cols,
    )  # fmt: skip
    rows = 16 if layer.dv % 64 else 64
    grid = _parts(layer, rows), len(columns[0]), layers
    shared = 4 * ENTRIES * (layer.dk + rows + 4)
    kernel_of(machine, layer, "fold").launch(native(machine.device).stream, grid, shared, told)
