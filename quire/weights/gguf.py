"""Open GGUF model files: little-endian, versions 2 and 3.

The file is not trusted: `gguf_format` checks all of it but the weights while it is opened, so that
every tensor is known to lie inside the file, aligned, and to overlap no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.errors import GGUFError
from quire.weights.file import REQUIRED, Required, WeightFile
from quire.weights.fingerprint import sample, sample_of
from quire.weights.gguf_format import Reader, Short, TensorInfo, Value, quote
from quire.weights.open_file import OpenFile, Stored
from quire.weights.quant import GGMLType
from quire.weights.strings import StringArray

__all__ = ["GGUF", "REQUIRED", "GGMLType", "Required", "StringArray", "TensorInfo", "Value"]


_FIRST_LOOK: Final = 1 << 21
_MOST_HEADER: Final = 1 << 28  # the largest vocabularies take a tenth of that


class GGUF(WeightFile):
    """An open GGUF file: its metadata, its tensors, and copies of their bytes."""

    error = GGUFError
    version: int
    alignment: int
    tensors: Mapping[str, TensorInfo]

    def __init__(self, file: OpenFile, whole: bool = True) -> None:
        self.path = file.path
        self.whole = whole
        self._file = file
        self.asked = set()
        self._samples: dict[str, bytes] = {}
        length = min(_FIRST_LOOK, file.size)
        while not self._read_header(length):
            length = min(length * 4, file.size)

    def _read_header(self, length: int) -> bool:
        """Reads all but the weights; False if that takes more than so many bytes."""
        if length > _MOST_HEADER:
            raise GGUFError(
                f"{self.path}: its metadata takes more than {_MOST_HEADER // 4} bytes, "
                "which is more than Quire reads"
            )
        data = self._file.read(0, length, "the header")
        reader = Reader(self.path, data, self._file.size, self.whole)
        try:
            self.version, tensor_count, entry_count = reader.header()
            self.metadata, self.alignment = reader.metadata(entry_count)
            self.tensors = reader.tensors(tensor_count, self.alignment)
            self._spans = reader.spans
        except Short:
            return False
        return True

    @classmethod
    def open(cls, path: str | os.PathLike[str], whole: bool = True) -> GGUF:
        """Open a file and check all of it except the weights themselves.

        Not `whole`, weights need not be there: of a download that has begun, the header is enough.
        """
        try:
            file = OpenFile(Path(path), GGUFError, ".gguf")
        except TypeError:
            raise GGUFError(f"a path is a text, not {path!r:.80}") from None
        try:
            return cls(file, whole)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Let go of the file; metadata stays, `data` is no longer possible."""
        self._file.close()

    def entry(self, key: str) -> bytes:
        """An entry of the metadata, as the file writes it: of the same type to the bit."""
        start, end = self._spans[key]
        return self._file.read(start, end - start, f"the entry {quote(key)}").tobytes()

    def data(self, name: str) -> NDArray[np.uint8]:
        """A copy of the bytes of a tensor."""
        info = self._locate(name)
        data = self._file.read(info.offset, info.nbytes, f"tensor {quote(name)}")
        if name not in self._samples:
            self._samples[name] = sample_of(data)
        return data

    def stored(self, name: str) -> Stored | None:
        """The bytes of a tensor where they lie."""
        info = self._locate(name)
        return Stored(self._file, info.offset, info.nbytes, f"tensor {quote(name)}")

    def samples(self, name: str) -> Iterator[bytes]:
        """A hash of samples of a tensor, taken when it was read, or now."""
        if name not in self._samples:
            info, what = self._locate(name), f"tensor {quote(name)}"
            self._samples[name] = sample(
                lambda start, length: self._file.read(info.offset + start, length, what),
                info.nbytes,
            )
        yield self._samples[name]

    def _locate(self, name: str) -> TensorInfo:
        self._file.check_open()
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: there is no tensor {quote(name)}")
        return info
