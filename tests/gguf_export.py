"""Writes a model folder as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.registry import open_weights
from quire.weights.file import WeightFile
from quire.weights.quant import GGMLType, dequantize
from tests.gguf_writer import Tensor, Typed, ValueType, write_gguf

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# Tensors of more than one dimension that llama.cpp wants in float32.
_FLOATS = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "conv1d.weight", "shortconv.conv.weight",
    "ssm_a", "ssm_d", "_norm.weight",
)  # fmt: skip


def export(folder: Path, path: Path, pre: str = "qwen2", exact: bool = False) -> Path:
    """The GGUF file of a folder with a byte-level BPE vocabulary that splits as `pre` says.

    With `exact`, all of it is float32: llama.cpp rounds activations to the type of a matrix.
    """
    with open_weights(folder) as file:
        metadata = {key: _value(value) for key, value in file.metadata.items()}
        metadata |= {"general.name": folder.name, **_vocabulary(folder, file, pre)}
        metadata |= _only_llama_cpp_needs(file)
        tensors = {name: _tensor(file, name, exact) for name in file.tensors}
        return write_gguf(path, metadata, tensors)


def _only_llama_cpp_needs(file: WeightFile) -> dict[str, Any]:
    """Keys that are refused if missing, though they make no difference to text.

    llama.cpp leaves unrotated what no section covers, so they are thirds of all there is, as
    those of Qwen's own files are, whatever a folder says.
    """
    arch = file.get_str("general.architecture")
    if not arch.startswith("qwen35"):
        return {}
    pairs = file.get_int(f"{arch}.rope.dimension_count") // 2
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return {f"{arch}.rope.dimension_sections": Typed(ValueType.INT32, sections)}


def _value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = ValueType.BOOL if value.dtype == np.bool_ else ValueType.INT32
        return Typed(kind, value.tolist())
    return value


def _tensor(file: WeightFile, name: str, exact: bool) -> Tensor:
    tensor, data = file.tensors[name], file.data(name)
    if name.endswith("ssm_norm.weight") and len(tensor.shape) == 2:  # norms each group by itself
        groups = file.get_int("mamba2.ssm.group_count")
        return dequantize(data, tensor.type, tensor.shape).reshape(groups, -1)
    if exact or len(tensor.shape) < 2 or name.endswith(_FLOATS):
        return dequantize(data, tensor.type, tensor.shape)
    assert tensor.type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
    return tensor.type, data, tensor.shape


def _vocabulary(folder: Path, file: WeightFile, pre: str) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    size = file.tensors["token_embd.weight"].shape[0]
    texts = [f"[PAD{i}]" for i in range(size)]
    kinds = [UNUSED] * size
    for text, i in tokenizer["model"]["vocab"].items():
        texts[i], kinds[i] = text, NORMAL
    for token in tokenizer["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": Typed(ValueType.INT32, kinds),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": texts.index(settings["eos_token"]),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }
