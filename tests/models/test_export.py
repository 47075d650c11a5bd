"""A folder and the GGUF file made of it are the same model, to Quire and to llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import quire
from tests.gguf_export import export

MODELS = Path(__file__).parents[1] / "data" / "models"
NAMES = sorted(p.parent.name for p in MODELS.glob("*/golden.json"))


def prompt(name: str) -> tuple[str, list[int]]:
    prompts = json.loads((MODELS / name / "golden.json").read_text())["prompts"]
    return prompts[-1]["text"], prompts[-1]["token_ids"][:300]


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_the_folder(name: str, tmp_path: Path) -> None:
    text, ids = prompt(name)
    path = export(MODELS / name, tmp_path / "model.gguf")
    messages = [{"role": "user", "content": "Who?"}]
    with quire.load(MODELS / name) as folder, quire.load(path) as file:
        assert np.array_equal(folder.logits(ids), file.logits(ids))
        assert folder.encode(text) == file.encode(text)
        assert folder.chat_tokens(messages) == file.chat_tokens(messages)
        assert folder.tokenizer.eog_ids == file.tokenizer.eog_ids


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_agrees(name: str, tmp_path: Path) -> None:
    """In float32 on both sides; only that llama.cpp looks gelu up in a table of 16 bits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    if name == "tiny-hybrid":
        pytest.skip("llama.cpp runs Qwen3-Next with experts only; test_delta_hybrid has one")
    _, ids = prompt(name)
    path = export(MODELS / name, tmp_path / "model.gguf", exact=True)
    peer = llama_cpp.Llama(
        str(path), n_ctx=512, n_batch=512, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    peer.eval(ids)
    expected = np.array(peer.scores[: len(ids)])
    with quire.load(path, activations="f32", type_k="f32", type_v="f32") as llm:
        got = llm.logits(ids)
    assert np.abs(got - expected).max() < 0.02
    assert np.abs(got - expected).mean() < 0.001
