"""Gaps in texts: llama.cpp's `/infill`, and `suffix` in OpenAI's and Ollama's forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestError
from quire.text.infill import infill_tokens
from quire.text.tokenizer import Tokenizer
from tests import tiny
from tests.gguf_writer import Typed, ValueType
from tests.server.rig import Rig, serving

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
GREEDY = {"temperature": 0, "ignore_eos": True}


def vocabulary(*texts: str) -> dict[str, Any]:
    """Bytes, and tokens for gaps; weights of a tiny model have room for them."""
    made = tiny.vocabulary()
    tokens = made["tokenizer.ggml.tokens"]
    tokens[: len(texts)] = texts  # in the place of control characters
    kinds = [3] * len(texts) + [1] * (256 - len(texts)) + [3] * 3
    return {**made, "tokenizer.ggml.token_type": Typed(ValueType.INT32, kinds)}


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("infill")
    tiny.write(folder / "coder.gguf", tiny.Tiny(), vocabulary(*FIM))
    with serving(folder, str(folder / "coder.gguf")) as rig:
        yield rig


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.token_text(i).replace("Ġ", " ").replace("Ċ", "\n") for i in ids)


def test_a_gap_is_between_what_is_before_and_behind(filler: Rig) -> None:
    tokenizer = filler.llm.tokenizer
    gap = "<|fim_prefix|>a b<|fim_suffix|>c<|fim_middle|>"
    assert text(tokenizer, infill_tokens(tokenizer, "a b", "c")) == gap
    files = [("one.py", "x = 1"), (None, "y")]
    assert text(tokenizer, infill_tokens(tokenizer, "a b", "c", files)) == (
        "<|repo_name|>myproject\n<|file_sep|>one.py\nx = 1<|file_sep|>filename\ny"
        "<|file_sep|>filename\n" + gap
    )
    written_out = infill_tokens(tokenizer, "<|fim_middle|>", "")
    assert written_out.count(tokenizer.fill["fim_mid"]) == 1  # a text cannot say where it ends


def test_all_dialects_fill_the_same_gap(filler: Rig) -> None:
    assert "insert" in filler.post("/api/show", model="coder")["capabilities"]
    ids = infill_tokens(filler.llm.tokenizer, "def f():", "return x")
    wanted = filler.complete(ids, 8)["choices"][0]["text"]
    filled = filler.post("/v1/completions", prompt="def f():", suffix="return x", max_tokens=8,
                         **GREEDY)  # fmt: skip
    assert filled["choices"][0]["text"] == wanted
    filled = filler.post("/infill", input_prefix="def ", prompt="f():", input_suffix="return x",
                         n_predict=8, **GREEDY)  # fmt: skip
    assert filled["content"] == wanted and filled["tokens_evaluated"] == len(ids)
    filled = filler.post("/api/generate", model="coder", prompt="def f():", suffix="return x",
                         stream=False, options={"num_predict": 8, "temperature": 0})  # fmt: skip
    assert wanted.startswith(filled["response"])
    more = filler.post("/infill", input_prefix="a", input_suffix="b", n_predict=1,
                       input_extra=[{"filename": "one.py", "text": "x"}])  # fmt: skip
    assert more["tokens_evaluated"] > 20


@pytest.mark.parametrize("extra", [{}, {"filename": "a"}, {"filename": 1, "text": "a"}])
def test_what_is_no_file_is_refused(filler: Rig, extra: Any) -> None:
    filler.refused(400, "/infill", input_prefix="a", input_suffix="b", input_extra=[extra])


def test_what_has_no_gap_is_refused(filler: Rig, rig: Rig, tmp_path: Path) -> None:
    filler.refused(400, "/infill", input_prefix="a")
    filler.refused(400, "/infill", input_prefix="a" * 9999, input_suffix="b")
    filler.refused(400, "/v1/completions", prompt=[1, 2], suffix="a")
    filler.post("/v1/sessions", id="one", prompt="a")
    filler.refused(400, "/v1/completions", prompt="a", suffix="a", session_id="one")
    filler.refused(400, "/infill", input_prefix="a", input_suffix="b", session_id="one")
    error = rig.refused(400, "/infill", input_prefix="a", input_suffix="b")
    assert "cannot fill gaps" in error["message"]
    rig.refused(400, "/v1/completions", prompt="a", suffix="b")
    tiny.write(tmp_path / "less.gguf", tiny.Tiny(), vocabulary(*FIM[:2]))
    with pytest.raises(RequestError, match="no tokens for fim_mid;"):
        infill_tokens(Tokenizer(tmp_path / "less.gguf"), "a", "b")


def test_folders_have_such_tokens_too(tmp_path: Path) -> None:
    import json

    from tests.server.rig import DENSE

    source = json.loads((Path(DENSE) / "tokenizer.json").read_text())
    free = max(max(t["id"] for t in source["added_tokens"]), max(source["model"]["vocab"].values()))
    for at, name in enumerate(FIM):
        source["added_tokens"].append({
            "id": free + 1 + at, "content": name, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        })  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    tokenizer = Tokenizer(tmp_path)
    assert text(tokenizer, infill_tokens(tokenizer, "", "")[-3:]) == "".join(FIM[:3])
    assert tokenizer.fill["fim_sep"] in tokenizer.eog_ids
