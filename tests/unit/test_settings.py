"""Settings that cannot work, or would do nothing, are refused in words about the setting."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import quire
from quire.api.devices import find_devices
from quire.api.placing import place_model
from quire.config import LoadConfig
from quire.devices import cuda
from quire.devices.budget import Budget
from quire.engine.request import Request
from quire.errors import ModelError, QuireError, RequestError, SafetensorsError
from quire.models.registry import open_weights
from quire.models.rope import read_rope
from quire.ops import Refused
from quire.ops.cpu import CpuOps
from quire.text.hf import chat_template
from quire.weights.gguf import GGUF
from tests import tiny
from tests.gguf_writer import write_gguf
from tests.model_folders import MODELS, write_mamba2
from tests.safetensors_writer import write_folder, write_index


@pytest.mark.parametrize(
    "settings",
    [
        {"page_tokens": "16"}, {"page_tokens": 16.0}, {"page_tokens": True}, {"threads": 10**6},
        {"n_layer_exit": True}, {"type_k": "zzz"}, {"type_v": None}, {"n_ctx": 1.0},
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        LoadConfig(**settings)


def test_types_are_listed() -> None:
    with pytest.raises(RequestError, match="f32, f16, bf16, q8_0, q4_0"):
        LoadConfig(type_k="zzz")


def test_float32_is_computed_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself that is the host, whatever else there is: GPUs compute with 16 bits."""
    monkeypatch.setattr(cuda, "gpu_count", lambda: 1)
    monkeypatch.setattr(cuda, "free_bytes", lambda _: (2**34, 2**34, False))
    names = {
        how: [one.name for one in find_devices(LoadConfig(activations=how))]
        for how in ("int8", "f32")
    }
    assert names == {"int8": ["cuda:0", "cpu"], "f32": ["cpu"]}
    with pytest.raises(RequestError, match="for the CPU"):
        LoadConfig(activations="f32", device="cuda")


def test_float32_is_not_computed_beside_a_model_on_a_gpu(dense: Path) -> None:
    gpu: Any = SimpleNamespace(name="cuda:0")
    with open_weights(dense) as file, pytest.raises(RequestError, match="for the CPU"):
        place_model(file, LoadConfig(activations="f32"), Budget(2**30), gpu)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "m.gguf"
    tiny.write(path, tiny.Tiny(quantized=True))
    return path


@pytest.mark.parametrize("n_ctx", [None, 256])
@pytest.mark.parametrize("tokens", [None, 480])
@pytest.mark.parametrize("budget", ["64MiB", "tight"])
@pytest.mark.host
def test_pages_taken_at_the_start_hold_the_context(
    dense: Path, n_ctx: int | None, tokens: int | None, budget: str
) -> None:
    """The longest sequence is what the pool holds, however much is free beside it."""
    settings: dict[str, Any] = {"n_ctx": n_ctx, "kv_cache_tokens": tokens, "threads": 1}
    with quire.load(dense, **settings) as llm:
        context, used = llm.n_ctx, llm.budget.used
        per_token = llm.memory.as_dict()["stats"]["attention"]["bytes_per_token"]
    if budget == "tight":  # nothing is left once the pages are taken
        budget = str(used + per_token * (tokens or context) // 4096 * 4096 + 4096)
    settings |= {"memory_budget": budget, "kv_cache_demand_paged": False}
    with quire.load(dense, **settings) as llm:
        assert llm.n_ctx == context == (n_ctx or min(tokens or 512, 512))
        held = llm.budget.breakdown["pages of attention"]
        assert 0 <= held - per_token * (tokens or context) < 4096 + 16 * per_token
        made = llm.generate([5] * 100, max_tokens=1000, ignore_eos=True)
        assert len(made.token_ids) == context - 100 and made.finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"type_k": "q8_0"}, "type_k q8_0 needs heads of a multiple of 32, this model has 16"),
        ({"type_v": "q4_0"}, "type_v q4_0 needs heads of a multiple of 32, this model has 16"),
        ({"swa_full": True}, "no sliding windows"),
        ({"quantize": "q8_0"}, "no matrix of 16 or 32 bits"),
    ],
)
def test_settings_that_do_not_suit_the_model(
    dense: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        quire.load(dense, **settings)


def test_keys_of_a_model_without_attention(tmp_path: Path) -> None:
    folder = write_mamba2(tmp_path / "m")
    with pytest.raises(RequestError, match=r"type_k is f32, but .* has no attention"):
        quire.load(folder, type_k="f32")
    quire.load(folder, quantize="q8_0").close()


def test_kernels_refuse_with_a_class_of_their_own() -> None:
    with pytest.raises(Refused, match="K/V type"):
        CpuOps(1).heads(quire.ops.Heads(1, 1, 16, 16, 1.0), "zzz", "f16", None, None, 1e-5)


# ---- numbers that are none ------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [None, "ngram", "lookahead", "early-exit"])
def test_only_sequences_whose_logits_are_not_numbers_fail(
    tmp_path: Path, speculate: str | None
) -> None:
    t = tiny.Tiny(tied=False)
    weights = tiny.weights(t)
    weights["token_embd.weight"][7] = np.nan  # whoever reads token 7 is lost
    write_gguf(tmp_path / "m.gguf", tiny.metadata(t), weights)
    with quire.load(tmp_path / "m.gguf") as llm:

        def jobs(*prompts: list[int]) -> list[Any]:
            sampling = quire.Sampling(max_tokens=8, logit_bias={7: -1000.0})
            drafts = llm.speculator(speculate)
            return [llm.start(Request(tuple(p), sampling, speculate=drafts), ()) for p in prompts]

        alone = jobs([3, 4, 5, 3, 4, 5])
        llm.loop.wait(alone[0])
        llm.forget()
        good, bad, also_good = jobs([3, 4, 5, 3, 4, 5], [3, 7, 5], [9, 9, 9])
        while not (good.done and bad.done and also_good.done):
            llm.loop.seat.turn(llm.loop)
        assert isinstance(bad.error, ModelError) and "not numbers" in str(bad.error)
        assert good.error is None and also_good.error is None
        tokens = [llm.completion(job).token_ids for job in (alone[0], good)]
        assert tokens[0] == tokens[1] and len(tokens[0]) == 8
        for job in (*alone, good, bad, also_good):
            llm.end(job)
        with pytest.raises(ModelError, match="not numbers"):
            llm.generate([7], max_tokens=2)
        llm.engine.memory.audit()


def test_yarn_needs_frequencies_that_differ(tmp_path: Path) -> None:
    facts = tiny.metadata(tiny.Tiny(scaling="yarn", base=1.0))
    path = write_gguf(tmp_path / "m.gguf", facts, tiny.weights(tiny.Tiny()))
    with GGUF.open(path) as file, pytest.raises(ModelError, match=r"freq_base is 1\.0"):
        read_rope(file, "llama", 16, neox=False)


def test_a_huge_limit_of_the_time_step_is_refused(tmp_path: Path) -> None:
    folder = write_mamba2(tmp_path / "m")
    config = (folder / "config.json").read_text().replace("[0.0, Infinity]", f"[0, {10**400}]")
    (folder / "config.json").write_text(config)
    with pytest.raises(QuireError, match="time_step_limit"):
        quire.load(folder)


# ---- folders --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ('[3, null, "x", {"name": ["default"]}, {"name": "default", "template": "T"}]', "T"),
        ('[{"template": "T"}]', None),
        ('[{"name": "default"}]', None),
        ("[[]]", None),
    ],
)
def test_odd_templates(tmp_path: Path, template: str, found: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {template}}}')
    assert chat_template(tmp_path) == found


def test_a_shard_that_no_file_can_be_called(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", {"model_type": "llama"}, {})
    write_index(tmp_path / "m", {"x": "\ud800.safetensors"})
    (tmp_path / "m" / "config.json").write_text((MODELS / "tiny-dense/config.json").read_text())
    with pytest.raises(SafetensorsError, match="cannot be the name"):
        quire.load(tmp_path / "m")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_nothing_is_read_from_outside_a_folder(tmp_path: Path, name: str) -> None:
    shutil.copytree(MODELS / "tiny-dense", tmp_path / "m")
    outside = tmp_path / "outside.json"
    shutil.move(tmp_path / "m" / name, outside)
    (tmp_path / "m" / name).symlink_to(outside)
    with pytest.raises(SafetensorsError, match="leads out of the folder"):
        quire.load(tmp_path / "m")


def test_what_to_do_without_a_config_or_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(SafetensorsError, match=r"there is 'q8.gguf': pass its path"):
        quire.load(tmp_path)
    shutil.copytree(MODELS / "tiny-dense", tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(QuireError, match="save it with transformers"):
        quire.load(tmp_path / "m")
