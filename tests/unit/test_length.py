"""How few tokens a word has is known before it is merged, and never more than it has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import ContextError
from quire.text import length
from quire.text.tokenizer import Tokenizer
from tests.unit.test_tokenizer import BPE, byte_vocab, load, metadata

MODELS = Path(__file__).parents[1] / "data" / "models"
_DATA = metadata(BPE, pre="llama-bpe")
_LETTER = next(at for at, text in enumerate(_DATA["tokenizer.ggml.tokens"]) if text == "e")
_HOLED = [f"<{at}>" if at == _LETTER else t for at, t in enumerate(_DATA["tokenizer.ggml.tokens"])]
TOKENIZERS = {
    "bytes": Tokenizer.from_metadata(_DATA),
    "a byte without a token": Tokenizer.from_metadata(
        metadata(BPE, pre="llama-bpe", tokens=_HOLED)
    ),
    "a merge to no token": Tokenizer.from_metadata(byte_vocab()),
    "characters": Tokenizer.from_metadata(metadata(load("gemma4"))),
    "pieces": Tokenizer.from_metadata(metadata(load("spm"))),
    "tokenizer.json": Tokenizer.from_hf(MODELS / "tiny-dense"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_fits_is_never_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "_LONG", 0)
    tokenizer = TOKENIZERS[name]
    monkeypatch.setitem(tokenizer.__dict__, "_longest", 10**9)  # words alone are looked at here
    units = ["a", "b", "the", "e", " ", "\n", "-", "1", "\u00e9", "\u4e16", "\U0001f600", "\ue000"]
    runs = st.tuples(st.sampled_from(units), st.integers(1, 40)).map(lambda run: run[0] * run[1])
    tokens = st.integers(0, tokenizer.n_vocab - 1).map(lambda id: tokenizer.decode([id]))

    @given(st.lists(runs | tokens | st.text(), max_size=12).map("".join))
    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.encode(text, max_tokens=len(ids)) == ids

    check()


@pytest.mark.parametrize("unit", ["a", "qz", "\u4e16"])
def test_a_word_that_cannot_fit_is_not_merged(unit: str) -> None:
    tokenizer = TOKENIZERS["bytes"]
    text = unit * (4096 * tokenizer._longest // len(unit))  # by its length alone it might fit
    start = time.process_time()
    with pytest.raises(ContextError, match=r"a word of at least \d+ tokens, and 4096 fit"):
        tokenizer.encode(text, max_tokens=4096)
    took = time.process_time() - start
    start = time.process_time()
    tokenizer.encode(text)
    assert 3 * took < time.process_time() - start
