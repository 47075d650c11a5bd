"""Mamba-2 and LFM2 files that are not as they should be, and ones that are, if unusually."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.config import LoadConfig
from quire.errors import ModelError, QuireError
from quire.models.registry import Model, open_weights
from quire.ops.cpu import CpuOps
from quire.placement.blueprint import Blueprint
from quire.weights.file import WeightFile
from tests.gguf_export import export
from tests.model_folders import MODELS, model_folder

IDS = [int(i) for i in np.random.default_rng(3).integers(3, 4096, 50)]


def load_model(file: WeightFile) -> Model:
    return Blueprint.read(file, CpuOps(1), LoadConfig()).load()


def load_with(folder: Path, changed: dict[str, Any]) -> None:
    """The model of a folder, seen as a file whose metadata says otherwise."""
    with open_weights(folder) as file:
        seen = copy.copy(file)
        seen.metadata = {**file.metadata, **changed}
        load_model(seen)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("mamba2.ssm.time_step_rank", 7, "7 heads"),
        ("mamba2.ssm.group_count", 4, "4 groups"),
        ("mamba2.ssm.group_count", 3, "ssm_conv1d.weight"),
        ("mamba2.ssm.state_size", 2**20, "ssm_conv1d.weight"),
        ("mamba2.ssm.state_size", 2**40, "state_size"),
        ("mamba2.ssm.conv_kernel", 0, "conv_kernel"),
        ("mamba2.ssm.conv_kernel", 1000, "ssm_conv1d.weight"),
        ("mamba2.ssm.inner_size", 384, "ssm_norm.weight"),
        ("lfm2.shortconv.l_cache", 4, "shortconv.conv.weight"),
        ("lfm2.shortconv.l_cache", 0, "l_cache"),
        ("lfm2.attention.head_count_kv", np.array([0, 2, 0], np.int32), "head_count_kv"),
        ("lfm2.attention.head_count_kv", np.array([0, 2, 0, 0, 3], np.int32), "head_count_kv"),
        ("lfm2.attention.head_count_kv", np.array([0, 2, 0, 0, -2], np.int32), "head_count_kv"),
        ("lfm2.attention.head_count_kv", np.array([0, 2, 0, 0, 2.0], np.float32), "head_count_kv"),
        ("lfm2.attention.head_count_kv", np.array([2, 2, 0, 0, 2], np.int32), "blk.0.attn_q"),
        ("lfm2.attention.head_count_kv", 2, "blk.0.attn_q"),
        ("lfm2.attention.head_count_kv", "2", "head_count_kv"),
        ("lfm2.attention.sliding_window", 64, "sliding_window"),
    ],
)
def test_metadata_that_cannot_be(tmp_path: Path, key: str, value: Any, named: str) -> None:
    with pytest.raises(QuireError, match=named):
        load_with(model_folder(key.partition(".")[0], tmp_path), {key: value})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mamba2", "time_step_limit", [0.0]),
        ("mamba2", "time_step_limit", [1.0, 0.5]),
        ("mamba2", "time_step_limit", [0.0, "much"]),
        ("mamba2", "time_step_limit", [float("nan"), 1.0]),
        ("mamba2", "time_step_limit", 3),
        ("mamba2", "hidden_act", "gelu"),
        ("mamba2", "head_dim", 31),
        ("lfm2", "layer_types", ["conv"] * 4),
        ("lfm2", "layer_types", ["conv"] * 4 + ["sliding_attention"]),
        ("lfm2", "full_attn_idxs", "14"),
        ("lfm2", "block_multiple_of", 0),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, name: str, key: str, value: Any) -> None:
    folder = model_folder(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match=key):
        open_weights(folder)


def test_a_norm_whose_axis_of_one_was_dropped(tmp_path: Path) -> None:
    """As tools that rewrite GGUF files leave it."""
    ops = CpuOps(1)
    with open_weights(export(MODELS / "tiny-recurrent", tmp_path / "m.gguf")) as file:
        flat = copy.copy(file)
        flat.tensors = {
            name: replace(t, shape=t.shape[1:]) if name.endswith("ssm_norm.weight") else t
            for name, t in file.tensors.items()
        }
        shapes = [seen.tensors["blk.0.ssm_norm.weight"].shape for seen in (file, flat)]
        assert shapes == [(1, 512), (512,)]
        one, other = load_model(file), load_model(flat)
    for (a, _), (b, _) in zip(one.layers, other.layers, strict=True):
        assert np.array_equal(ops.numpy(a.gated_norm), ops.numpy(b.gated_norm))


@pytest.mark.parametrize("name", ["tiny-recurrent", "lfm2"])
def test_the_first_layers_alone(name: str, tmp_path: Path) -> None:
    """A hybrid's groups shrink to the layers that are left."""
    with quire.load(model_folder(name, tmp_path), n_layer_exit=1) as llm:
        assert [group.layers for group in llm.model.groups] == [(0,)]
        assert np.isfinite(llm.logits(IDS)).all()
