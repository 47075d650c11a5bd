"""Qwen3 with experts against transformers, on small random models of awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.errors import ModelError
from tests import tiny
from tests.gguf_writer import write_gguf
from tests.models.test_golden import EXACT

IDS = [int(i) for i in np.random.default_rng(8).integers(0, 97, 70)]
USUAL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "usual": {},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "all experts": {"num_experts": 5, "num_experts_per_tok": 5},
    "shares as they are": {"norm_topk_prob": False},
    "odd heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 24},
    "windows": {"use_sliding_window": True, "sliding_window": 17},
    "odd network": {"hidden_size": 72, "moe_intermediate_size": 17, "tie_word_embeddings": True},
}
Made = Callable[..., tuple[Path, Any]]


@pytest.fixture
def make(tmp_path: Path) -> Made:
    """Writes a random model as a folder; gives its path and the model of transformers."""
    oracle = pytest.importorskip("tests.models.oracle", reason="transformers is the oracle")

    def made(**settings: Any) -> tuple[Path, Any]:
        model = oracle.save_random(tmp_path, "Qwen3Moe", **USUAL | settings)
        model.set_experts_implementation("eager")  # the other one wants even sizes
        return tmp_path, model

    return made


def check(path: Path, model: Any, **settings: Any) -> None:
    from tests.models.oracle import logits

    expected = logits(model, IDS)
    with quire.load(path, **EXACT, **settings) as llm:
        got = llm.logits(IDS)
    assert np.abs(got - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", SIZES)
def test_chunks_change_no_bit(make: Made, name: str) -> None:
    path, _ = make(**SIZES[name])
    with quire.load(path) as llm:
        whole = llm.logits(IDS)
        for chunk in (1, 7, 16, 64):
            with llm.session() as s:
                for at in range(0, len(IDS), chunk):
                    s.append(IDS[at : at + chunk])
                    assert np.array_equal(s.logits(), whole[min(at + chunk, len(IDS)) - 1])
            llm.forget()


@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_transformers(make: Made, name: str) -> None:
    check(*make(**SIZES[name]))


@pytest.mark.parametrize("normalize", [True, False])
def test_fewer_experts(make: Made, normalize: bool) -> None:
    path, model = make(norm_topk_prob=normalize)
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 2
    check(path, model, moe_n_expert=2)


def test_fewer_layers(make: Made) -> None:
    path, model = make()
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    check(path, model, n_layer_exit=2)


@pytest.mark.parametrize("setting", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts_are_refused(make: Made, setting: dict[str, Any]) -> None:
    path, _ = make(**setting)
    with pytest.raises(ModelError, match=next(iter(setting))):
        quire.load(path)


def test_gate_and_up_may_be_one_tensor(tmp_path: Path) -> None:
    t = tiny.VARIANTS["moe"]
    tensors = tiny.weights(t)
    write_gguf(tmp_path / "two.gguf", tiny.metadata(t), tensors)
    for i in range(t.layers):
        two = [tensors.pop(f"blk.{i}.ffn_{name}_exps.weight") for name in ("gate", "up")]
        tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(two, axis=1)
    write_gguf(tmp_path / "one.gguf", tiny.metadata(t), tensors)
    with quire.load(tmp_path / "two.gguf") as two_tensors, quire.load(tmp_path / "one.gguf") as one:
        assert np.array_equal(one.logits(IDS), two_tensors.logits(IDS))


def test_more_used_than_there_are_is_refused(tmp_path: Path) -> None:
    t = tiny.VARIANTS["moe"]
    facts = tiny.metadata(t) | {"qwen3moe.expert_used_count": 8}
    write_gguf(tmp_path / "bad.gguf", facts, tiny.weights(t))
    with pytest.raises(ModelError, match="expert_used_count is 8, but there are 7 experts"):
        quire.load(tmp_path / "bad.gguf")
