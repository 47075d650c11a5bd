"""A folder and the GGUF file made of it are the same model, to Quire and to llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import quire
from tests.gguf_export import export
from tests.model_folders import RANDOM, TRAINED, exactly, model_folder

PROMPT = json.loads((model_folder("tiny-dense", Path()) / "golden.json").read_text())["prompts"][-1]
TEXT, IDS = PROMPT["text"], PROMPT["token_ids"][:300]


@pytest.mark.parametrize("name", [*TRAINED, "lfm2"])
@pytest.mark.host
def test_the_file_is_the_folder(name: str, tmp_path: Path) -> None:
    original = model_folder(name, tmp_path)
    path = export(original, tmp_path / "model.gguf")
    messages = [{"role": "user", "content": "Who?"}]
    with quire.load(original) as folder, quire.load(path) as file:
        assert np.array_equal(folder.logits(IDS), file.logits(IDS))
        assert folder.encode(TEXT) == file.encode(TEXT)
        assert folder.chat_tokens(messages) == file.chat_tokens(messages)
        assert folder.tokenizer.eog_ids == file.tokenizer.eog_ids


def test_converted_mamba_norms_each_group_by_itself(tmp_path: Path) -> None:
    """As llama.cpp has it; transformers norms all columns, and so does its folder."""
    original = model_folder("mamba2", tmp_path)
    with (
        quire.load(original) as folder,
        quire.load(export(original, tmp_path / "m.gguf")) as file,
    ):
        assert np.abs(folder.logits(IDS) - file.logits(IDS)).mean() > 0.1
        assert folder.model.groups == file.model.groups


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_llama_cpp_agrees(name: str, tmp_path: Path) -> None:
    """In float32 on both sides; only that llama.cpp looks gelu up in a table of 16 bits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    if name == "tiny-hybrid":
        pytest.skip("llama.cpp runs Qwen3-Next with experts only; test_delta_hybrid has one")
    path = export(model_folder(name, tmp_path), tmp_path / "model.gguf", exact=True)
    peer = llama_cpp.Llama(
        str(path), n_ctx=512, n_batch=512, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    peer.eval(IDS)
    expected = np.array(peer.scores[: len(IDS)])
    with quire.load(path, **exactly(path)) as llm:
        got = llm.logits(IDS)
    assert np.abs(got - expected).max() < 0.02
    assert np.abs(got - expected).mean() < 0.001
