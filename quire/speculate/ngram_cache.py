"""N-grams of a text that every generation may draft from, in a file."""

from __future__ import annotations

import operator
import os
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quire.errors import FileError, ModelError, RequestError
from quire.files import replace_file
from quire.speculate.common import check_whole

_MAGIC = b"quire n-grams 1\n"
_HEADER = struct.Struct("<IIQI")  # vocabulary, n, entries, CRC-32 of what follows
_MOST_N = 16


def _token_lists(texts: Iterable[Iterable[int]]) -> Iterator[list[int]]:
    """One after the other: together they may be more than fits memory."""
    try:
        for tokens in texts:
            yield list(map(operator.index, tokens))
    except TypeError as error:
        raise RequestError(f"n-grams are made of lists of token ids: {error}") from error


def _path(path: str | os.PathLike[str]) -> Path:
    try:
        if b"\0" not in os.fsencode(path):
            return Path(path)
    except (TypeError, ValueError):
        pass
    raise RequestError(f"an n-gram cache is under a path that a file can have, not {path!r:.80}")


class NgramCache:
    """The likeliest token after every n tokens that a text has more than once."""

    def __init__(self, n_vocab: int, n: int, following: dict[tuple[int, ...], int]) -> None:
        self.n_vocab = n_vocab
        self.n = n
        self._following = following

    def __len__(self) -> int:
        return len(self._following)

    @classmethod
    def build(cls, texts: Iterable[Sequence[int]], n_vocab: int, n: int = 3) -> NgramCache:
        """From token ids, one list per text."""
        check_whole("NgramCache's n_vocab", n_vocab)
        check_whole("NgramCache's n", n)
        if not 1 <= n <= _MOST_N:
            raise RequestError(f"n-grams of 1 to {_MOST_N} tokens can be kept, not of {n}")
        if not 1 <= n_vocab < 2**31:
            raise RequestError(f"a vocabulary has 1 to {2**31 - 1} tokens, not {n_vocab}")
        counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for tokens in _token_lists(texts):
            outside = [t for t in tokens if not 0 <= t < n_vocab]
            if outside:
                raise RequestError(f"token id {outside[0]} is outside a vocabulary of {n_vocab}")
            for at in range(n, len(tokens)):
                counts[tuple(tokens[at - n : at])][tokens[at]] += 1
        likeliest = {key: seen.most_common(1)[0] for key, seen in counts.items()}
        return cls(n_vocab, n, {key: t for key, (t, times) in likeliest.items() if times > 1})

    def sequel(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that are likely to follow."""
        last = tuple(tokens[-self.n :])
        draft: list[int] = []
        while len(draft) < most and (token := self._following.get(last)) is not None:
            draft.append(token)
            last = (*last[1:], token)
        return tuple(draft)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; one that is there is replaced as a whole, or stays as it was."""
        rows = [(*key, token) for key, token in self._following.items()]
        data = np.array(rows, "<i4").reshape(-1, self.n + 1).tobytes()
        header = _HEADER.pack(self.n_vocab, self.n, len(rows), zlib.crc32(data))

        def write(file: BinaryIO) -> None:
            file.write(_MAGIC + header + data)

        try:
            replace_file(_path(path), write)
        except OSError as error:
            raise FileError(
                f"{path}: the n-gram cache cannot be saved: {error.strerror}"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NgramCache:
        """Reads a file; one that is cut, changed or something else is refused."""
        file = _path(path)
        try:
            if file.exists() and not file.is_file():  # a pipe would wait, a device may never end
                raise FileError(f"{path}: the n-gram cache cannot be read: not a regular file")
            raw = file.read_bytes()
        except OSError as error:
            raise FileError(f"{path}: the n-gram cache cannot be read: {error.strerror}") from error
        start = len(_MAGIC) + _HEADER.size
        if not raw.startswith(_MAGIC) or len(raw) < start:
            raise ModelError(f"{path}: this is no n-gram cache")
        n_vocab, n, entries, checksum = _HEADER.unpack_from(raw, len(_MAGIC))
        data = raw[start:]
        if not 1 <= n <= _MOST_N or len(data) != entries * (n + 1) * 4:
            raise ModelError(f"{path}: {len(data)} bytes do not hold {entries} n-grams of {n}")
        rows = np.frombuffer(data, "<i4").reshape(-1, n + 1)
        if zlib.crc32(data) != checksum or (rows < 0).any() or (rows >= n_vocab).any():
            raise ModelError(f"{path}: the n-grams are damaged; build the file again")
        return cls(n_vocab, n, {tuple(row[:-1]): row[-1] for row in rows.tolist()})
