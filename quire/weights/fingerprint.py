"""Which weights these are, in one short text: cheap to compute, so not every byte is read."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from quire.weights.file import WeightFile

BLOCK = 4096
BLOCKS = 8
"""Samples of each tensor, spread evenly from its first bytes to its last.

They are taken as the tensor is stored, so that none is made up of others only to be looked at; of
one that is stored in many parts, at least one from each."""


def fingerprint(file: WeightFile, facts: str = "") -> str:
    """A hash of hyperparameters, and of all tensors' names, types, shapes, sizes and samples.

    It tells models, quantizations and fine-tunes apart: they differ everywhere in some tensor. Not
    seen is a change of a few bytes between the samples. The tokenizer and what a file says about
    its origin are left out: they do not change what tokens compute to. `facts` is what else does.
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
        parts = list(file.stored(name))
        blocks = max(BLOCKS // len(parts), 1)
        for data in parts:
            last = max(len(data) - BLOCK, 0)
            for start in sorted({last * i // max(blocks - 1, 1) for i in range(blocks)}):
                whole.update(data[start : start + BLOCK].tobytes())
    return whole.hexdigest()
