"""The container of saved state: a safetensors file in which no bit is left unchecked.

    8 bytes   length of the header, little-endian
    header    {"__metadata__": {"checksum": "…", "digests": …, …}, "name": {tensor}, … }, spaces
    data      the tensors one after the other, without gaps, up to the end of the file

`checksum` is of the length and the header, with its own digits taken as zeros; `digests` has one
checksum per tensor. They find damage, not forgery: whoever reads checks every number as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError, SessionFileError

MAX_HEADER: Final = 64 << 20
"""Bytes a header may have: enough for the tables of tens of millions of tokens."""

_START: Final = b'{"__metadata__":{"checksum":"'
_DIGEST_BYTES: Final = 32
_ZEROS: Final = b"0" * (2 * _DIGEST_BYTES)
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
}
_CHUNK: Final = 1 << 20
_MOST: Final = 2**40  # entries along one axis; arrays have less, even where another axis is 0


@dataclass(frozen=True)
class Tensor:
    """Bytes to be written under a name: contiguous pieces that follow one another."""

    shape: tuple[int, ...]
    pieces: Sequence[NDArray[Any]]
    dtype: str

    @classmethod
    def of(cls, array: NDArray[Any]) -> Tensor:
        """An array of int32 or float32 values."""
        dtype = {"i": "I32", "f": "F32"}[array.dtype.kind]
        return cls(array.shape, [np.ascontiguousarray(array, _DTYPES[dtype])], dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def write(self, io: BinaryIO) -> str:
        """Writes all pieces; the checksum of what was written.

        Each is copied before, since somebody may append to a page meanwhile, behind what is seen.
        """
        whole = blake2b(digest_size=_DIGEST_BYTES)
        for piece in self.pieces:
            copied = bytes(_raw(piece))
            whole.update(copied)
            io.write(copied)
        return whole.hexdigest()


def write_container(
    io: BinaryIO, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    """Writes metadata and tensors; the header comes last, when all checksums are known."""
    start = io.tell()
    io.seek(len(_header(metadata, tensors, dict.fromkeys(tensors, _ZEROS.decode()))), 1)
    digests = {name: tensor.write(io) for name, tensor in tensors.items()}
    end = io.tell()
    io.seek(start)
    io.write(_header(metadata, tensors, digests))
    io.seek(end)


def _header(
    metadata: Mapping[str, str], tensors: Mapping[str, Tensor], digests: Mapping[str, str]
) -> bytes:
    """The length and the header; as long whatever the digests are."""
    header: dict[str, object] = {
        "__metadata__": {"checksum": _ZEROS.decode(), **metadata, "digests": json.dumps(digests)}
    }
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER:
        raise RequestError(
            f"the tables of what is to be saved take {len(raw):,} bytes, a file has room for "
            f"{MAX_HEADER:,}; save fewer sequences or checkpoints at once"
        )
    assert raw.startswith(_START + _ZEROS)
    length = len(raw).to_bytes(8, "little")
    rest = raw[len(_START) + len(_ZEROS) :]
    return length + _START + _header_checksum(length, rest) + rest


def _header_checksum(length: bytes, rest: bytes) -> bytes:
    """The checksum of a header of which `rest` comes after the checksum's digits."""
    whole = blake2b(length + _START + _ZEROS, digest_size=_DIGEST_BYTES)
    whole.update(rest)
    return whole.hexdigest().encode()


def _raw(piece: NDArray[Any]) -> memoryview:
    return piece.reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the data, and what its bytes must add up to."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    digest: str


class Container:
    """A container that is being read, from the present place of `io` to its end.

    Everything but the data is checked here. The data is when it is read, each tensor as a whole.
    """

    def __init__(self, io: BinaryIO, source: str) -> None:
        self.source = source
        self._io = io
        start = io.tell()
        size = io.seek(0, 2) - start
        io.seek(start)
        header = self._header(size)
        self._data = io.tell()
        metadata = header.pop("__metadata__")
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            self.refuse("its metadata is not text by name")
        self.metadata: dict[str, str] = metadata
        digests = self.json(metadata.get("digests", ""))
        if not isinstance(digests, dict) or digests.keys() != header.keys():
            self.refuse("its checksums are of other tensors than it has")
        self.tensors = self._places(header, digests, size - (self._data - start))

    def refuse(self, reason: str) -> NoReturn:
        """Raises SessionFileError with the name of the file."""
        raise SessionFileError(f"{self.source}: {reason}")

    def json(self, text: str | bytes) -> Any:
        """JSON of the file: no fractions, no key twice, nothing nested without end."""
        try:
            text = text.decode() if isinstance(text, bytes) else text
            return json.loads(
                text, object_pairs_hook=_distinct, parse_float=_no_number, parse_constant=_no_number
            )
        except (ValueError, RecursionError) as error:
            self.refuse(f"its header cannot be read: {error}")

    def _header(self, size: int) -> dict[str, Any]:
        least = 8 + len(_START) + len(_ZEROS)
        if size < least:
            self.refuse(f"not a session file, or truncated: {size} bytes, a header takes {least}")
        length = self._io.read(8)
        n = int.from_bytes(length, "little")
        start = self._io.read(len(_START))
        if start != _START:
            self.refuse("not a session file, or altered: it does not start like one")
        if n > size - 8:
            self.refuse(
                f"truncated or altered: its header takes {n:,} bytes, {size - 8:,} are there"
            )
        if not least - 8 <= n <= MAX_HEADER:
            self.refuse(f"altered: a header takes {least - 8} to {MAX_HEADER:,} bytes, not {n:,}")
        checksum = self._io.read(len(_ZEROS))
        rest = self._io.read(n - len(_START) - len(_ZEROS))
        if checksum != _header_checksum(length, rest):
            self.refuse("altered: the checksum of its header is wrong")
        header = self.json(_START + checksum + rest)
        if not isinstance(header, dict):
            self.refuse("its header is not a table")
        return header

    def _places(
        self, header: dict[str, Any], digests: dict[str, Any], size: int
    ) -> dict[str, Place]:
        places: dict[str, Place] = {}
        at = 0
        for name, entry in header.items():
            dtype, shape, (start, end) = self._described(name, entry)
            if start != at or end - start != prod(shape) * _DTYPES[dtype].itemsize:
                self.refuse(
                    f"tensor {name!r} of shape {shape} is said to lie from {start} to {end}, it "
                    f"has to start at {at} and to be as long as its shape says"
                )
            places[name] = Place(dtype, tuple(shape), start, end - start, digests[name])
            at = end
        if at != size:
            self.refuse(f"truncated or altered: its tensors take {at:,} bytes, {size:,} are there")
        return places

    def _described(self, name: str, entry: Any) -> tuple[str, list[int], list[int]]:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            self.refuse(f"tensor {name!r} does not say its type, shape and place")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        known = isinstance(dtype, str) and dtype in _DTYPES
        known = known and is_counts(shape, 4) and max(shape, default=0) <= _MOST
        if not (known and is_counts(shape, 4) and is_counts(offsets, 2) and len(offsets) == 2):
            self.refuse(f"tensor {name!r} has no type, shape and place that make sense")
        return dtype, shape, offsets

    # -- data -----------------------------------------------------------------------------------

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as an array of its own; its size is known to be that of its bytes."""
        place = self.tensors[name]
        out: NDArray[Any] = np.empty(place.shape, _DTYPES[place.dtype])
        self.read_into(name, [out])
        return out

    def read_into(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """Fills arrays with a tensor, one after the other; refuses bytes that were altered."""
        place = self.tensors[name]
        self._io.seek(self._data + place.start)
        whole = blake2b(digest_size=_DIGEST_BYTES)
        for chunk in _chunks(pieces):
            if self._io.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                self.refuse(f"truncated: tensor {name!r} ends early")
            whole.update(chunk)
        if whole.hexdigest() != place.digest:
            self.refuse(f"altered: the checksum of tensor {name!r} is wrong")


def _chunks(pieces: Iterable[NDArray[Any]]) -> Iterator[memoryview]:
    for piece in pieces:
        raw = _raw(piece)
        for at in range(0, len(raw), _CHUNK):
            yield raw[at : at + _CHUNK]


def is_counts(value: object, most: int) -> bool:
    """Whether this is a list of at most so many whole numbers from 0 on."""
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in value)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name twice")
    return made


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a whole number")
