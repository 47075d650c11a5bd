"""Random models of awkward sizes against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from tests.model_folders import exactly

oracle = pytest.importorskip("tests.models.oracle", reason="transformers and torch are the oracle")

IDS = [int(i) for i in np.random.default_rng(4).integers(0, 97, 150)]
SIZES: dict[str, Any] = {
    "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 20, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA: dict[str, Any] = {**SIZES, "sliding_window": 11, "num_hidden_layers": 7}
MAMBA: dict[str, Any] = {
    "hidden_size": 60, "num_hidden_layers": 3, "num_heads": 5, "head_dim": 24, "state_size": 20,
    "n_groups": 1, "chunk_size": 32,
}  # fmt: skip
LFM: dict[str, Any] = {
    **SIZES, "intermediate_size": 100, "block_multiple_of": 12, "num_hidden_layers": 5,
    "full_attn_idxs": [1, 4],
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama-untied": ("Llama", {**SIZES, "tie_word_embeddings": False, "num_key_value_heads": 3}),
    "llama-3": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None}),
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 24}),
    "qwen2-windows": ("Qwen2", {**{k: v for k, v in SIZES.items() if k != "head_dim"},
                                "use_sliding_window": True, "sliding_window": 24,
                                "max_window_layers": 2}),
    "qwen3-windows": ("Qwen3", {**SIZES, "use_sliding_window": True, "sliding_window": 17,
                                "max_window_layers": 1}),
    "qwen2": ("Qwen2", {**{k: v for k, v in SIZES.items() if k != "head_dim"}}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 34, "num_attention_heads": 6,
                        "num_key_value_heads": 2}),
    "qwen3-yarn": ("Qwen3", {**SIZES, "rope_parameters": YARN}),
    "qwen3-linear": ("Qwen3", {**SIZES, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3-capped": ("Gemma3", {
        **GEMMA, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 7, "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention"] * 3 + ["sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "gemma3-windows": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention"] * 7}),
    "mamba2": ("Mamba2", MAMBA),
    "mamba2-groups": ("Mamba2", {
        **MAMBA, "num_heads": 6, "head_dim": 20, "n_groups": 2, "conv_kernel": 3, "use_bias": True,
        "use_conv_bias": False, "state_size": 17, "time_step_limit": [0.01, 1.0]}),
    "mamba2-tied": ("Mamba2", {**MAMBA, "conv_kernel": 7, "tie_word_embeddings": True}),
    "lfm2": ("Lfm2", LFM),
    "lfm2-biased": ("Lfm2", {
        **LFM, "conv_L_cache": 4, "conv_bias": True, "tie_word_embeddings": False,
        "block_auto_adjust_ff_dim": False}),
    "lfm2-conv": ("Lfm2", {**LFM, "layer_types": ["conv"] * 5, "conv_L_cache": 2}),
    "lfm2-attention": ("Lfm2", {**LFM, "full_attn_idxs": None, "block_ffn_dim_multiplier": 1.3}),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    name, settings = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp("oracle") / request.param
    model = oracle.save_random(folder, name, **settings)
    return folder, oracle.logits(model, IDS)


def test_exact_mode_is_transformers_in_float32(case) -> None:
    folder, expected = case
    with quire.load(folder, **exactly(folder)) as llm:
        got = llm.logits(IDS)
    spread = expected.std(axis=-1).mean()
    assert spread > 0.5
    assert np.abs(got - expected).max() < 2e-4 * spread


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_change_no_bit(case, chunk: int) -> None:
    folder, _ = case
    with quire.load(folder) as llm:
        whole = llm.logits(IDS)
        with llm.session() as s:
            for at in range(0, len(IDS), chunk):
                s.append(IDS[at : at + chunk])
                assert np.array_equal(s.logits(), whole[min(at + chunk, len(IDS)) - 1])
