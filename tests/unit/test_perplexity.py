"""Perplexity: the figure that logits give in float64, whatever it is computed with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import quire
from quire.api.perplexity import perplexity, perplexity_by_chunk
from quire.cli import main
from quire.errors import RequestError
from tests import tiny
from tests.gguf_writer import write_gguf
from tests.model_folders import MODELS, TRAINED

TEXT = (MODELS / "validation.txt").read_text()[:6000]


def reference(llm: quire.LLM, text: str, n: int, most: int) -> tuple[float, float, int]:
    """Token by token, from the logits of whole chunks."""
    ids = llm.encode(text, add_special=False, parse_special=False)
    found = []
    for start in range(0, min(len(ids) // n, most) * n, n):
        chunk = ids[start : start + n]
        if llm.tokenizer.add_bos:
            chunk[0] = llm.tokenizer.bos
        logits = llm.logits(chunk).astype(np.float64)
        for i in range(n // 2, n - 1):
            row = logits[i]
            found.append(np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[chunk[i + 1]])
    mean = np.mean(found)
    spread = np.sqrt((np.mean(np.square(found)) - mean**2) / (len(found) - 1))
    return float(np.exp(mean)), float(np.exp(mean) * spread), len(found)


@pytest.mark.parametrize("name", TRAINED)
def test_equals_the_reference(name: str) -> None:
    with quire.load(MODELS / name) as llm:
        value, stderr, tokens = reference(llm, TEXT, 150, 3)
        told = perplexity(llm, TEXT, 150, 3)
        assert abs(told.perplexity / value - 1) < 1e-12
        assert abs(told.stderr / stderr - 1) < 1e-9
        assert (told.tokens, told.chunks, told.of) == (tokens, 3, 3)
        assert 1 < told.perplexity < llm.tokenizer.n_vocab / 20


def test_texts_begin_as_the_model_wants(tmp_path: Path) -> None:
    model, bos = tiny.Tiny(), {"tokenizer.ggml.add_bos_token": True}
    bos["tokenizer.ggml.bos_token_id"] = 7
    write_gguf(tmp_path / "m.gguf", tiny.metadata(model) | bos, tiny.weights(model))
    with quire.load(tmp_path / "m.gguf") as llm:
        assert llm.tokenizer.add_bos and llm.tokenizer.bos == 7
        value, _, _ = reference(llm, "abcd " * 40, 33, 99)
        *before, last = perplexity_by_chunk(llm, "abcd " * 40, 33)
        assert abs(last.perplexity / value - 1) < 1e-12
        assert [told.chunks for told in before] == list(range(1, last.chunks))
        assert before[0].perplexity != last.perplexity
        with pytest.raises(RequestError, match=r"the text has 2 tokens, a chunk takes 33"):
            perplexity(llm, "ab", 33)
        with pytest.raises(RequestError, match="a chunk has 4 to"):
            perplexity(llm, "ab", 10**6)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    words = ["perplexity", str(file), "-m", str(MODELS / "tiny-dense"), "--chunk", "128"]
    shown = CliRunner().invoke(main, [*words, "--chunks", "2"])
    told = json.loads(CliRunner().invoke(main, [*words, "--json", "--chunks", "2"]).stdout)
    assert f"perplexity {told['perplexity']:.4f} ± {told['stderr']:.4f} (126 tokens" in shown.stdout
    assert told["chunks"] == 2 and told["chunk"] == 128
    short = CliRunner().invoke(main, [*words[:-2], "-c", "128", "--json", "--chunks", "2"])
    assert json.loads(short.stdout)["perplexity"] == told["perplexity"]
    missing = CliRunner().invoke(main, ["perplexity", str(tmp_path / "none.txt")])
    assert missing.exit_code == 1 and "none.txt: cannot be read" in missing.stderr
