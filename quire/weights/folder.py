"""Models in folders as they come from Hugging Face: config.json and .safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError, SafetensorsError
from quire.weights.file import WeightFile
from quire.weights.fingerprint import sample_of
from quire.weights.gguf_format import quote
from quire.weights.naming import HFConfig, Namer, Naming, Shape, Source
from quire.weights.open_file import Stored
from quire.weights.pull import PICKLES
from quire.weights.quant import GGMLType, dequantize
from quire.weights.safetensors import Safetensors, StoredTensor, parse_object
from quire.weights.unread import refuse_unused

_TYPES: Final = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}
_ELEMENTS: Final = {"F32": "<f4", "F16": "<u2", "BF16": "<u2"}
_MOST_BYTES: Final = 100_000_000  # of what lies beside the weights


@dataclass(frozen=True)
class SeenTensor:
    """A tensor of a folder as a model sees it."""

    type: GGMLType
    shape: Shape
    nbytes: int


class Folder(WeightFile):
    """A folder of safetensors, seen through GGUF's names; tensors are changed one at a time."""

    error = SafetensorsError

    def __init__(self, path: Path, shards: list[Safetensors], naming: Naming) -> None:
        self.path = path
        self.asked = set()
        self.metadata = MappingProxyType(naming.metadata)
        self._naming = naming
        self._shards = shards
        self._shard_of = {name: shard for shard in shards for name in shard.tensors}
        self._sources = {
            name: source
            for sources in (naming.otherwise, naming.tensors)
            for name, source in sources.items()
            if any(stored in self._shard_of for stored in source.names)
        }
        self._check_use()
        self.tensors = MappingProxyType(
            {name: self._seen(source) for name, source in self._sources.items()}
            | {name: SeenTensor(GGMLType.F32, values.shape, values.nbytes)
               for name, values in naming.made.items()}
        )  # fmt: skip

    @classmethod
    def open(cls, path: str | os.PathLike[str], namer: Namer) -> Folder:
        """Open a folder's weights, with everything about them checked that `Safetensors` checks."""
        path = Path(path)
        config = read_config(path)
        naming = namer(config)
        refuse_unused(config, naming)
        return cls(path, _open_shards(path), naming)

    def data(self, name: str) -> NDArray[np.uint8]:
        """A copy of the bytes of a tensor, changed as the model needs it."""
        made = self._naming.made.get(name)
        if made is not None:
            return np.frombuffer(made.tobytes(), np.uint8)
        source = self._source(name)
        if source.change is None and not source.stacked:
            return self._shard_of[source.names[0]].data(source.names[0])
        values = source.change is not None and source.change.values
        whole = self._elements(source.names[0], values)
        if source.stacked:  # one after the other, so that none is held twice
            first = whole
            whole = np.empty((len(source.names), *first.shape), first.dtype)
            whole[0] = first
            for i, stored in enumerate(source.names[1:], 1):
                whole[i] = self._elements(stored, values)
        out = source.change.apply(whole) if source.change else whole
        assert out.shape == self.tensors[name].shape, (name, out.shape)
        return np.ascontiguousarray(out).reshape(-1).view(np.uint8)

    def stored(self, name: str) -> Stored | None:
        """The bytes of a tensor where they lie; None where they are changed, or made."""
        if name in self._naming.made:
            return None
        source = self._source(name)
        if source.change is not None or source.stacked:
            return None
        return self._shard_of[source.names[0]].stored(source.names[0])

    def samples(self, name: str) -> Iterator[bytes]:
        """Hashes of samples of what a tensor is made of, taken when it was read, or now."""
        if name in self._naming.made:
            yield sample_of(self.data(name))
            return
        for stored in self._source(name).names:
            yield self._shard_of[stored].sample(stored)

    def close(self) -> None:
        """Let go of the files; the metadata stays."""
        for shard in self._shards:
            shard.close()

    def _source(self, name: str) -> Source:
        if name not in self.tensors:
            raise SafetensorsError(f"{self.path}: there is no tensor {quote(name)}")
        return self._sources[name]

    def _elements(self, stored: str, values: bool) -> NDArray[Any]:
        """A stored tensor's values in float32, or its elements as they are."""
        shard = self._shard_of[stored]
        tensor = shard.tensors[stored]
        if values:
            return dequantize(shard.data(stored), _TYPES[tensor.dtype], tensor.shape)
        return shard.data(stored).view(_ELEMENTS[tensor.dtype]).reshape(tensor.shape)

    def _seen(self, source: Source) -> SeenTensor:
        """The type and shape that come out for a source."""
        missing = [name for name in source.names if name not in self._shard_of]
        if missing:
            raise ModelError(f"{self.path}: missing among its like: {', '.join(missing[:8])}")
        first = self._stored(source.names[0])
        for name in source.names[1:]:
            other = self._stored(name)
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise ModelError(
                    f"{self.path}: {name} is {other.dtype} {list(other.shape)} and "
                    f"{source.names[0]} {first.dtype} {list(first.shape)}; they must be alike"
                )
        shape = (len(source.names), *first.shape) if source.stacked else first.shape
        change = source.change
        try:
            shape = change.shape(shape) if change else shape
        except IndexError:
            raise ModelError(
                f"{self.path}: {source.names[0]} has the shape {list(first.shape)}, "
                "which has too few dimensions"
            ) from None
        type = GGMLType.F32 if change and change.values else _TYPES[first.dtype]
        return SeenTensor(type, shape, prod(shape) * type.type_size)

    def _stored(self, name: str) -> StoredTensor:
        tensor = self._shard_of[name].tensors[name]
        if tensor.dtype not in _TYPES:
            raise ModelError(
                f"{self.path}: {name} is stored as {tensor.dtype}; weights must be "
                f"{', '.join(_TYPES)}"
            )
        return tensor

    def _check_use(self) -> None:
        """Every stored tensor must have its place: what is left over changes what is computed."""
        naming = self._naming
        used = {name for source in self._sources.values() for name in source.names}
        left = [
            name
            for name in self._shard_of
            if name not in used
            and not name.endswith(naming.ignored)
            and not name.startswith(naming.left_out)
        ]
        if left:
            arch = self.metadata["general.architecture"]
            named = ", ".join(quote(name) for name in left[:8])
            count = "1 tensor has" if len(left) == 1 else f"{len(left)} tensors have"
            raise ModelError(f"{self.path}: {count} no place in Quire's {arch}: {named}")


def read_config(folder: Path) -> HFConfig:
    """The settings of a model folder."""
    path = folder / "config.json"
    return HFConfig(path, _read_json(folder, "config.json"))


def _open_shards(folder: Path) -> list[Safetensors]:
    index, single = "model.safetensors.index.json", "model.safetensors"
    if os.path.lexists(folder / index):
        placed = _read_json(folder, index).get("weight_map")
        if not placed or not isinstance(placed, dict) or set(map(type, placed.values())) != {str}:
            raise SafetensorsError(f"{folder / index}: 'weight_map' must name the file of tensors")
        files = sorted(set(placed.values()))
        shards = {name: Safetensors(_inside(folder, name)) for name in files}
        _check_index(folder / index, placed, shards)
        return list(shards.values())
    if os.path.lexists(folder / single):
        return [Safetensors(_inside(folder, single))]
    pickles = sorted(p.name for p in folder.iterdir() if p.name.lower().endswith(PICKLES))
    if pickles:
        raise SafetensorsError(
            f"{folder}: there are only pickles ({', '.join(pickles[:4])}), which can run code when "
            "they are loaded, so Quire reads none; get the model as safetensors or GGUF"
        )
    raise SafetensorsError(f"{folder}: there is no {single} and no {index}")


def _check_index(path: Path, placed: Mapping[str, str], shards: Mapping[str, Safetensors]) -> None:
    """The index and the shards must agree on what lies where."""
    found = [(name, file) for file, shard in shards.items() for name in shard.tensors]
    wrong = sorted(set(placed.items()) ^ set(found))
    if wrong:
        name, file = wrong[0]
        raise SafetensorsError(
            f"{path}: {len(wrong)} entries differ from the shards, such as {quote(name)} "
            f"in {quote(file)}"
        )


def _inside(folder: Path, name: str, within: str = "") -> Path:
    """A file of the folder, or of one within it, by its plain name; links must not lead out of it.

    A snapshot in the hub's cache is allowed its one way out: links into the `blobs` beside it.
    """
    if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise SafetensorsError(f"{folder}: {quote(name)} is not the plain name of a file in it")
    path = folder / within / name
    try:
        home, real = folder.resolve(), path.resolve()
    except ValueError as error:  # a lone surrogate, or a NUL in the folder's own path
        raise SafetensorsError(f"{str(path)!r}: cannot be the name of a file") from error
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise SafetensorsError(f"{path}: cannot be followed: {error}") from error
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (real.is_relative_to(home) or real.is_relative_to(blobs)):
        raise SafetensorsError(f"{path}: leads out of the folder, to a place it may not name")
    return path


def read_beside(folder: Path, name: str, within: str = "") -> bytes | None:
    """A small file of the folder, or of one within it; None where there is none."""
    path = _inside(folder, name, within)
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > _MOST_BYTES:
            raise SafetensorsError(f"{path}: larger than {_MOST_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise SafetensorsError(f"{path}: cannot be read: {error.strerror}") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    text = read_beside(folder, name)
    if text is None:
        found = sorted(p.name for p in folder.iterdir() if p.name.lower().endswith(".gguf"))
        instead = f"there is {quote(found[0])}: pass its path" if found else "pass a model folder"
        raise SafetensorsError(f"{folder}: there is no {name}; {instead}, or a .gguf file")
    return parse_object(text, str(folder / name))
