"""Hyperparameters that an architecture does not compute with: refused where they would matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.config import LoadConfig
from quire.errors import ModelError
from quire.models.registry import open_weights
from quire.ops.cpu import CpuOps
from quire.placement.blueprint import Blueprint
from tests import tiny
from tests.gguf_writer import Typed, ValueType, write_gguf
from tests.model_folders import MODELS

OPS = CpuOps(1)


def read(path: Path) -> None:
    with open_weights(path) as file:
        Blueprint.read(file, OPS, LoadConfig())


def gguf(path: Path, variant: str = "llama", **more: Any) -> Path:
    model = tiny.VARIANTS[variant]
    added = {f"{model.arch}.{key.replace('__', '.')}": value for key, value in more.items()}
    return write_gguf(path / "m.gguf", tiny.metadata(model) | added, dict(tiny.weights(model)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 1.0), ("logit_scale", 0.5),
        ("attention__scale", 0.3), ("attention__clamp_kqv", 8.0), ("residual_scale", 0.22),
        ("embedding_scale", 12.0), ("attention__max_alibi_bias", 8.0),
        ("attention__causal", False), ("use_parallel_residual", True),
        ("attention__temperature_scale", 0.1), ("rope__scale_linear", 4.0),
        ("rope__scaling__yarn_log_multiplier", 0.1), ("expert_count", 8),
        ("expert_gating_func", 2), ("rope__scaling__attn_factor", 1.5),
        ("attention__scale", float("nan")),
        ("activation_sparsity_scale", Typed(ValueType.FLOAT32, [1.0, 1.5])),
    ],
)  # fmt: skip
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    read(gguf(tmp_path))
    with pytest.raises(ModelError, match="does not compute with, so its output would be wrong"):
        read(gguf(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 0.0), ("logit_scale", 1.0), ("logit_scale", 0.0),
        ("attention__causal", True), ("use_parallel_residual", False), ("vocab_size", 32),
        ("expert_count", 0), ("expert_used_count", 0), ("expert_gating_func", 1),
        ("rope__scaling__finetuned", True), ("rope__scaling__original_context_length", 4096),
        ("attention__layer_norm_epsilon", 1e-5), ("pooling_type", 1), ("tensor_data_layout", "x"),
        ("rope__scaling__yarn_beta_fast", 32.0), ("made_up_by_somebody", 3),
        ("rope__dimension_sections", Typed(ValueType.INT32, [4, 4, 4, 0])),
        ("rope__scaling__type", "none"),
        ("attention__scale", tiny.VARIANTS["llama"].head_dim**-0.5),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_fine(tmp_path: Path, key: str, value: Any) -> None:
    read(gguf(tmp_path, **{key: value}))


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_what_an_architecture_reads_is_fine(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "m.gguf"
    tiny.write(path, tiny.VARIANTS[variant])
    read(path)


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("final_logit_softcapping", 30.0, True), ("logits_scaling", 8.0, True),
        ("residual_multiplier", 0.2, True), ("attention_multiplier", 0.1, True),
        ("clip_qkv", 8, True), ("alibi", True, True), ("alibi", False, False),
        ("final_logit_softcapping", None, False), ("logit_scale", 1.0, False),
        ("initializer_range", 0.02, False), ("attention_dropout", 0.1, False),
    ],
)  # fmt: skip
def test_settings_of_folders(tmp_path: Path, key: str, value: Any, refused: bool) -> None:
    folder = tmp_path / "m"
    shutil.copytree(MODELS / "tiny-dense", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    if not refused:
        read(folder)
        return
    with pytest.raises(ModelError, match=rf"config\.json: '{key}' is .* would be wrong"):
        read(folder)


def test_what_gemma_computes_with_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(MODELS / "tiny-window", folder)
    config = json.loads((folder / "config.json").read_text())
    more = {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64}
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    read(folder)
