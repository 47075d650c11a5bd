"""Writes small safetensors files and folders for tests, sound and broken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.int64): "I64"}


def entries(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The header of these tensors, laid one after the other."""
    out: dict[str, Any] = {}
    at = 0
    for name, values in tensors.items():
        out[name] = {
            "dtype": _DTYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    return out


def file_bytes(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    """A file of a header, given as an object or as it stands, and what follows it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def safetensors_bytes(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """A sound file."""
    return file_bytes(entries(tensors), b"".join(values.tobytes() for values in tensors.values()))


def write_folder(
    folder: Path, config: Mapping[str, Any], shards: Mapping[str, Mapping[str, NDArray[Any]]]
) -> Path:
    """A model folder; one shard called model.safetensors needs no index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in shards.items():
        (folder / name).write_bytes(safetensors_bytes(tensors))
    if list(shards) != ["model.safetensors"]:
        placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        write_index(folder, placed)
    return folder


def write_index(folder: Path, placed: Mapping[str, str]) -> None:
    """The index that says which shard holds a tensor."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(placed)}))
