"""Which architectures there are, and who builds the model of a file or a folder."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Final, Protocol

from quire.devices.device import GroupKernels
from quire.errors import ModelError
from quire.memory.groups.layout import GroupSpec
from quire.memory.groups.state_layout import RecurrentSpec
from quire.models.loader import Kit, Part
from quire.ops import Array, Int32, Ops, Refused
from quire.ops.batch import Batch
from quire.weights.file import WeightFile
from quire.weights.gguf import GGUF
from quire.weights.split import with_parts

if TYPE_CHECKING:
    from quire.models.streaming import Streaming
    from quire.weights.naming import HFConfig, Naming

# GGUF's name of an architecture, which is its module's as well, and what config.json calls it.
_ARCHITECTURES: Final[dict[str, tuple[str, ...]]] = {
    "llama": (
        "LlamaForCausalLM", "MistralForCausalLM", "LlamaModel", "MistralModel", "llama", "mistral",
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model", "qwen3"),
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
    width: int
    """Values of a token between layers."""
    groups: tuple[GroupSpec | RecurrentSpec, ...]
    ops: Ops
    """Of the device that the output is on."""
    ops_after: list[Ops]
    """Of the device on which x is after so many layers; at 0, after `embed`."""
    arithmetic: str
    """How it computes: the same tokens have the same bits under one name."""
    tied: bool
    """Whether the output is the embedding again."""
    part_bytes: dict[Part, int]
    """Bytes that the matrices of each part hold."""
    layer_bytes: tuple[int, ...]
    """Bytes that the matrices of each layer hold."""
    weight_bytes: int
    """Bytes that all matrices hold."""
    kernels: dict[str, GroupKernels]
    """What the device can do with pages, by group."""

    def first_of(self, ops: Ops) -> int:
        """The layer from which on everything is on this device; n_layers if the last is not."""

    def groups_before(self, layer: int) -> set[str]:
        """The groups of memory that the layers before this one have."""

    def stream(self, streaming: Streaming) -> None:
        """Lets long prompts run networks of the host elsewhere."""

    def close(self) -> None:
        """Lets go of the weights now, whoever still holds the model; it computes nothing more."""

    def embed(self, batch: Batch) -> Array:
        """The batch's tokens as rows of the model's width."""

    def run(
        self, x: Array, batch: Batch, start: int, stop: int, on: Ops | None = None,
        rows: Int32 | None = None,
    ) -> Array:  # fmt: skip
        """x after layers start … stop-1, over the batch's memory; in place on one device.

        x is where the layer before left it, or where it is said to be. With `rows`, which
        ascend, these come back, and what only the others need may be left out.
        """

    def hidden(self, x: Array) -> Array:
        """Rows that went through the layers, normed: what the output is made from."""

    def logits(self, x: Array) -> Array:
        """The output of rows that went through the layers and are on its device."""


class Architecture(Protocol):
    """What a module of an architecture offers."""

    def build(self, file: WeightFile, kit: Kit) -> Model:
        """The model, its tensors taken through the kit."""

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


def open_weights(path: str | os.PathLike[str], whole: bool = True) -> WeightFile:
    """A .gguf file, all parts of a split one, or a folder with config.json and safetensors.

    Of a file that is not `whole`, only what its header says can be asked.
    """
    if not os.path.isdir(path):
        return with_parts(GGUF.open(path, whole))
    from quire.weights.folder import Folder  # only here, so that starting is quicker

    return Folder.open(path, _naming)


def build_model(file: WeightFile, kit: Kit) -> Model:
    """The model of a file, its tensors taken through the kit."""
    try:
        return _module(architecture_of(file)).build(file, kit)
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
