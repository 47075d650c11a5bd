"""Which weights these are, in one short text: cheap to compute, so not every byte is looked at.

Samples are taken of tensors while they are loaded, so a fingerprint is that of what was loaded,
whatever has become of the file since.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quire.weights.file import WeightFile

WHOLE = 1 << 15
"""Tensors of no more bytes are seen whole."""
BLOCK = 1024
BLOCKS = 8
"""Samples of larger ones as they are stored, spread evenly from the first bytes to the last."""

ReadFn = Callable[[int, int], NDArray[np.uint8]]
"""Some bytes of a tensor, by where they begin and how many they are."""


def sample(read: ReadFn, nbytes: int) -> bytes:
    """A hash of some bytes of a tensor."""
    digest = blake2b(digest_size=16)
    if nbytes <= WHOLE:
        digest.update(read(0, nbytes).data)
    else:
        for i in range(BLOCKS):
            digest.update(read((nbytes - BLOCK) * i // (BLOCKS - 1), BLOCK).data)
    return digest.digest()


def sample_of(data: NDArray[np.uint8]) -> bytes:
    """A hash of some bytes of a tensor that is at hand."""
    return sample(lambda start, length: data[start : start + length], len(data))


def fingerprint(file: WeightFile, facts: str = "") -> str:
    """A hash of hyperparameters, and of all tensors' names, types, shapes, sizes and samples.

    It tells models, quantizations and fine-tunes apart: they differ everywhere in some tensor. Not
    seen is a change of a few bytes between the samples. The tokenizer and what a file says about
    its origin are left out: they do not change what tokens compute to. `facts` is what else does.

    To be called while the file is still open: of tensors that nobody loaded, samples are read now.
    """
    whole = blake2b(f"{facts}\n".encode(), digest_size=16)
    for key in sorted(file.metadata):
        if key == "general.architecture" or not key.startswith(("general.", "tokenizer.")):
            value = file.metadata[key]
            text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
            whole.update(f"{key!r} {text}\n".encode())
    for name in sorted(file.tensors):
        info = file.tensors[name]
        whole.update(f"{name!r} {info.type!s} {info.shape} {info.nbytes}\n".encode())
        for part in file.samples(name):
            whole.update(part)
    return whole.hexdigest()
