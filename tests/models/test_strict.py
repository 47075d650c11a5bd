"""What a file says is either computed or refused, never passed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.config import LoadConfig
from quire.errors import ModelError, QuireError
from quire.models.registry import open_weights
from quire.ops.cpu import CpuOps
from quire.placement.blueprint import Blueprint
from tests import tiny
from tests.gguf_export import export
from tests.gguf_writer import Typed, ValueType, write_gguf
from tests.model_folders import MODELS
from tests.safetensors_writer import file_bytes

IDS = [int(i) for i in np.random.default_rng(3).integers(0, 256, 100)]
EXACT: dict[str, Any] = {"activations": "f32", "type_k": "f32", "type_v": "f32"}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(MODELS / "tiny-window", tmp_path_factory.mktemp("gemma") / "m.gguf", exact=True)


def rewritten(path: Path, to: Path, facts: dict[str, Any]) -> Path:
    """A file with some metadata of its own."""
    with open_weights(path) as file:
        has = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in file.metadata.items()}
        has |= {k: file.get_strings(k) for k in has if k.endswith((".tokens", ".merges"))}
        weights = {n: (t.type, np.array(file.data(n)), t.shape) for n, t in file.tensors.items()}
    return write_gguf(to, has | facts, weights)


def logits(path: Path, **settings: Any) -> np.ndarray:
    with quire.load(path, **EXACT | settings) as llm:
        return llm.logits(IDS)


# ---- windows --------------------------------------------------------------------------------


def test_a_longer_context_keeps_the_window(tmp_path: Path) -> None:
    t = tiny.VARIANTS["llama-window"]
    weights = tiny.write(tmp_path / "m.gguf", t)
    expected = tiny.forward(t, weights, IDS)
    got = logits(tmp_path / "m.gguf", n_ctx=400)
    assert np.abs(got - expected).max() < 2e-4 * expected.std()


def test_fewer_layers_keep_their_own_windows(tmp_path: Path) -> None:
    t = tiny.VARIANTS["qwen2-windows"]
    weights = tiny.write(tmp_path / "m.gguf", t)
    less = tiny.replace(t, layers=2, sliding=t.sliding[:2])
    expected = tiny.forward(less, weights, IDS)
    got = logits(tmp_path / "m.gguf", n_layer_exit=2)
    assert np.abs(got - expected).max() < 2e-4 * expected.std()


@pytest.mark.parametrize(
    "pattern",
    [
        [""] * 8, ["a"] * 8, Typed(ValueType.FLOAT32, [0.5] * 8), Typed(ValueType.BOOL, [True] * 7),
        1.5,
    ],
)  # fmt: skip
def test_flags_of_windows_are_flags(gemma: Path, tmp_path: Path, pattern: Any) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    with pytest.raises(QuireError, match="sliding_window_pattern"):
        quire.load(rewritten(gemma, tmp_path / "m.gguf", {key: pattern}))


def test_a_period_of_windows_is_as_good_as_flags(gemma: Path, tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    flags = Typed(ValueType.BOOL, [i % 3 != 0 for i in range(1, 9)])
    by_flags = logits(rewritten(gemma, tmp_path / "flags.gguf", {key: flags}))
    assert np.array_equal(by_flags, logits(rewritten(gemma, tmp_path / "period.gguf", {key: 3})))
    assert not np.array_equal(by_flags, logits(gemma))


def test_a_window_beyond_reason_is_refused(gemma: Path, tmp_path: Path) -> None:
    path = rewritten(gemma, tmp_path / "m.gguf", {"gemma3.attention.sliding_window": 2**31})
    with pytest.raises(QuireError, match="sliding_window"):
        quire.load(path)


def test_capped_attention(gemma: Path, tmp_path: Path) -> None:
    """A tiny cap makes all scores alike, as a tiny scale does; a huge one changes nothing."""
    cap, scale = "gemma3.attn_logit_softcapping", "gemma3.attention.scale"
    tiny_cap = logits(rewritten(gemma, tmp_path / "cap.gguf", {cap: 1e-6}))
    tiny_scale = logits(rewritten(gemma, tmp_path / "scale.gguf", {scale: 1e-9}))
    huge_cap = logits(rewritten(gemma, tmp_path / "huge.gguf", {cap: 1e3}))
    plain = logits(gemma)
    assert np.abs(tiny_cap - tiny_scale).max() < 1e-3 * plain.std()
    assert np.abs(huge_cap - plain).max() < 1e-2 * plain.std()
    assert np.abs(tiny_cap - plain).max() > 0.1 * plain.std()


# ---- tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.2.attn_q.weight", "blk.0.attn_q.scale", "eyes.weight"]
)
def test_tensors_without_a_place_are_refused(tmp_path: Path, name: str) -> None:
    t = tiny.Tiny(arch="qwen3")
    more = {name: np.ones(t.heads * t.head_dim, np.float32)}
    write_gguf(tmp_path / "m.gguf", tiny.metadata(t), tiny.weights(t) | more)
    with pytest.raises(ModelError, match=f"1 tensor has no place in Quire's qwen3: '{name}'"):
        quire.load(tmp_path / "m.gguf")


def test_tensors_that_change_nothing_are_fine(tmp_path: Path) -> None:
    t = tiny.Tiny(rope_factors=True)
    more = {"blk.0.attn_q.input_scale": np.ones(1, np.float32)}
    write_gguf(tmp_path / "m.gguf", tiny.metadata(t), tiny.weights(t) | more)
    tiny.write(tmp_path / "plain.gguf", t)
    assert np.array_equal(logits(tmp_path / "m.gguf"), logits(tmp_path / "plain.gguf"))


def test_layers_that_are_not_run_take_nothing(tmp_path: Path) -> None:
    facts = tiny.metadata(tiny.Tiny(layers=3)) | {"llama.nextn_predict_layers": 1}
    write_gguf(tmp_path / "m.gguf", facts, tiny.weights(tiny.Tiny(layers=3)))
    tiny.write(tmp_path / "two.gguf", tiny.Tiny(layers=2))
    ops, usual, less = CpuOps(1), LoadConfig(), LoadConfig(n_layer_exit=2)
    with open_weights(tmp_path / "m.gguf") as more, open_weights(tmp_path / "two.gguf") as two:
        expected = Blueprint.read(two, ops, usual)
        for got in (Blueprint.read(more, ops, usual), Blueprint.read(more, ops, less)):
            assert got.weight_bytes == expected.weight_bytes
            assert got.groups == expected.groups and got.active == expected.active
    assert np.array_equal(logits(tmp_path / "m.gguf"), logits(tmp_path / "two.gguf"))


# ---- text models inside others --------------------------------------------------------------


@pytest.mark.parametrize("where", ["model.language_model.", "language_model.model."])
def test_gemma_inside_a_model_that_also_sees(tmp_path: Path, where: str) -> None:
    folder = MODELS / "tiny-window"
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(outer | {"text_config": config}))
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    moved = {name.replace("model.", where, 1): entry for name, entry in header.items()}
    eye, end = "model." if where.startswith("model.") else "", len(raw) - 8 - size
    moved[f"{eye}vision_tower.x.weight"] = {
        "dtype": "F32", "shape": [2], "data_offsets": [end, end + 8],
    }  # fmt: skip
    (tmp_path / "m" / "model.safetensors").write_bytes(
        file_bytes(moved, raw[8 + size :] + bytes(8))
    )
    assert np.array_equal(logits(tmp_path / "m"), logits(folder))
