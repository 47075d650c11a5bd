"""What is told about a model before it is loaded is what holds once it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import quire
from quire.config import LoadConfig
from quire.devices.budget import Budget
from quire.errors import BudgetError, ModelError, RequestError
from quire.memory.build import longest_sequence
from quire.models import registry
from quire.models.registry import open_weights
from quire.ops.cpu import CpuOps
from quire.placement.blueprint import Blueprint
from quire.weights.folder import Folder
from quire.weights.gguf import GGUF
from quire.weights.quant import GGMLType
from tests import tiny
from tests.gguf_export import export
from tests.gguf_writer import write_gguf
from tests.model_folders import MODELS, RANDOM, TRAINED, model_folder


def blueprint(path: Path, **settings: Any) -> Blueprint:
    with open_weights(path) as file:
        return Blueprint.read(file, CpuOps(1), LoadConfig(**settings))


@pytest.mark.parametrize("quantize", [None, "q8_0", "q4_0"])
@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
@pytest.mark.host
def test_bytes_are_those_of_the_loaded_model(
    name: str, quantize: str | None, tmp_path: Path
) -> None:
    folder = model_folder(name, tmp_path)
    for cut in (None, 2):
        told = blueprint(folder, quantize=quantize, n_layer_exit=cut)
        with quire.load(folder, quantize=quantize, n_layer_exit=cut) as llm:
            assert told.weight_bytes == llm.model.weight_bytes
            assert told.weight_bytes == llm.memory.as_dict()["breakdown"]["weights"]
            assert told.layer_bytes == llm.model.layer_bytes
            assert len(told.layer_bytes) == llm.model.n_layers == told.active.layers
            assert told.groups == llm.model.groups
            assert told.n_ctx_train == llm.model.n_ctx_train
            assert told.architecture == llm.architecture
        assert sum(told.tensor_bytes.values()) == told.weight_bytes
        ends = sum(told.tensor_bytes.get(f"{x}.weight", 0) for x in ("token_embd", "output"))
        assert sum(told.layer_bytes) + ends == told.weight_bytes


@pytest.mark.parametrize("variant", list(tiny.VARIANTS))
@pytest.mark.parametrize("isa", ["auto", "portable"])
def test_bytes_of_files_with_blocks(variant: str, isa: str, tmp_path: Path) -> None:
    """On instruction sets that pack in different ways, and with rows that fill no tile."""
    tiny.write(tmp_path / "m.gguf", tiny.VARIANTS[variant])
    ops = CpuOps(1, isa=isa)
    with open_weights(tmp_path / "m.gguf") as file:
        told = Blueprint.read(file, ops, LoadConfig())
        model = told.load()
    assert told.weight_bytes == model.weight_bytes > 0
    assert told.layer_bytes == model.layer_bytes


def test_no_weight_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor are any made, of whatever size a file claims them to be."""

    def never(*_: object) -> NDArray[np.uint8]:
        raise AssertionError("a tensor was read")

    paths = [model_folder(name, tmp_path) for name in [*TRAINED, *RANDOM]]
    paths.append(export(MODELS / "tiny-dense", tmp_path / "m.gguf"))
    for kind in (GGUF, Folder):
        monkeypatch.setattr(kind, "data", never)
    for path in paths:
        assert blueprint(path).weight_bytes > 0
    with open_weights(paths[0]) as file, pytest.raises(AssertionError, match="was read"):
        Blueprint.read(file, CpuOps(1), LoadConfig()).load()


@pytest.mark.host
def test_a_load_builds_the_model_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once to look, once with weights."""
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())
    built = []
    module = registry._module

    def counted(name: str) -> Any:
        built.append(name)
        return module(name)

    monkeypatch.setattr(registry, "_module", counted)
    quire.load(tmp_path / "m.gguf").close()
    assert built == ["llama", "llama"]


def test_what_a_sequence_takes(tmp_path: Path) -> None:
    settings = {"type_k": "f32", "page_tokens": 32}
    told = blueprint(MODELS / "tiny-window", **settings)
    full, window = (told.memory[name] for name in ("attention", "window"))
    assert full.bytes_per_sequence is None and full.window is None
    assert told.bytes_per_token == full.bytes_per_token > 0
    assert told.bytes_per_sequence == window.bytes_per_sequence
    assert window.bytes_per_sequence == (64 // 32 + 1) * 32 * window.bytes_per_token
    whole = blueprint(MODELS / "tiny-window", swa_full=True, **settings)
    assert whole.bytes_per_token == full.bytes_per_token + window.bytes_per_token
    assert whole.bytes_per_sequence == 0
    state = blueprint(model_folder("mamba2", tmp_path))
    (recurrent,) = state.memory.values()
    assert state.bytes_per_token == 0
    assert state.bytes_per_sequence == recurrent.state_bytes + recurrent.log_bytes > 0
    for one, types in ((told, settings), (state, {})):
        most, granule = LoadConfig(**types), 4096
        least = one.bytes_per_sequence * 2 + one.bytes_per_token * most.page_tokens
        least += 2 * 2 * granule  # of two pools, whose pages may lie apart
        assert longest_sequence(one.groups, least, most, granule) >= most.page_tokens
        with pytest.raises(BudgetError):
            longest_sequence(one.groups, one.bytes_per_sequence - 1, most, granule)


@pytest.mark.parametrize(
    ("t", "settings", "said"),
    [
        (tiny.Tiny(), {"type_k": "q8_0"}, ["type_k q8_0 needs heads of a multiple of 32"]),
        (tiny.Tiny(), {"type_k": "q8_0", "type_v": "q4_0", "swa_full": True},
         ["no sliding windows", "type_k q8_0", "type_v q4_0"]),
        (tiny.Tiny(quantized=True), {"quantize": "q4_0"}, ["no matrix of 16 or 32 bits"]),
        (tiny.Tiny(window=20), {"swa_full": True, "quantize": "q8_0"}, []),
    ],
)  # fmt: skip
def test_settings_errors_are_all_told(
    t: tiny.Tiny, settings: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    """And the rest is told all the same, but nothing is loaded."""
    tiny.write(tmp_path / "m.gguf", t)
    told = blueprint(tmp_path / "m.gguf", **settings)
    assert len(told.errors) == len(said) and told.weight_bytes > 0
    for error, part in zip(told.errors, said, strict=True):
        assert part in str(error)
    if not said:
        assert told.memory["window"].kind == "window"
        return
    for ask in (told.load, lambda: told.memory, told.raise_errors):
        with pytest.raises(RequestError, match=said[0]):
            ask()


def test_types_that_cannot_be_packed_are_named_with_their_tensors(tmp_path: Path) -> None:
    t = tiny.Tiny()
    tensors: dict[str, Any] = dict(tiny.weights(t))
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_up.weight"):
        shape = tensors[name].shape
        tensors[name] = (GGMLType.I8, np.zeros(tensors[name].size, np.uint8), shape)
    write_gguf(tmp_path / "m.gguf", tiny.metadata(t), tensors)
    with pytest.raises(ModelError, match="2 tensors") as caught:
        blueprint(tmp_path / "m.gguf")
    assert "blk.0.attn_q.weight" in str(caught.value)
    assert "blk.1.ffn_up.weight" in str(caught.value)


def test_a_load_that_fails_takes_no_budget(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", tiny.Tiny())

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    budget = Budget(2**30)
    with pytest.raises(KeyboardInterrupt):
        quire.LLM(tmp_path / "m.gguf", LoadConfig(), budget, stop)
    assert budget.used == 0
