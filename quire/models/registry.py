"""Which architectures there are, and how a file becomes a model."""

from __future__ import annotations

import importlib
from typing import Protocol

from quire.errors import ModelError
from quire.memory.build import GroupKernels
from quire.memory.layout import GroupSpec
from quire.models.loader import Loader, ProgressFn, TensorCheck, TensorLoader
from quire.ops import Array, Ops
from quire.ops.batch import Batch
from quire.weights.gguf import GGUF

_MODULES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class Model(Protocol):
    """A loaded model: it declares its memory, and turns a batch into logits."""

    n_vocab: int
    n_ctx_train: int
    groups: tuple[GroupSpec, ...]
    weight_bytes: int
    kernels: dict[str, GroupKernels]
    """What the device can do with pages, by group."""

    def forward(self, batch: Batch) -> Array:
        """Logits of the batch's `logit_rows`."""


class Architecture(Protocol):
    """What a module of an architecture offers."""

    def build(self, file: GGUF, load: Loader, ops: Ops, type_k: str, type_v: str) -> Model:
        """The model, its tensors taken through `load`."""


def architectures() -> list[str]:
    """The names of all known architectures."""
    return sorted(_MODULES)


def architecture_of(file: GGUF) -> str:
    """The architecture a file asks for; refused when it is not known."""
    name = file.get_str("general.architecture")
    if name not in _MODULES:
        known = ", ".join(architectures())
        raise ModelError(f"{file.path}: architecture {name!r} is not known; there are {known}")
    return name


def load_model(
    file: GGUF, ops: Ops, type_k: str, type_v: str, progress: ProgressFn | None = None
) -> Model:
    """Builds twice: first to check every tensor, so that all faults are told at once."""
    module: Architecture = importlib.import_module(
        f"quire.models.{_MODULES[architecture_of(file)]}"
    )
    check = TensorCheck(file)
    module.build(file, check, ops, type_k, type_v)
    check.raise_faults()
    return module.build(file, TensorLoader(file, ops, check.nbytes, progress), ops, type_k, type_v)
