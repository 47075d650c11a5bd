"""Open GGUF model files: little-endian, versions 2 and 3, mapped into memory.

The file is not trusted: `gguf_format` checks all of it but the weights while it is opened, so that
every tensor is known to lie inside the file, aligned, and to overlap no other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.errors import GGUFError
from quire.weights.file import REQUIRED, Required, WeightFile
from quire.weights.gguf_format import Reader, TensorInfo, Value, quote
from quire.weights.mapped import MappedFile
from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray

__all__ = ["GGUF", "REQUIRED", "GGMLType", "Required", "StringArray", "TensorInfo", "Value"]


class GGUF(WeightFile):
    """An open GGUF file: its metadata, its tensors, and views of their bytes.

    Views stay valid after `close`: the mapping goes when the last of them does.
    """

    error = GGUFError
    version: int
    alignment: int
    tensors: Mapping[str, TensorInfo]

    def __init__(self, mapped: MappedFile) -> None:
        self.path = mapped.path
        self._mapped = mapped
        reader = Reader(mapped.path, mapped.bytes(0, mapped.size))
        self.version, tensor_count, entry_count = reader.header()
        self.metadata, self.alignment = reader.metadata(entry_count)
        self.tensors = reader.tensors(tensor_count, self.alignment)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUF:
        """Map a file and check all of it except the weights themselves."""
        return cls(MappedFile(Path(path), GGUFError, ".gguf"))

    def close(self) -> None:
        """Let go of the mapping; metadata stays, `data` and `release` are no longer possible."""
        self._mapped.close()

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: a read-only view of the file, not a copy."""
        info = self._locate(name)
        return self._mapped.bytes(info.offset, info.nbytes)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from this process's memory; reading them again maps them anew."""
        info = self._locate(name)
        self._mapped.release(info.offset, info.nbytes)

    def _locate(self, name: str) -> TensorInfo:
        self._mapped.check_open()
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: there is no tensor {quote(name)}")
        return info
