"""Which files of a repository of the Hugging Face Hub make up which model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from quire.errors import FetchError
from quire.weights.catalog import HubName, is_inside, preferred

_FOLDER: Final = "safetensors"
"""The label of a model that is a folder."""
_BESIDE: Final = frozenset({
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "model.safetensors.index.json",
})  # fmt: skip
_WEIGHTS: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")
_QUANT: Final = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4|BF16|F16|F32|FP16|FP32))$", re.I
)
_UNREAD: Final = re.compile(r"(UD-)?(IQ[123]|TQ|MXFP4|Q1)", re.I)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, as the Hub tells of it."""

    name: str
    nbytes: int
    sha256: str | None


def choose(name: HubName, files: Iterable[HubFile]) -> tuple[str, list[HubFile]]:
    """The files of the model that a name means, and its label; refuses what is not there."""
    known = [file for file in files if is_inside(file.name)]
    models = models_of(known)
    if name.file:
        for label, parts in models.items():
            if name.file in [file.name for file in parts]:
                return label, parts
        raise FetchError(f"{name.repo_id} has no model file {name.file!r}; it has {_told(models)}")
    if name.label:
        for label, parts in models.items():
            if label.lower() == name.label.lower():
                _check_readable(name, label, models)
                return label, parts
        raise FetchError(f"{name.repo_id} has no {name.label!r}; it has {_told(models)}")
    for label in preferred(models):
        if not _UNREAD.match(label):
            return label, models[label]
    pickles = any(file.name.endswith((".bin", ".pt", ".pth")) for file in known)
    instead = "only pickles, which can run code; " if pickles else ""
    raise FetchError(
        f"{name.repo_id} has no model that Quire reads: {instead}it has {_told(models)}; "
        "look for GGUF files, or safetensors with a config.json"
    )


def models_of(files: Iterable[HubFile]) -> dict[str, list[HubFile]]:
    """The models in a repository by label: a quantization, a file's name, or `safetensors`."""
    files = sorted(files, key=lambda file: file.name)
    stems: dict[str, list[HubFile]] = {}
    for file in files:
        stem = file.name.removesuffix(".gguf")
        if stem != file.name and not stem.rpartition("/")[2].lower().startswith(("mmproj", "imat")):
            stems.setdefault(_PART.sub("", stem), []).append(file)
    models: dict[str, list[HubFile]] = {}
    for stem, parts in stems.items():
        label = _quant(stem)
        if label in (_quant(other) for other in stems if other != stem):
            label = ""
        models[label or stem.replace("/", "--")] = parts
    weights = [file for file in files if _WEIGHTS.fullmatch(file.name)]
    beside = [file for file in files if file.name in _BESIDE]
    if weights and "config.json" in [file.name for file in beside]:
        models[_FOLDER] = [*beside, *weights]
    return models


def _quant(stem: str) -> str:
    """The quantization that ends a file's name."""
    found = _QUANT.search(stem.rpartition("/")[2])
    return found[1].upper() if found else ""


def _told(models: Mapping[str, object]) -> str:
    return ", ".join(preferred(models)) or "no GGUF file and no folder of safetensors"


def _check_readable(name: HubName, label: str, models: Mapping[str, object]) -> None:
    if _UNREAD.match(label):
        others = ", ".join(one for one in preferred(models) if not _UNREAD.match(one))
        raise FetchError(
            f"{name}: Quire does not compute with {label}; it has {others or 'nothing else'}"
        )
