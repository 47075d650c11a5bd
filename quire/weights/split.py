"""Models in several GGUF files, as llama.cpp splits them: name-00001-of-00003.gguf and so on.

The first part holds the metadata, all of them hold tensors. Every part is checked as a file of its
own; here it is checked that they belong together and that none is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.errors import GGUFError
from quire.weights.file import WeightFile
from quire.weights.gguf import GGUF
from quire.weights.gguf_format import quote
from quire.weights.open_file import Stored

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MOST_PARTS: Final = 512  # each is an open file


class SplitGGUF(WeightFile):
    """An open model in several files; a tensor is read from the part that holds it."""

    error = GGUFError

    def __init__(self, parts: list[GGUF]) -> None:
        first = parts[0]
        self.path = first.path
        self.whole = first.whole
        self.asked = first.asked
        self.metadata = MappingProxyType(
            {k: v for k, v in first.metadata.items() if k not in (_NUMBER, _COUNT, _TENSORS)}
        )
        self._parts = parts
        self._part_of: dict[str, GGUF] = {}
        for part in parts:
            for name in part.tensors:
                if name in self._part_of:
                    other = self._part_of[name].path.name
                    raise GGUFError(f"{part.path}: tensor {quote(name)} is in {other} as well")
                self._part_of[name] = part
        self.tensors = MappingProxyType(
            {name: part.tensors[name] for name, part in self._part_of.items()}
        )

    def entry(self, key: str) -> bytes:
        """An entry of the metadata, as the first part writes it."""
        return self._parts[0].entry(key)

    def data(self, name: str) -> NDArray[np.uint8]:
        """A copy of the bytes of a tensor."""
        return self._part(name).data(name)

    def stored(self, name: str) -> Stored | None:
        """The bytes of a tensor where they lie."""
        return self._part(name).stored(name)

    def samples(self, name: str) -> Iterator[bytes]:
        """A hash of samples of a tensor, taken when it was read, or now."""
        return self._part(name).samples(name)

    def close(self) -> None:
        """Let go of all files; the metadata stays."""
        for part in self._parts:
            part.close()

    def _part(self, name: str) -> GGUF:
        if name not in self._part_of:
            raise GGUFError(f"{self.path}: there is no tensor {quote(name)}")
        return self._part_of[name]


def with_parts(first: GGUF) -> WeightFile:
    """The whole model of a file that was opened: the file itself, or it and its further parts."""
    count = first.get_int(_COUNT, default=1, minimum=0)
    if count <= 1:
        return first
    parts = [first]
    try:
        for path in _further(first, count):
            parts.append(GGUF.open(path, first.whole))
            _check_number(parts[-1], len(parts) - 1, count)
        whole = SplitGGUF(parts)
        told = first.get_int(_TENSORS, default=len(whole.tensors))
        if told != len(whole.tensors):
            raise GGUFError(
                f"{first.path}: its {count} parts hold {len(whole.tensors)} tensors together, "
                f"{told} were split; fetch them again"
            )
        return whole
    except BaseException:
        for part in parts:
            part.close()
        raise


def _further(first: GGUF, count: int) -> list[Path]:
    """The paths of the parts behind the first, all of them there."""
    if count > _MOST_PARTS:
        raise GGUFError(f"{first.path}: {count} parts, Quire opens at most {_MOST_PARTS}")
    found = _PART.fullmatch(first.path.name)
    number = first.get_int(_NUMBER, default=0)
    wanted = f"name-{number + 1:05}-of-{count:05}.gguf"
    if found is None or (int(found[2]), int(found[3])) != (number + 1, count):
        raise GGUFError(
            f"{first.path}: it is part {number + 1} of {count} by its metadata, so it must be "
            f"called {wanted}, beside the others"
        )
    names = [f"{found[1]}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    if number != 0:
        raise GGUFError(f"{first.path}: part {number + 1} of {count}; pass the first, {names[0]}")
    paths = [first.path.with_name(name) for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise GGUFError(
            f"{first.path}: {len(missing)} of its {count} parts are missing: "
            f"{', '.join(missing[:4])}; fetch them too, into the same folder"
        )
    return paths[1:]


def _check_number(part: GGUF, number: int, count: int) -> None:
    told = part.get_int(_NUMBER), part.get_int(_COUNT)
    if told != (number, count):
        raise GGUFError(
            f"{part.path}: it says that it is part {told[0] + 1} of {told[1]}, "
            f"not {number + 1} of {count}; the parts are not of one model"
        )
