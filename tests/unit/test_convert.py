"""Models become GGUF files: the same model, with fewer bits and all that was known of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import quire
from quire.cli import main
from quire.convert import FORMATS, convert
from quire.errors import ModelError, RequestError, TokenizerError
from quire.models.registry import open_weights
from quire.text.export import gguf_vocabulary
from quire.text.tokenizer import Tokenizer
from quire.weights.quant import GGMLType, dequantize
from tests import tiny
from tests.gguf_writer import Typed, ValueType, write_gguf, write_split
from tests.model_folders import MODELS, RANDOM, TRAINED, exactly, model_folder

gguf = pytest.importorskip("gguf")

TEXT = json.loads((MODELS / "tiny-dense" / "golden.json").read_text())["prompts"][-1]
IDS = TEXT["token_ids"][:120]
CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus" / "tokenizers"


def made(source: Path, target: Path, form: str, **options: Any) -> Path:
    with open_weights(source) as file:
        return convert(file, target, FORMATS[form], **options).path


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_every_architecture_becomes_a_file(name: str, tmp_path: Path) -> None:
    folder = model_folder(name, tmp_path)
    exact = made(folder, tmp_path / "exact.gguf", "f32")
    path = made(folder, tmp_path / "m.gguf", "q8_0", threads=2)
    with quire.load(exact, **exactly(folder)) as a, quire.load(path, **exactly(folder)) as b:
        wanted, got = a.logits(IDS), b.logits(IDS)
        assert a.encode(TEXT["text"]) == b.encode(TEXT["text"])
        assert a.has_template == b.has_template
    off = np.abs(got - wanted).mean() / np.abs(wanted - wanted.mean()).mean()
    assert 0 < off < (0.3 if name in RANDOM else 0.05)
    with open_weights(path) as file:
        assert GGMLType.Q8_0 in {tensor.type for tensor in file.tensors.values()}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read_back(form: str, tmp_path: Path) -> None:
    """Each tensor is as close to the source as its type allows, and another reader agrees."""
    source = tmp_path / "source.gguf"
    weights = tiny.write(source, tiny.Tiny(width=256, ffn=512))
    path = made(source, tmp_path / "m.gguf", form)
    recipe = FORMATS[form]
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    bits = {"q4": 0.12, "q5": 0.06, "q6": 0.03, "q8": 0.01, "f1": 1e-3, "bf": 1e-2, "f3": 1e-9}
    with open_weights(path) as file:
        assert file.get_int("general.file_type") == recipe.file_type
        for name, exact in weights.items():
            tensor = file.tensors[name]
            if exact.ndim < 2:
                assert tensor.type == GGMLType.F32
            values = dequantize(file.data(name), tensor.type, tensor.shape)
            assert (
                np.sqrt(np.square(values - exact).mean() / np.square(exact).mean()) < bits[form[:2]]
            )
            mine = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
            assert np.array_equal(mine.reshape(exact.shape), values)
    with quire.load(path) as llm:
        assert llm.generate("a", max_tokens=2).token_ids


def test_metadata_is_kept_to_the_bit(tmp_path: Path) -> None:
    odd = {
        "general.file_type": 1, "x.u8": Typed(ValueType.UINT8, 3),
        "x.i64": Typed(ValueType.INT64, -5),
        "x.f64": Typed(ValueType.FLOAT64, 0.1), "x.bools": Typed(ValueType.BOOL, [True, False]),
        "x.u16s": Typed(ValueType.UINT16, [1, 2, 65535]), "x.texts": ["a", "", "é\0b"],
        "x.empty": Typed(ValueType.STRING, []),
    }  # fmt: skip
    model = tiny.Tiny()
    source = write_gguf(tmp_path / "a.gguf", tiny.metadata(model) | odd, tiny.weights(model))
    path = made(source, tmp_path / "b.gguf", "q8_0")
    before, after = (gguf.GGUFReader(one).fields for one in (source, path))
    new = {"general.file_type", "general.quantization_version"}
    assert set(before) | new == set(after)
    for key in set(before) - new - {name for name in before if name.startswith("GGUF.")}:
        assert (
            before[key].types == after[key].types
            and before[key].contents() == after[key].contents()
        )
    assert after["general.file_type"].contents() == 7


def test_parts_become_one_file(tmp_path: Path) -> None:
    model = tiny.Tiny()
    parts = write_split(tmp_path, "m", 3, tiny.metadata(model), tiny.weights(model))
    path = made(parts[0], tmp_path / "one.gguf", "f32")
    with open_weights(parts[0]) as a, open_weights(path) as b:
        assert "split.count" not in b.metadata
        assert all(np.array_equal(a.data(name), b.data(name)) for name in a.tensors)


def test_progress_and_threads_change_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    tiny.write(source, tiny.Tiny(width=256))
    seen: list[tuple[int, int]] = []
    one = made(source, tmp_path / "1.gguf", "q4_k_m", progress=lambda *at: seen.append(at))
    two = made(source, tmp_path / "2.gguf", "q4_k_m", threads=3)
    assert one.read_bytes() == two.read_bytes()
    done = [done for done, _ in seen]
    assert done == sorted(done) and done[-1] == seen[0][1] == seen[-1][1]


def test_a_conversion_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    tiny.write(source, tiny.Tiny())

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(source, tmp_path / "m.gguf", "q8_0", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    tiny.write(source, tiny.Tiny())
    before = source.read_bytes()
    with pytest.raises(RequestError, match=r"is there already; remove it, or choose another name"):
        made(source, source, "q8_0")
    with pytest.raises(RequestError, match="cannot be written: No such file"):
        made(source, tmp_path / "no" / "m.gguf", "q8_0")
    assert source.read_bytes() == before


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = tiny.Tiny()
    weights = tiny.weights(model)
    weights["blk.0.ffn_up.weight"][3, 3] = np.nan
    source = write_gguf(tmp_path / "a.gguf", tiny.metadata(model), weights)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight: Q8_0 cannot hold"):
        made(source, tmp_path / "b.gguf", "q8_0")
    assert not (tmp_path / "b.gguf").exists()


def vocabulary_folder(folder: Path, name: str) -> tuple[Path, int]:
    """A folder with this tokenizer; its kind of merges learned from a few words."""
    folder.mkdir()
    data = json.loads((CORPUS / f"{name}.json").read_text())
    size = max([*data["model"]["vocab"].values(), *(t["id"] for t in data["added_tokens"])]) + 1
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "config.json").write_text(json.dumps({"vocab_size": size + 7}))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, size + 7


@pytest.mark.parametrize("name", ["byte_level", "split", "metaspace", "prepend"])
def test_vocabularies_say_the_same(name: str, tmp_path: Path) -> None:
    folder, size = vocabulary_folder(tmp_path / "v", name)
    metadata = gguf_vocabulary(folder, "llama", size)
    a, b = Tokenizer.from_hf(folder), Tokenizer.from_metadata(metadata)
    words = ["the", " the", "  ", "\n", "x", "é", "中", "🙂", "12", "ab", " th", "he ", "'s"]
    words += [] if name == "metaspace" else ["</s>"]
    rng = np.random.default_rng(2)
    for _ in range(300):
        text = "".join(rng.choice(words, rng.integers(1, 12)))
        text = text.lstrip(" ") if name == "metaspace" else text  # files know no such difference
        assert a.encode(text) == b.encode(text), text
    assert (a.bos, a.eos, a.add_bos, a.eog_ids) == (b.bos, b.eos, b.add_bos, b.eog_ids)
    assert len(metadata["tokenizer.ggml.tokens"]) == size == b.n_vocab


def test_the_way_to_split_is_found(tmp_path: Path) -> None:
    tokens = 4096
    assert gguf_vocabulary(MODELS / "tiny-dense", "qwen3", tokens)["tokenizer.ggml.pre"] == "qwen2"
    folder, size = vocabulary_folder(tmp_path / "v", "split")
    assert gguf_vocabulary(folder, "llama", size)["tokenizer.ggml.pre"] in ("llama-bpe", "dbrx")


def test_a_way_to_split_without_a_name_is_refused(tmp_path: Path) -> None:
    folder, size = vocabulary_folder(tmp_path / "v", "byte_level")
    data = json.loads((folder / "tokenizer.json").read_text())
    digits = {"type": "Split", "pattern": {"Regex": r"\p{N}+"}, "behavior": "Isolated"}
    plain = data["pre_tokenizer"] | {"use_regex": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, plain]}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="no GGUF file can say how it splits text"):
        gguf_vocabulary(folder, "llama", size)


def test_ends_of_generation_are_kept(tmp_path: Path) -> None:
    folder = shutil.copytree(MODELS / "tiny-dense", tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    original = Tokenizer.from_hf(folder)
    made = Tokenizer.from_metadata(gguf_vocabulary(folder, "qwen3", 4096))
    assert {7, 9} < made.eog_ids == original.eog_ids


def test_the_command(tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    words = ["quantize", str(MODELS / "tiny-dense"), str(target), "--format", "Q8_0"]
    told = CliRunner().invoke(main, words)
    assert told.exit_code == 0 and "became" in told.stdout and "Q8_0" in told.stdout
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 1 and "is there already" in again.stderr
    words = ["quantize", str(target), str(tmp_path / "n.gguf"), "--format", "q4_0"]
    told = CliRunner().invoke(main, words)
    assert told.exit_code == 0 and "lost precision twice" in told.stderr
