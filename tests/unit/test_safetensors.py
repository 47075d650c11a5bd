"""Safetensors files and folders: what is sound is read, whatever else is refused in a sentence."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import quire
from quire.cli import main
from quire.errors import ModelError, QuireError, SafetensorsError
from quire.models.registry import open_weights
from quire.weights.folder import Folder
from quire.weights.naming import (
    ADD_ONE,
    MINUS_EXP,
    SQUEEZE_CONV,
    HFConfig,
    Naming,
    one,
    pair_up,
    stack,
    take_rows,
)
from quire.weights.quant import GGMLType, dequantize
from quire.weights.safetensors import Safetensors
from tests.safetensors_writer import (
    entries,
    file_bytes,
    safetensors_bytes,
    write_folder,
    write_index,
)

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.zeros((0, 5), np.float32),
    "d": np.array(7, np.int64),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "num_hidden_layers": 1,
    "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
TINY = Path(__file__).parents[1] / "data" / "models" / "tiny-dense"


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    at = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (8, 8), "model.norm.weight": (8,),
        at + "input_layernorm.weight": (8,), at + "post_attention_layernorm.weight": (8,),
        **{f"{at}self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"},
        **{f"{at}mlp.{p}_proj.weight": (8, 8) for p in ("gate", "up", "down")},
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def refused(path: Path, *words: str, kind: type[QuireError] = SafetensorsError) -> str:
    with pytest.raises(kind) as caught:
        open_weights(path) if path.is_dir() else Safetensors(path)
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message
    return message


# ---- one file -------------------------------------------------------------------------------


def test_tensors_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(TENSORS))
    file = Safetensors(path)
    assert list(file.tensors) == list(TENSORS)
    for name, values in TENSORS.items():
        assert file.tensors[name].shape == values.shape
        assert file.data(name).tobytes() == values.tobytes()
        assert file.data(name).tobytes() == values.tobytes()
    file.close()
    with pytest.raises(SafetensorsError, match="closed"):
        file.data("a")


def test_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = safetensors_bytes(TENSORS)
    path = tmp_path / "x.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused(path)
    path.write_bytes(whole + b"\0")
    refused(path, "end at byte")


def test_flipped_bits_never_crash(tmp_path: Path) -> None:
    """Every bit of the header: refused, or read as other names and shapes inside the file."""
    whole = safetensors_bytes(TENSORS)
    head = len(whole) - sum(values.nbytes for values in TENSORS.values())
    path = tmp_path / "x.safetensors"
    n_refused = 0
    for bit in range(8 * head):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            file = Safetensors(path)
        except SafetensorsError:
            n_refused += 1
            continue
        held = sum(file.data(name).size for name in file.tensors)
        assert held == len(whole) - head
    assert n_refused > 8 * head * 0.7


def test_random_headers_never_crash(tmp_path: Path) -> None:
    rng = random.Random(5)
    path = tmp_path / "x.safetensors"
    values: list[Any] = [
        None,
        True,
        -1,
        1.5,
        2**63,
        2**64,
        "F32",
        "F99",
        [],
        {},
        [0, 8],
        [[1]],
        "x",
    ]
    for _ in range(300):
        entry = {key: rng.choice(values) for key in ("dtype", "shape", "data_offsets")}
        path.write_bytes(file_bytes({"a": entry}, bytes(8)))
        refused(path)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b"nonsense", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"a":' * 50_000, "JSON"),
        (b'{"a":{"dtype":"U8","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,8]}}', "a"),
        (b'{"__metadata__":{"a":1}}', "__metadata__"),
        (b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
         b'"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', "twice"),
        (b'{"a":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}', "twice"),
    ],
)  # fmt: skip
def test_bad_headers_are_refused(tmp_path: Path, header: bytes, word: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(header, bytes(8)))
    refused(path, word)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"a": {"data_offsets": [0, 23]}}, "takes 24 bytes"),
        ({"a": {"data_offsets": [24, 0]}}, "data_offsets"),
        ({"a": {"data_offsets": [-24, 0]}}, "data_offsets"),
        ({"a": {"shape": [2, 3, 1, 1, 1, 1, 1, 1, 1]}}, "shape"),
        ({"a": {"shape": [2**62, 2**62]}}, "takes"),
        ({"a": {"shape": [True, 6]}}, "shape"),
        ({"a": {"dtype": "F31"}}, "dtype"),
        ({"a": {"extra": 1}}, "nothing else"),
        ({"b": {"data_offsets": [0, 8]}}, "overlaps"),
        ({"b": {"data_offsets": [16, 24]}}, "overlaps"),
        ({"b": {"data_offsets": [32, 40]}}, "gap"),
        ({"b": {"data_offsets": [2**40, 2**40 + 8]}}, "gap"),
    ],
)
def test_misplaced_tensors_are_named(tmp_path: Path, change: Any, word: str) -> None:
    header = entries(TENSORS)
    (name, fields), *_ = change.items()
    header[name] |= fields
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(header, b"".join(v.tobytes() for v in TENSORS.values())))
    refused(path, word)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 1000])
def test_a_huge_header_takes_no_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    started = time.perf_counter()
    refused(path, str(length))
    assert time.perf_counter() - started < 1


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(tmp_path / "pipe.safetensors", "regular")
    refused(tmp_path / "absent.safetensors", "opened")


# ---- folders --------------------------------------------------------------------------------


def test_shards_are_one_model(tmp_path: Path) -> None:
    tensors = weights()
    names = list(tensors)
    shards = {"one.safetensors": {n: tensors[n] for n in names[::2]},
              "two.safetensors": {n: tensors[n] for n in names[1::2]}}  # fmt: skip
    whole = write_folder(tmp_path / "whole", CONFIG, {"model.safetensors": tensors})
    parts = write_folder(tmp_path / "parts", CONFIG, shards)
    with open_weights(whole) as a, open_weights(parts) as b:
        assert dict(a.metadata) == dict(b.metadata)
        assert len(a.tensors) == len(tensors)
        for name in a.tensors:
            assert np.array_equal(a.data(name), b.data(name))
    with pytest.raises(SafetensorsError, match="closed"):
        a.data("token_embd.weight")


@pytest.mark.parametrize(
    "name",
    ["../out.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "sub\\x.safetensors",
     "x\0.safetensors", "absent.safetensors"],
)  # fmt: skip
def test_shards_outside_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "out.safetensors").write_bytes(safetensors_bytes(weights()))
    folder = write_folder(tmp_path / "model", CONFIG, {})
    write_index(folder, {"model.norm.weight": name})
    refused(folder)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", CONFIG, {"real.safetensors": weights()})
    os.rename(folder / "real.safetensors", tmp_path / "real.safetensors")
    (folder / "real.safetensors").symlink_to(tmp_path / "real.safetensors")
    refused(folder, "leads out")
    (folder / "real.safetensors").unlink()
    os.rename(tmp_path / "real.safetensors", folder / "inner.safetensors")
    (folder / "real.safetensors").symlink_to("inner.safetensors")
    open_weights(folder).close()
    (folder / "real.safetensors").unlink()
    (folder / "real.safetensors").symlink_to("real.safetensors")
    refused(folder)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    write_folder(folder, CONFIG, {"model.safetensors": weights()})
    for name in ("config.json", "model.safetensors"):
        os.rename(folder / name, blobs / name)
        (folder / name).symlink_to(f"../../blobs/{name}")
    open_weights(folder).close()


@pytest.mark.parametrize(
    "placed",
    [{"model.norm.weight": 3}, [], {"nothing": "one.safetensors"}, {}],
)
def test_an_index_that_disagrees_is_refused(tmp_path: Path, placed: Any) -> None:
    folder = write_folder(tmp_path / "model", CONFIG, {"one.safetensors": weights()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(QuireError):
        open_weights(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model", CONFIG, {"model.safetensors": weights()})
    (folder / name).write_bytes(b"cos\nsystem\n")
    open_weights(folder).close()  # beside safetensors they are not touched
    (folder / "model.safetensors").unlink()
    refused(folder, "pickles", name)


def test_unknown_architectures_and_their_code_are_refused(tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Own"}}
    folder = write_folder(tmp_path / "model", config, {"model.safetensors": weights()})
    with pytest.raises(ModelError) as caught:
        open_weights(folder)
    for word in ("OwnForCausalLM", "not run", "LlamaForCausalLM", "Gemma3ForCausalLM"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0), ("num_hidden_layers", 2**31), ("hidden_size", None),
        ("hidden_size", "8"), ("vocab_size", -1), ("rms_norm_eps", "x"), ("rms_norm_eps", 1e400),
        ("architectures", "Llama"), ("rope_scaling", 4), ("rope_scaling", {"rope_type": "dynamic"}),
        ("hidden_act", "relu"), ("quantization_config", {"bits": 4}), ("num_key_value_heads", True),
        ("head_dim", 2**30), ("partial_rotary_factor", 1e30), ("partial_rotary_factor", 0.5),
        ("tie_word_embeddings", 3), ("rope_theta", float("nan")),
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "beta_fast": 16,
                          "original_max_position_embeddings": 8}),
    ],
)  # fmt: skip
def test_bad_settings_are_named(tmp_path: Path, key: str, value: object) -> None:
    config = {k: v for k, v in (CONFIG | {key: value}).items() if v is not None}
    folder = write_folder(tmp_path / "model", config, {"model.safetensors": weights()})
    message = refused(folder, "config.json", kind=ModelError)
    named = {"rope_scaling": ("rope_scaling", "rope_type", "beta_fast")}.get(key, (key,))
    assert any(name in message for name in named)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("query_pre_attn_scalar", 0), ("query_pre_attn_scalar", -4), ("sliding_window", 0),
        ("sliding_window", None), ("layer_types", ["full_attention"] * 2), ("layer_types", ["odd"]),
        ("attn_logit_softcapping", "50"), ("use_bidirectional_attention", True),
        ("hidden_activation", "silu"), ("rope_parameters", {"full_attention": 3}),
    ],
)  # fmt: skip
def test_bad_settings_of_gemma_are_named(tmp_path: Path, key: str, value: object) -> None:
    config = CONFIG | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 4, key: value}
    folder = write_folder(tmp_path / "model", config, {"model.safetensors": weights()})
    message = refused(folder, "config.json", kind=ModelError)
    assert key in message or "full_attention" in message


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_a_bad_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "model", CONFIG, {"model.safetensors": weights()})
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")
    (folder / "config.json").unlink()
    refused(folder, "config.json")


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    """A bias that is not computed with would make the model another one."""
    tensors = weights() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(8, np.float32)}
    folder = write_folder(tmp_path / "model", CONFIG, {"model.safetensors": tensors})
    refused(folder, "self_attn.q_proj.bias", kind=ModelError)


def test_every_fault_of_a_folder_is_listed_at_once(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 8), np.float32)
    folder = write_folder(tmp_path / "model", CONFIG, {"model.safetensors": tensors})
    parts = {"pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL}
    model = {"type": "BPE", "vocab": {text: id for id, text in enumerate("abcdefgh")}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, **parts}))
    with pytest.raises(ModelError) as caught:
        quire.load(folder)
    for word in ("output_norm.weight", "blk.0.ffn_up.weight", "2 tensors"):
        assert word in str(caught.value)


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = weights() | {"model.norm.weight": np.zeros(8, np.int64)}
    folder = write_folder(tmp_path / "model", CONFIG, {"model.safetensors": tensors})
    refused(folder, "model.norm.weight", "I64", kind=ModelError)


# ---- what is changed on the way -------------------------------------------------------------


def seen(tmp_path: Path, tensors: dict[str, np.ndarray], naming: Naming) -> Folder:
    folder = write_folder(tmp_path / "changed", {}, {"model.safetensors": tensors})
    return Folder.open(folder, lambda config: naming)


def test_changes_are_what_they_say(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    x = {n: rng.standard_normal((8, 4)).astype(np.float16) for n in ("e0", "e1", "w")}
    x["conv"] = rng.standard_normal((6, 1, 4)).astype(np.float32)
    naming = Naming(
        {"general.architecture": "x"},
        {
            "stacked": stack(["e0", "e1"]),
            "paired": one("w", pair_up(2)),
            "some": one("w", take_rows(np.array([5, 0]), of=8)),
            "shifted": one("w", ADD_ONE),
            "decay": one("w", MINUS_EXP),
            "conv": one("conv", SQUEEZE_CONV),
            "absent": one("no such tensor"),
        },
        made={"made": np.arange(3, dtype=np.float32)},
    )
    half = x["w"].astype(np.float32)
    wanted = {
        "stacked": np.stack([x["e0"], x["e1"]]),
        "paired": x["w"][[0, 2, 1, 3, 4, 6, 5, 7]],
        "some": x["w"][[5, 0]],
        "shifted": half + 1,
        "decay": -np.exp(half),
        "conv": x["conv"][:, 0],
        "made": np.arange(3),
    }
    with seen(tmp_path, x, naming) as file:
        assert set(file.tensors) == set(wanted)
        for name, values in wanted.items():
            tensor = file.tensors[name]
            assert tensor.shape == values.shape
            assert file.data(name).nbytes == tensor.nbytes
            got = dequantize(file.data(name), tensor.type, tensor.shape)
            assert np.array_equal(got, values.astype(np.float32))
        assert file.tensors["stacked"].type == GGMLType.F16
        assert file.tensors["shifted"].type == GGMLType.F32


def test_rows_of_a_smaller_tensor_are_no_crash(tmp_path: Path) -> None:
    """The shape that comes out is a wrong one, so that the model's check names the tensor."""
    x = {"w": np.zeros((3, 4), np.float32), "v": np.zeros(3, np.float32)}
    rows = take_rows(np.array([5, 0]), of=8)
    naming = Naming({"general.architecture": "x"}, {"w": one("w", rows), "v": one("v")})
    assert seen(tmp_path, x, naming).tensors["w"].shape == (0, 4)


def test_experts_must_be_alike_and_complete(tmp_path: Path) -> None:
    x = {"e0": np.zeros((3, 4), np.float32), "e1": np.zeros((4, 4), np.float32)}
    for names, word in ((["e0", "e1"], "alike"), (["e0", "e1", "e2"], "e2")):
        naming = Naming({"general.architecture": "x"}, {"e": stack(names)})
        with pytest.raises(ModelError, match=word):
            seen(tmp_path, x, naming)


def test_settings_are_what_they_say(tmp_path: Path) -> None:
    config = HFConfig(tmp_path, {"n": 3, "x": 2, "none": None, "s": {"t": "u"}})
    assert (config.whole("n"), config.number("x"), config.whole("none", 5)) == (3, 2.0, 5)
    assert config.section("s").text("t") == "u" and "none" not in config
    for fault in (lambda: config.whole("x", minimum=3), lambda: config.whole("absent"),
                  lambda: config.text("n"), lambda: config.expect("n", 4)):  # fmt: skip
        with pytest.raises(ModelError):
            fault()


# ---- commands -------------------------------------------------------------------------------


def test_show_and_run_take_a_folder() -> None:
    shown = CliRunner().invoke(main, ["show", str(TINY), "--json"])
    facts = json.loads(shown.output)
    assert facts["architecture"] == "qwen3" and facts["parameters"] == 1_115_520
    assert facts["chat_template"] is True and facts["metadata"]["qwen3.block_count"] == 4
    args = ["run", "-m", str(TINY), "--raw", "-n", "4", "--quantize", "q8_0", "The"]
    assert CliRunner().invoke(main, args).exit_code == 0


def test_quantize_takes_two_names() -> None:
    with pytest.raises(quire.errors.RequestError, match="q8_0"):
        quire.load(TINY, quantize="q5_0")


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "b", "a")])
def test_empty_tensors_may_share_a_place(tmp_path: Path, names: tuple[str, ...]) -> None:
    empty = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    full = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = dict(zip(names, (full, empty, empty), strict=True))
    (tmp_path / "x.safetensors").write_bytes(file_bytes(header, bytes(8)))
    file = Safetensors(tmp_path / "x.safetensors")
    assert [len(file.data(name)) for name in names] == [8, 0, 0]
