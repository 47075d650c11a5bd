"""What a model's files say about its use: how it samples in chats, how its vectors are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelError, RequestError
from quire.sampling import Sampling
from quire.types import Pooling
from quire.weights.file import WeightFile
from quire.weights.folder import read_beside

_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # as GGUF numbers them
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}

_CHAT = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""Where a model's files say nothing; as llama.cpp has it."""
_GGUF = {  # behind general.sampling.
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold",
    "penalty_repeat": "repetition_penalty", "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
}  # fmt: skip
_CONFIG = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def chat_sampling_of(file: WeightFile) -> Sampling:
    """How a model's makers want it to be sampled in conversations."""
    if file.path.is_dir():
        where = f"{file.path / 'generation_config.json'}"
        config = _settings(file.path, "generation_config.json")
        found = {name: config[name] for name in _CONFIG if config.get(name) is not None}
        if config.get("do_sample") is False:
            found = {"temperature": 0.0}
    else:
        where = f"{file.path}: general.sampling"
        found = {
            field: file.metadata[key]
            for name, field in _GGUF.items()
            if (key := f"general.sampling.{name}") in file.metadata
        }
    if not found:
        return _CHAT
    try:
        return Sampling(**{"temperature": 1.0, **found})
    except RequestError as error:
        raise ModelError(f"{where}: {error}") from error


def pooling_of(file: WeightFile) -> Pooling | None:
    """How a file wants a text's vector to be made of its tokens'; None where it does not say."""
    if file.path.is_dir():
        modes = _settings(file.path, "config.json", within="1_Pooling")
        return next((name for mode, name in _MODES.items() if modes.get(mode) is True), None)
    arch = file.get_str("general.architecture")
    kind = file.get_int(f"{arch}.pooling_type", default=0)
    if kind and kind not in _POOLINGS:
        raise ModelError(
            f"{file.path}: its vectors are pooled in a way that is not known ({kind}); it may be a "
            "model that ranks texts, which Quire does not run"
        )
    return _POOLINGS.get(kind)


def _settings(folder: Path, name: str, within: str = "") -> dict[str, Any]:
    """A small file of settings in a folder; empty where there is none."""
    text = read_beside(folder, name, within)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder / within / name}: not JSON: {error!s:.80}") from error
    return found if isinstance(found, dict) else {}
