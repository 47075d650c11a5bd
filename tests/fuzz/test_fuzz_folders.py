"""Damaged model folders: config.json, the header of the weights, the index of shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest

from quire.config import LoadConfig
from quire.models.registry import open_weights
from quire.ops.cpu import CpuOps
from quire.placement.blueprint import Blueprint
from quire.weights.fingerprint import fingerprint
from tests.fuzz.bounds import attempt, within
from tests.fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from tests.model_folders import MODELS

NAMES = ["tiny-dense", "tiny-hybrid35", "tiny-moe", "tiny-recurrent", "tiny-window"]
OPS = CpuOps(1)


def use(folder: Path) -> None:
    """All that is done with a folder before its weights are packed."""
    with open_weights(folder) as file:
        Blueprint.read(file, OPS, LoadConfig())
        fingerprint(file)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "m"
    shutil.copytree(MODELS / request.param, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    use(folder)
    return folder


def configs(folder: Path, seeds: range) -> None:
    whole = json.loads((folder / "config.json").read_text())
    for seed in seeds:
        rng = Random(seed)
        (folder / "config.json").write_bytes(json_bytes(rng, mutate_json(rng, whole)))
        with within(3, 100):
            attempt(lambda: use(folder))


def headers(folder: Path, seeds: range) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    for seed in seeds:
        rng = Random(seed)
        if rng.random() < 0.5:
            text = json_bytes(rng, mutate_json(rng, header))
            content = len(text).to_bytes(8, "little") + text + rest
        else:
            content = mutate_bytes(rng, data[: 8 + length]) + rest
        path.write_bytes(content)
        with within(3, 100):
            attempt(lambda: use(folder))


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_damaged_configs(folder: Path) -> None:
    configs(folder, range(40))


@pytest.mark.parametrize("folder", NAMES[:2], indirect=True)
def test_damaged_headers(folder: Path) -> None:
    headers(folder, range(40))


@pytest.mark.slow
@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_damaged_configs_at_length(folder: Path) -> None:
    configs(folder, range(40, 2000))


@pytest.mark.slow
@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_damaged_headers_at_length(folder: Path) -> None:
    headers(folder, range(40, 1000))


def test_damaged_indexes(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(MODELS / "tiny-dense", folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    with open_weights(MODELS / "tiny-dense") as file:
        shard = file._shards[0]  # type: ignore[attr-defined]
        index = {"weight_map": dict.fromkeys(shard.tensors, "a.safetensors")}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    use(folder)
    for seed in range(60):
        rng = Random(seed)
        path.write_bytes(json_bytes(rng, mutate_json(rng, index)))
        with within(3, 100):
            attempt(lambda: use(folder))
