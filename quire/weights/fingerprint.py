"""Which weights these are, in one short text: cheap to compute, so not every byte is read."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from quire.weights.file import WeightFile

BLOCK = 4096
BLOCKS = 8
"""Samples of each tensor, spread evenly from its first bytes to its last."""


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
        data = file.data(name)
        last = max(info.nbytes - BLOCK, 0)
        for start in sorted({last * i // (BLOCKS - 1) for i in range(BLOCKS)}):
            whole.update(data[start : start + BLOCK].tobytes())
    return whole.hexdigest()
