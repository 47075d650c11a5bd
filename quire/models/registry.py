"""Which architectures there are, and how a file or a folder becomes a model."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Final, Protocol

from quire.errors import ModelError
from quire.memory.build import GroupKernels
from quire.memory.layout import GroupSpec
from quire.memory.state_layout import RecurrentSpec
from quire.models.loader import Loader, ProgressFn, TensorCheck, TensorLoader
from quire.ops import Array, Ops, Refused
from quire.ops.batch import Batch
from quire.weights.file import WeightFile
from quire.weights.gguf import GGUF

if TYPE_CHECKING:
    from quire.weights.naming import HFConfig, Naming

# GGUF's name of an architecture, which is its module's as well, and what config.json calls it.
_ARCHITECTURES: Final[dict[str, tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM", "llama", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "gemma3_text", "gemma3",
    ),
    "mamba2": ("Mamba2ForCausalLM", "mamba2"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", "qwen3_5"),
    "qwen35moe": (
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text",
        "qwen3_5_moe",
    ),
}  # fmt: skip


class Model(Protocol):
    """A loaded model: it declares its memory, and turns a batch into logits, some layers at a time.

    embed ──▶ run (layers 0 … n_layers-1, in one go or several) ──▶ logits
    """

    n_layers: int
    n_vocab: int
    n_ctx_train: int
    groups: tuple[GroupSpec | RecurrentSpec, ...]
    weight_bytes: int
    kernels: dict[str, GroupKernels]
    """What the device can do with pages, by group."""

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""

    def run(self, x: Array, batch: Batch, start: int, stop: int) -> None:
        """Layers start … stop-1, in place on x, over the batch's memory."""

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers."""


class Architecture(Protocol):
    """What a module of an architecture offers."""

    def build(self, file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> Model:
        """The model, its tensors taken through `load`."""

    def from_hf(self, config: HFConfig) -> Naming:
        """How a folder with this config.json is seen as a GGUF file."""


def architectures() -> list[str]:
    """The names of all known architectures."""
    return sorted(_ARCHITECTURES)


def architecture_of(file: WeightFile) -> str:
    """The architecture a file asks for; refused when it is not known."""
    name = file.get_str("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(architectures())
        raise ModelError(f"{file.path}: architecture {name!r} is not known; there are {known}")
    return name


def open_weights(path: str | os.PathLike[str]) -> WeightFile:
    """A .gguf file, or a folder with config.json and safetensors."""
    if not os.path.isdir(path):
        return GGUF.open(path)
    from quire.weights.folder import Folder  # only here, so that starting is quicker

    return Folder.open(path, _naming)


def load_model(
    file: WeightFile, ops: Ops, type_k: str, type_v: str, progress: ProgressFn | None = None,
    quantize: str | None = None,
) -> Model:  # fmt: skip
    """Builds twice: first to check every tensor, so that all faults are told at once."""
    check, _ = _checked(file, ops)
    check.refuse_idle(quantize)
    load = TensorLoader(file, ops, check.nbytes, progress, quantize)
    return _build(file, load, ops, type_k, type_v)


def declared_groups(file: WeightFile, ops: Ops) -> tuple[GroupSpec | RecurrentSpec, ...]:
    """The groups of memory that a file's model declares, without loading its weights."""
    return _checked(file, ops)[1].groups


def _checked(file: WeightFile, ops: Ops) -> tuple[TensorCheck, Model]:
    """A model without its weights, every tensor of the file held against what it needs.

    How K and V are stored makes no difference to that; float32 suits heads of every size.
    """
    check = TensorCheck(file)
    model = _build(file, check, ops, "f32", "f32")
    check.raise_faults()
    check.refuse_rest()
    return check, model


def _build(file: WeightFile, load: Loader, ops: Ops, type_k: str, type_v: str) -> Model:
    try:
        return _module(architecture_of(file)).build(file, load, ops, type_k, type_v)
    except Refused as error:  # sizes and values that the kernels cannot work with
        raise ModelError(f"{file.path}: {error}") from error


def _module(name: str) -> Architecture:
    module: Architecture = importlib.import_module(f"quire.models.{name}")
    return module


def _naming(config: HFConfig) -> Naming:
    """A folder's names by its architecture; code that comes with a model is never run."""
    names = config.strings("architectures", default=[]) or [config.text("model_type")]
    if "quantization_config" in config:
        config.refuse("quantization_config", "get the model in bfloat16, or as GGUF")
    for name, known in _ARCHITECTURES.items():
        if names[0] in known:
            return _module(name).from_hf(config)
    own_code = "; the code that comes with it is not run" if "auto_map" in config else ""
    known_names = ", ".join(known[0] for known in _ARCHITECTURES.values())
    raise ModelError(
        f"{config.path}: architecture {names[0]!r} is not known{own_code}; there are {known_names}"
    )
