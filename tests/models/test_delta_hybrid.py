"""Qwen3-Next and Qwen3.5 in awkward sizes, and every way their tensors are stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.errors import ModelError
from quire.models.registry import open_weights
from tests.gguf_export import export
from tests.gguf_writer import write_gguf
from tests.model_folders import exactly
from tests.models.test_golden import EXACT, MODELS
from tests.random_hybrids import EXPERTS, layer_types, settings, tensors, write

IDS = [int(i) for i in np.random.default_rng(3).integers(0, 4096, 150)]
ONE = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 12,
       "linear_value_head_dim": 20}  # fmt: skip
THREE = {"linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 8}
ODD = {"hidden_size": 60, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 24}
MIXED = ["full_attention", "linear_attention", "full_attention", "linear_attention",
         "linear_attention"]  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("Qwen3Next", {}),
    "next, a value head for each key head": ("Qwen3Next", ONE),
    "next, three for each": ("Qwen3Next", {**THREE, "linear_conv_kernel_dim": 2}),
    "next, odd attention": ("Qwen3Next", {**ODD, "tie_word_embeddings": True}),
    "next, experts": ("Qwen3Next", EXPERTS | ONE),
    "next, one expert": ("Qwen3Next", EXPERTS | {"num_experts": 1, "num_experts_per_tok": 1}),
    "next, shares as they are": ("Qwen3Next", EXPERTS | {"norm_topk_prob": False}),
    "next, mixed": ("Qwen3Next", {"num_hidden_layers": 5, "layer_types": MIXED}),
    "next, no attention": ("Qwen3Next", {"num_hidden_layers": 3}),
    "next, only attention": ("Qwen3Next", {"layer_types": ["full_attention"] * 4}),
    "3.5": ("Qwen3_5", {}),
    "3.5, a value head for each key head": ("Qwen3_5", ONE | ODD),
    "3.5, three for each": ("Qwen3_5", {**THREE, "linear_conv_kernel_dim": 3}),
    "3.5, experts": ("Qwen3_5Moe", {**THREE, "shared_expert_intermediate_size": 17}),
    "3.5, all experts": ("Qwen3_5Moe", {"num_experts": 5, "num_experts_per_tok": 5}),
}


def make(folder: Path, kind: str, **changed: Any) -> Path:
    config = settings(kind, **changed)
    return write(folder, config, tensors(config))


def logits(path: Path, **options: Any) -> np.ndarray:
    with quire.load(path, **options) as llm:
        return llm.logits(IDS)


@pytest.fixture(scope="module", params=SIZES)
def sized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changed = SIZES[request.param]
    return make(tmp_path_factory.mktemp("hybrid") / "m", kind, **changed)


def test_logits_are_those_of_transformers(sized: Path) -> None:
    oracle = pytest.importorskip("tests.models.oracle", reason="transformers is the oracle")
    model = oracle.transformers.AutoModelForCausalLM.from_pretrained(sized).float().eval()
    model.set_experts_implementation("eager")  # the other one wants even sizes
    expected = oracle.logits(model, IDS)
    assert expected.std() > 0.5
    assert np.abs(logits(sized, **exactly(sized)) - expected).max() < 2e-4 * expected.std()


def test_chunks_change_no_bit(sized: Path) -> None:
    """One token at a time is decoding, so decoding equals prefill as well."""
    with quire.load(sized) as llm:
        whole = llm.logits(IDS)
        for chunk in (1, 7, 16, 64):
            with llm.session() as s:
                for at in range(0, len(IDS), chunk):
                    s.append(IDS[at : at + chunk])
                    assert np.array_equal(s.logits(), whole[min(at + chunk, len(IDS)) - 1])


def test_the_file_is_the_folder(sized: Path, tmp_path: Path) -> None:
    assert np.array_equal(logits(sized), logits(export(sized, tmp_path / "m.gguf")))


@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_llama_cpp_agrees(kind: str, times: int, tmp_path: Path) -> None:
    """It knows Qwen3-Next with experts only, and values as long as keys."""
    llama_cpp = pytest.importorskip("llama_cpp")
    experts = {} if kind == "Qwen3_5" else EXPERTS
    folder = make(tmp_path / "m", kind, **experts, linear_num_value_heads=2 * times)
    path = export(folder, tmp_path / "m.gguf", exact=True)
    options = {"n_ctx": 512, "n_batch": 512, "logits_all": True, "type_k": 0, "type_v": 0}
    peer = llama_cpp.Llama(str(path), verbose=False, **options)
    peer.eval(IDS)
    expected = np.array(peer.scores[: len(IDS)])
    assert np.abs(logits(path, **EXACT) - expected).max() < 2e-4 * expected.std()


# ---- the same model, stored otherwise -------------------------------------------------------


@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe"])
def test_layers_that_guess_ahead_are_left_out(kind: str, tmp_path: Path) -> None:
    config = settings(kind)
    weights = tensors(config)
    plain = write(tmp_path / "plain", config, weights)
    ahead = {f"mtp.{n.removeprefix('model.')}": w for n, w in weights.items() if "layers.3" in n}
    ahead |= {f"mtp.{n}.weight": weights["model.norm.weight"] for n in ("fc", "pre_fc_norm_hidden")}
    assert np.array_equal(logits(plain), logits(write(tmp_path / "ahead", config, weights | ahead)))


@pytest.mark.parametrize("flags", [False, True])
def test_blocks_that_guess_ahead_are_left_out(flags: bool, tmp_path: Path) -> None:
    """A file counts them among its blocks; fewer layers are then fewer of the others."""
    folder = make(tmp_path / "m", "Qwen3_5")
    path = export(folder, tmp_path / "m.gguf")
    with open_weights(path) as file:
        facts = dict(file.metadata) | {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
        facts["tokenizer.ggml.tokens"] = file.get_strings("tokenizer.ggml.tokens")
        facts["tokenizer.ggml.merges"] = file.get_strings("tokenizer.ggml.merges")
        if flags:
            facts["qwen35.attention.recurrent_layers"] = [True] * 3 + [False] * 2
        facts = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in facts.items()}
        weights = {n: (t.type, np.array(file.data(n)), t.shape) for n, t in file.tensors.items()}
    more = {n.replace("blk.3.", "blk.4."): w for n, w in weights.items() if n.startswith("blk.3.")}
    more["blk.4.nextn.enorm.weight"] = weights["output_norm.weight"]
    ahead = write_gguf(tmp_path / "ahead.gguf", facts, weights | more)
    assert np.array_equal(logits(ahead), logits(path))
    for layers in (2, 4):
        assert np.array_equal(logits(ahead, n_layer_exit=layers), logits(path, n_layer_exit=layers))


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_of_a_model_that_also_sees(kind: str, tmp_path: Path) -> None:
    config = settings(kind)
    weights = tensors(config)
    plain = write(tmp_path / "plain", config, weights)
    inside = {n.replace("model.", "model.language_model.", 1): w for n, w in weights.items()}
    inside["model.visual.blocks.0.attn.qkv.weight"] = weights["model.norm.weight"]
    outer = {
        "architectures": [f"{kind}ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": {k: v for k, v in config.items() if k != "tie_word_embeddings"},
        "tie_word_embeddings": False,
    }  # fmt: skip
    sees = write(tmp_path / "sees", outer, inside)
    assert np.array_equal(logits(plain), logits(sees))
    with quire.load(sees) as llm:
        assert llm.tokenizer.n_vocab == llm.model.n_vocab == config["vocab_size"]


def test_experts_of_a_layer_in_two_tensors(tmp_path: Path) -> None:
    config = settings("Qwen3_5Moe")
    weights = tensors(config)
    plain = write(tmp_path / "plain", config, weights)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([weights.pop(f"{at}{e}.{name}_proj.weight") for e in range(6)])
            for name in ("gate", "up", "down")
        )
        weights |= {f"{at}gate_up_proj": np.concatenate([gate, up], 1), f"{at}down_proj": down}
    assert np.array_equal(logits(plain), logits(write(tmp_path / "whole", config, weights)))


@pytest.mark.parametrize("times", [1, 3])
def test_inputs_together_by_key_head(times: int, tmp_path: Path) -> None:
    """As the first files of Qwen3-Next have them."""
    config = settings("Qwen3Next", linear_num_value_heads=2 * times)
    stored = tensors(config)
    folder = write(tmp_path / "m", config, stored)
    path = export(folder, tmp_path / "m.gguf")
    with open_weights(path) as file:
        facts = {
            k: v.tolist() if isinstance(v, np.ndarray) else v
            for k, v in file.metadata.items()
            if not k.startswith("tokenizer.")
        }
        weights = {n: (t.type, np.array(file.data(n)), t.shape) for n, t in file.tensors.items()}
        facts |= {k: file.get_strings(k) for k in file.metadata if k.endswith(("tokens", "merges"))}
        facts |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    for i in range(3):
        del weights[f"blk.{i}.attn_qkv.weight"], weights[f"blk.{i}.attn_gate.weight"]
        name = f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"
        weights[f"blk.{i}.ssm_in.weight"] = stored[name]
    old = write_gguf(tmp_path / "old.gguf", facts, weights)
    assert np.array_equal(logits(old), logits(folder))


# ---- in a conversation ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-hybrid35"])
def test_a_second_turn_computes_only_what_is_new(name: str) -> None:
    with quire.load(MODELS / name) as llm:
        talk = [{"role": "user", "content": "What is a foo bar? Tell me at some length."}]
        first = llm.chat(talk, max_tokens=40, temperature=0)
        known = llm.chat_tokens(talk) + first.token_ids
        talk.append({"role": "assistant", "content": first.text})
        talk.append({"role": "user", "content": "And a baz?"})
        prompt, before = llm.chat_tokens(talk), llm.engine.runner.tokens_run
        assert prompt[: len(known)] == known
        second = llm.chat(talk, max_tokens=1, temperature=0)
        # The last token of an answer was chosen, but nothing was computed with it yet.
        assert llm.engine.runner.tokens_run - before == len(prompt) - len(known) + 1
        llm.forget()
        assert llm.chat(talk, max_tokens=1, temperature=0).token_ids == second.token_ids


# ---- less of a model, and none --------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_fewer_layers(layers: int, tmp_path: Path) -> None:
    config = settings("Qwen3_5", num_hidden_layers=5)
    config["layer_types"] = layer_types(config)
    weights = tensors(config)
    whole = write(tmp_path / "whole", config, weights)
    kept = config | {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}

    def stays(name: str) -> bool:
        number = re.search(r"layers\.(\d)", name)
        return number is None or int(number[1]) < layers

    part = write(tmp_path / "part", kept, {n: w for n, w in weights.items() if stays(n)})
    assert np.array_equal(logits(whole, n_layer_exit=layers), logits(part))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"linear_num_value_heads": 3}, "must be a multiple of linear_num_key_heads, 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"head_dim": 32}, r"blk.3.attn_q.weight: is \[128, 64\], should be \[256, 64\]"),
        ({"linear_value_head_dim": 8}, "tensors are not as needed"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = settings("Qwen3Next")
    with pytest.raises(ModelError, match=said):
        quire.load(write(tmp_path / "m", config | changed, tensors(config)))


def test_states_that_would_grow_are_refused(tmp_path: Path) -> None:
    path = export(make(tmp_path / "m", "Qwen3_5"), tmp_path / "m.gguf")
    with open_weights(path) as file:
        stored = np.array(file.data("blk.1.ssm_a"))
    growing = (-stored.view(np.float32)).tobytes()
    path.write_bytes(path.read_bytes().replace(stored.tobytes(), growing))
    with pytest.raises(ModelError, match=r"blk.1.ssm_a must be rates of decay"):
        quire.load(path)
