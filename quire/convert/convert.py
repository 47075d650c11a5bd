"""Writes a model as a GGUF file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from quire.convert.recipe import Recipe
from quire.errors import ModelError, QuireError, RequestError
from quire.files import replace_file
from quire.models.registry import architecture_of
from quire.text.export import gguf_vocabulary
from quire.weights.file import WeightFile
from quire.weights.gguf_write import Planned, encode_entry, write_gguf
from quire.weights.quant import DEQUANTIZABLE, GGMLType, dequantize
from quire.weights.quantize import quantize

ProgressFn = Callable[[int, int], None]
_CHUNK: Final = 1 << 20  # weights that one thread turns at a time
_FLOATS: Final = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_REPLACED: Final = ("general.file_type", "general.quantization_version", "general.alignment")


@dataclass(frozen=True)
class Converted:
    """What became of a model."""

    path: Path
    before: int
    """Bytes of all tensors in the source."""
    after: int
    types: dict[str, int]
    """Bytes of each type that was written."""
    twice: bool
    """Whether some matrices were quantized already, so that they lost twice."""


def convert(
    file: WeightFile, target: Path, recipe: Recipe, threads: int = 1,
    progress: ProgressFn | None = None,
) -> Converted:  # fmt: skip
    """Writes an open model in a format; the file is there as a whole or not at all."""
    if os.path.lexists(target):
        raise RequestError(f"{target} is there already; remove it, or choose another name")
    arch = architecture_of(file)
    n_layers = file.get_int(f"{arch}.block_count", default=0)
    shapes = {name: _shape(file, name) for name in file.tensors}
    planned = {
        name: Planned(name, recipe.type_of(name, tensor, n_layers), shapes[name])
        for name, tensor in file.tensors.items()
    }
    for name, tensor in file.tensors.items():
        if tensor.type not in DEQUANTIZABLE and tensor.type != planned[name].type:
            raise ModelError(f"{file.path}: tensor {name} is {tensor.type.name}, which Quire "
                             "cannot turn into another type")  # fmt: skip
    total = sum(tensor.nbytes for tensor in file.tensors.values())
    work = _Work(file, threads, total, progress)
    entries = [*_entries(file, arch), encode_entry("general.file_type", recipe.file_type),
               encode_entry("general.quantization_version", 2)]  # fmt: skip

    def write(out: BinaryIO) -> None:
        write_gguf(out, entries, {plan: work.pieces(plan) for plan in planned.values()})

    try:
        replace_file(target, write)
        target.chmod(0o666 & ~_umask())  # a model is no secret
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror or error}") from error
    types: Counter[str] = Counter()
    for plan in planned.values():
        types[plan.type.name] += plan.nbytes
    return Converted(target, total, types.total(), dict(types.most_common()), work.twice)


def _umask() -> int:
    """What new files are not allowed; the system tells it only when it is set."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class _Work:
    """Turns tensors from one type into another, some rows at a time, on several threads."""

    def __init__(
        self, file: WeightFile, threads: int, total: int, progress: ProgressFn | None
    ) -> None:
        self._file = file
        self._threads = threads
        self._total = total
        self._progress = progress
        self._done = 0
        self.twice = False

    def pieces(self, plan: Planned) -> Iterator[bytes]:
        """A tensor's bytes in its new type."""
        tensor, data = self._file.tensors[plan.name], self._file.data(plan.name)
        if tensor.type == plan.type:
            yield data.tobytes()
        else:
            self.twice |= tensor.type not in _FLOATS and plan.type not in _FLOATS
            yield from self._turned(data, tensor.type, tensor.shape, plan)
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _turned(
        self, data: NDArray[np.uint8], stored: GGMLType, shape: tuple[int, ...], plan: Planned
    ) -> Iterator[bytes]:
        cols = shape[-1]
        rows = data.reshape(-1, stored.nbytes((cols,)))
        step = max(_CHUNK // cols, 1)

        def turn(at: int) -> bytes:
            some = rows[at : at + step]
            return quantize(
                dequantize(some.ravel(), stored, (len(some), cols)), plan.type
            ).tobytes()

        try:
            with ThreadPoolExecutor(self._threads) as pool:
                yield from pool.map(turn, range(0, len(rows), step))
        except QuireError as error:
            raise ModelError(f"{self._file.path}: tensor {plan.name}: {error}") from error


def _shape(file: WeightFile, name: str) -> tuple[int, ...]:
    """As GGUF files have it: Mamba's norm is one row per group."""
    shape = file.tensors[name].shape
    if (
        name.endswith("ssm_norm.weight")
        and len(shape) == 2
        and "mamba2.ssm.group_count" in (file.metadata)
    ):
        groups = file.get_int("mamba2.ssm.group_count", minimum=1)
        return groups, shape[0] * shape[1] // groups
    return shape


def _entries(file: WeightFile, arch: str) -> list[bytes]:
    """All metadata as it was; a folder's with its vocabulary."""
    kept = [file.entry(key) for key in file.metadata if key not in _REPLACED]
    if not file.path.is_dir():
        return kept
    tokens = file.tensors["token_embd.weight"].shape[0]
    more: dict[str, Any] = {"general.name": file.path.resolve().name}
    more |= gguf_vocabulary(file.path, arch, tokens) | _only_llama_cpp_needs(file, arch)
    return kept + [encode_entry(key, value) for key, value in more.items()]


def _only_llama_cpp_needs(file: WeightFile, arch: str) -> dict[str, Any]:
    """Keys that llama.cpp refuses to be without, though they make no difference to text.

    It leaves unrotated what no section covers, so they are thirds of all there is, as those of
    Qwen's own files are, whatever a folder says.
    """
    if not arch.startswith("qwen35"):
        return {}
    pairs = file.get_int(f"{arch}.rope.dimension_count") // 2
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return {f"{arch}.rope.dimension_sections": np.array(sections, np.int32)}
