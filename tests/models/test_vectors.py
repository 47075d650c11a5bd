"""Vectors of texts against those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quire
from tests.models import oracle

SETTINGS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
def test_vectors_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = oracle.save_random(tmp_path, name, **SETTINGS)
    ids = [3, 14, 15, 92, 65, 35]
    with oracle.torch.no_grad():
        hidden = model.model(oracle.torch.tensor([ids])).last_hidden_state[0].numpy()
    with quire.load(tmp_path, activations="f32") as llm:
        for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(axis=0))):
            (vector,) = llm.embed(ids, pooling, normalize=False)
            np.testing.assert_allclose(vector, expected, rtol=1e-3, atol=1e-3)
