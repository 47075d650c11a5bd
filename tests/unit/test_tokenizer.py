"""Tokenizers: the ids llama.cpp gives, text that comes back, and vocabularies that are refused."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
import unicodedata
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import config
from quire.errors import ContextError, QuireError, TokenizerError
from quire.text import characters
from quire.text.bpe import BYTE_CHARACTERS, BytePairs
from quire.text.hf_patterns import LAST_SPACES, PARTIAL, TOTAL
from quire.text.merge import merge, merge_few, merge_ids
from quire.text.parts import Parts
from quire.text.pretokenize import PreTokenizer, WordSplitter
from quire.text.sentencepiece import SentencePieces
from quire.text.special import SpecialToken, SpecialTokens
from quire.text.tokenizer import Tokenizer
from quire.text.variants import PRE_TOKENIZERS
from quire.text.vocab import read_vocab
from quire.weights.catalog import kept_models
from quire.weights.gguf import GGUF

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
SHARED = Path(__file__).parents[3] / "shared"
GOLDEN = SHARED / "golden" / "tokenizers"
SEPARATOR = "\n__ggml_vocab_test__\n"


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return data


def metadata(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a vocabulary; a change to None leaves the key out."""
    keys = ("tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id")
    fields = {"model": data.get("model", "gpt2"), **{k: data[k] for k in keys if k in data}}
    fields.update(changes)
    named = {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}
    return {**named, **data.get("extra", {})}


def byte_vocab(*more: str, kinds: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    """A vocabulary of all bytes and some more tokens, with one merge."""
    tokens = [*BYTE_CHARACTERS, *more]
    types = [1] * 256 + list(kinds or [1] * len(more))
    return metadata({"tokens": tokens, "token_type": types, "merges": ["a b"]}, **changes)


BPE = load("bpe")


class TestConformance:
    """Ids that llama.cpp gives."""

    @pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() & BPE["names"].keys()))
    def test_every_pre_tokenizer(self, pre: str) -> None:
        tokenizer = Tokenizer.from_metadata(metadata(BPE, pre=pre))
        which = BPE["names"][pre]
        for text, plain, special in zip(
            BPE["texts"], BPE["plain"][which], BPE["special"][which], strict=True
        ):
            assert tokenizer.encode(text, add_special=False, parse_special=False) == plain
            assert tokenizer.encode(text) == special
            assert tokenizer.decode(plain) == text

    def test_every_byte_level_pre_tokenizer_is_covered(self) -> None:
        known = {name for name, variant in PRE_TOKENIZERS.items() if variant.byte_level}
        assert known == BPE["names"].keys()

    @pytest.mark.parametrize("name", ["spm", "spm_noprefix", "gemma4"])
    def test_character_vocabularies(self, name: str) -> None:
        data = load(name)
        tokenizer = Tokenizer.from_metadata(metadata(data))
        for text, plain, special in zip(data["texts"], data["plain"], data["special"], strict=True):
            assert tokenizer.encode(text, add_special=False, parse_special=False) == plain
            assert tokenizer.encode(text) == special
            if name != "spm" or "<tool>" not in text:  # a space is put after special tokens too
                assert tokenizer.decode(plain) == text
        assert sorted(tokenizer.eog_ids) == data["eog"]
        assert tokenizer.add_bos

    def test_a_missing_pre_tokenizer_is_the_default(self) -> None:
        tokenizer = Tokenizer.from_metadata(metadata(BPE))
        expected = BPE["plain"][BPE["names"]["default"]]
        assert [tokenizer.encode(t, False, False) for t in BPE["texts"]] == expected

    @pytest.mark.skipif(not GOLDEN.is_dir(), reason="no conformance data beside the repository")
    @pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-2", "llama-spm", "phi-3"])
    def test_shared_vocabularies(self, name: str) -> None:
        path = GOLDEN / f"ggml-vocab-{name}.gguf"
        texts = path.with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)[:-1]
        lines = path.with_suffix(".gguf.out").read_text().split("\n")
        tokenizer = Tokenizer(path)
        assert len(texts) == 46
        for text, line in zip(texts, lines, strict=False):
            ids = tokenizer.encode(text, add_special=False, parse_special=False)
            assert ids == [int(id) for id in line.split()]
            assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    path = SHARED / "golden" / "smollm2-135m-q4_1.json"
    if not path.is_file():
        pytest.skip("no golden data beside the repository")
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.fixture(scope="module")
def smollm2() -> Path:
    for model in kept_models(config.cache_folder()):
        if model.name == "smollm2":
            return model.path
    pytest.skip("the default model is not in the cache")


class TestSmolLM2:
    """The default model's own vocabulary, where the model and its golden data are at hand."""

    def test_prompts_and_ends(self, golden: dict[str, Any], smollm2: Path) -> None:
        tokenizer = Tokenizer(smollm2)
        assert sorted(tokenizer.eog_ids) == golden["eog_token_ids"]
        for prompt in golden["prompts"]:
            assert tokenizer.encode(prompt["text"]) == prompt["token_ids"]
        text = (SHARED / "golden" / "ppl.txt").read_text().removesuffix("\n")
        assert tokenizer.encode(text) == golden["perplexity"]["token_ids"]

    def test_is_built_quickly(self, smollm2: Path) -> None:
        with GGUF.open(smollm2) as file:
            best = min(_seconds(lambda: Tokenizer.from_metadata(file.metadata)) for _ in range(5))
        assert best < 0.15  # 0.025 on an idle machine


class TestText:
    """What goes in comes out."""

    tokenizer = Tokenizer.from_metadata(metadata(BPE, pre="llama-bpe"))
    pieces = Tokenizer.from_metadata(metadata(load("spm")))

    @given(st.text())
    @settings(max_examples=50, deadline=None)
    def test_round_trip(self, text: str) -> None:
        for tokenizer in (self.tokenizer, self.pieces):
            ids = tokenizer.encode(text, add_special=False, parse_special=False)
            assert tokenizer.decode(ids) == text
            assert all(0 <= id < tokenizer.n_vocab for id in ids)

    @given(st.text(), st.sampled_from(sorted(PRE_TOKENIZERS)))
    @settings(deadline=None)
    def test_words_make_up_the_text(self, text: str, pre: str) -> None:
        words = WordSplitter(PRE_TOKENIZERS[pre]).split(text)
        assert "".join(words) == text
        assert all(words)

    def test_token_bytes_are_parts_of_characters(self) -> None:
        ids = self.tokenizer.encode("é世🙂\0", add_special=False)
        data = b"".join(map(self.tokenizer.token_bytes, ids))
        assert data.decode() == "é世🙂\0"
        assert self.tokenizer.token_bytes(BPE["tokens"].index("\u0120")) == b" "

    def test_special_tokens(self) -> None:
        start = BPE["tokens"].index("<|im_start|>")
        text = "<|im_start|>a<tool>"
        ids = self.tokenizer.encode(text, add_special=False)
        assert ids[0] == start and len(ids) == 3
        plain = self.tokenizer.encode(text, add_special=False, parse_special=False)
        assert start not in plain
        assert plain[-1] == ids[-1]  # user-defined tokens are always recognised
        assert self.tokenizer.decode(ids) == text
        assert self.tokenizer.decode(ids, skip_special=True) == "a<tool>"
        assert self.tokenizer.is_special(start)
        assert not self.tokenizer.is_special(ids[-1])

    def test_bos_and_eos(self) -> None:
        both = metadata(BPE, add_bos_token=True, add_eos_token=True, pre="gpt-2")
        tokenizer = Tokenizer.from_metadata(both)
        bos, eos = tokenizer.bos, tokenizer.eos
        assert tokenizer.encode("") == [bos, eos]
        assert tokenizer.encode("", add_special=False) == []
        assert tokenizer.token_text(bos) == "<|endoftext|>"
        assert tokenizer.token_text(None) == ""

    def test_the_space_prefix_is_taken_away_again(self) -> None:
        ids = self.pieces.encode("Hello", add_special=True)
        assert ids[0] == self.pieces.bos
        assert self.pieces.decode(ids, skip_special=True) == "Hello"
        assert self.pieces.decode(ids) == "<s> Hello"
        assert self.pieces.decode(self.pieces.encode(" Hello", add_special=False)) == " Hello"

    @pytest.mark.parametrize("id", [-1, 10**9, 1105])
    def test_ids_outside_the_vocabulary(self, id: int) -> None:
        for call in (self.tokenizer.token_bytes, self.tokenizer.is_special):
            with pytest.raises(TokenizerError, match=r"outside the vocabulary of 1105 tokens"):
                call(id)
        with pytest.raises(TokenizerError, match="outside"):
            self.tokenizer.decode([5, id])

    def test_lone_surrogates_and_other_types(self) -> None:
        with pytest.raises(TokenizerError, match="surrogate at position 2"):
            self.tokenizer.encode("ab\ud800")
        with pytest.raises(TokenizerError, match="string, not bytes"):
            self.tokenizer.encode(b"ab")  # type: ignore[arg-type]

    @pytest.mark.parametrize("unit", [" ", "a", "1", "\n", "世", "<|", "a b", "'", "\t\n", "A1 "])
    def test_long_texts_take_linear_time(self, unit: str) -> None:
        text = unit * (30_000 // len(unit)) + "x"
        for encode in (self.tokenizer.encode, self.pieces.encode):
            assert _seconds(partial(encode, text)) < 3  # 0.3 on an idle machine


_KINDS = {name: variant for variant, name in {v: k for k, v in PRE_TOKENIZERS.items()}.items()} | {
    f"pattern {number}": PreTokenizer((pattern,), cased=True)
    for number, pattern in enumerate([*TOTAL.values(), *PARTIAL.values(), LAST_SPACES[1]])
}
_UNITS = [" ", "a", "A", "1", "\n", "\r\n", "'", "!", "\u4e16", "\u0301", " 1", "aA", "'s", "  \n",
          "!\n", "<sentinel:", "\u3000", "a\u0301", "/", "'l"]  # fmt: skip


class TestSplitting:
    """Every way of splitting, those of tokenizer.json files among them."""

    @pytest.mark.parametrize("kind", _KINDS)
    def test_takes_linear_time(self, kind: str) -> None:
        """Eight times the text may take some more than eight times as long."""
        split = WordSplitter(_KINDS[kind]).split

        def seconds(length: int) -> float:
            texts = [u * (length // len(u)) + end for u in _UNITS for end in ("", "1", "x", "\n")]
            start = time.process_time()
            for text in texts:
                split(text)
            return time.process_time() - start

        assert seconds(20_000) < 8 * 3 * seconds(2_500) + 0.1

    def test_spaces_and_a_digit(self) -> None:
        split = WordSplitter(PRE_TOKENIZERS["deepseek-llm"]).split
        assert _seconds(lambda: split(" " * 40_000 + "1")) < 1  # it was 4.6

    @pytest.mark.parametrize("kind", _KINDS)
    def test_a_part_at_a_time_gives_the_same_words(self, kind: str) -> None:
        """Texts that begin alike have known parts."""
        splitter = WordSplitter(_KINDS[kind])
        parts = [Parts(splitter, length) for length in range(41)]
        units = st.sampled_from([*_UNITS, "x", ">", "IMGIMGABZ", "\u0661", "123", "Hello", "  "])
        runs = st.tuples(units, st.integers(1, 30)).map(lambda run: run[0] * run[1])

        def lengths(words: list[str]) -> list[int]:
            return [len(word) for word in words]

        @given(st.lists(runs | units, max_size=20).map("".join), st.integers(1, 40))
        @settings(max_examples=60, deadline=None)
        def check(text: str, window: int) -> None:
            found = chain.from_iterable(parts[window].encode(text, lengths))
            assert list(found) == lengths(splitter.split(text))

        check()


class TestBounds:
    """Text is measured before it is tokenised."""

    tokenizers = (
        Tokenizer.from_metadata(metadata(BPE, pre="llama-bpe")),
        Tokenizer.from_metadata(metadata(load("spm"))),
    )

    @pytest.mark.parametrize("tokenizer", tokenizers)
    def test_what_fits_is_encoded(self, tokenizer: Tokenizer) -> None:
        text = "Some words, 12 numbers and <tool>\n" * 20
        ids = tokenizer.encode(text)
        assert tokenizer.encode(text, max_tokens=len(ids)) == ids
        assert tokenizer.encode("", add_special=False, max_tokens=0) == []
        with pytest.raises(ContextError, match=f"has {len(ids)} tokens, and {len(ids) - 1} fit"):
            tokenizer.encode(text, max_tokens=len(ids) - 1)

    @pytest.mark.parametrize("tokenizer", tokenizers)
    @pytest.mark.parametrize("unit", ["a", " ", "word ", "\u4e16", "1\n"])
    def test_what_cannot_fit_costs_nothing(self, tokenizer: Tokenizer, unit: str) -> None:
        text = unit * (20_000_000 // len(unit))
        tokenizer.encode(unit, max_tokens=100)
        tracemalloc.start()
        start = time.process_time()
        try:
            with pytest.raises(ContextError, match="at least"):
                tokenizer.encode(text, max_tokens=4096)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
            assert time.process_time() - start < 0.5
        finally:
            tracemalloc.stop()

    def test_work_ends_when_there_are_too_many(self) -> None:
        text = "a different word in every place " * 100_000
        for tokenizer in self.tokenizers:
            with pytest.raises(ContextError, match=r"more than \d+ tokens, and 50000 fit"):
                tokenizer.encode(text[: 50_000 * tokenizer._longest], max_tokens=50_000)


class TestOddArguments:
    tokenizer = Tokenizer.from_metadata(metadata(BPE, pre="llama-bpe"))

    @pytest.mark.parametrize("path", [None, 5, 1.5, b"x", [], object()])
    def test_paths(self, path: Any) -> None:
        with pytest.raises(QuireError):
            Tokenizer(path)

    @pytest.mark.parametrize("path", ["", "\0", "\ud800", "a" * 5000, "/dev/null", "/nowhere"])
    def test_paths_of_no_file(self, path: str) -> None:
        with pytest.raises(QuireError):
            Tokenizer(path)
        with pytest.raises(QuireError):
            Tokenizer.from_hf(path)

    @pytest.mark.parametrize("id", ["x", 1.5, None, [1], 2**70, -(2**70), b"1"])
    def test_ids(self, id: Any) -> None:
        for call in (self.tokenizer.token_bytes, self.tokenizer.is_special):
            with pytest.raises(TokenizerError):
                call(id)
        with pytest.raises(TokenizerError):
            self.tokenizer.decode([id])

    @pytest.mark.parametrize("ids", [5, None, 1.5, "abc"])
    def test_lists_of_ids(self, ids: Any) -> None:
        with pytest.raises(TokenizerError):
            self.tokenizer.decode(ids)

    def test_numbers_of_numpy_are_ids(self) -> None:
        ids = self.tokenizer.encode("a text")
        assert self.tokenizer.decode(np.array(ids)) == self.tokenizer.decode(ids)


class TestMerging:
    """The heap against the plain way: look for the best pair, join it, look again."""

    @staticmethod
    def by_hand(symbols: list[str], rank: Any) -> list[str]:
        while True:
            ranked = [
                (urgency, i)
                for i, pair in enumerate(pairwise(symbols))
                if (urgency := rank(*pair)) is not None
            ]
            if not ranked:
                return symbols
            _, i = min(ranked)
            symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]

    @given(st.text("abc", max_size=30), st.permutations(["a b", "b c", "ab c", "a a", "aa a"]))
    @settings(deadline=None)
    def test_ranked_pairs(self, text: str, merges: list[str]) -> None:
        ranks = {pair: i for i, pair in enumerate(merges)}
        ends = merge(len(text), lambda a, b, c: ranks.get(f"{text[a:b]} {text[b:c]}"))
        found = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        assert found == self.by_hand(list(text), lambda x, y: ranks.get(f"{x} {y}"))
        assert found == merge_few(text, ranks)

    @given(
        st.text("abc", max_size=40), st.permutations(["a b", "b c", "ab c", "a a", "aa a", "c c"]),
        st.integers(1, 6), st.integers(0, 50),
    )  # fmt: skip
    @settings(max_examples=200, deadline=None)
    def test_long_words_are_merged_as_short_ones(
        self, text: str, merges: list[str], urgencies: int, long: int
    ) -> None:
        """Learned merges or any other, some as urgent as others; ids or characters."""
        ranks = {pair: i % urgencies for i, pair in enumerate(merges)}
        expected = self.by_hand(list(text), lambda x, y: ranks.get(f"{x} {y}"))
        symbols = {one: i for i, one in enumerate(["a", "b", "c", "ab", "bc", "abc", "aa", "aaa"])}
        symbols["cc"], names = len(symbols), [*symbols, "cc"]
        of = [tuple(symbols[part] for part in pair.split()) for pair in merges]
        made = [symbols[pair.replace(" ", "")] for pair in merges]
        pairs = {left * 100 + right: i for i, (left, right) in enumerate(of)}
        by_rank = {pair: i for i, pair in enumerate(merges)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.text.merge._LONG", long)
            ends = merge(len(text), lambda a, b, c: ranks.get(f"{text[a:b]} {text[b:c]}"))
            ids = merge_ids([symbols[one] for one in text], pairs, made, 100)
        assert [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] == expected
        assert merge_few(text, ranks) == expected
        expected = self.by_hand(list(text), lambda x, y: by_rank.get(f"{x} {y}"))
        assert [names[id] for id in ids] == expected

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_cutting_sentencepiece_text_changes_nothing(self, data: st.DataObject) -> None:
        words = st.text("ab\u2581\n.", min_size=2, max_size=5)
        tokens = list("ab\u2581\n.") + data.draw(st.lists(words, unique=True, max_size=12))
        scores = data.draw(st.lists(st.integers(-3, 0), min_size=len(tokens), max_size=len(tokens)))
        vocab = read_vocab(metadata({"model": "llama", "tokens": tokens}), "x", {})
        pieces = SentencePieces(vocab, [float(score) for score in scores])
        text = data.draw(st.text("ab \n.", max_size=40))
        marked = text.replace(" ", "\u2581")

        def rank(left: str, right: str) -> float | None:
            id = vocab.ids.get(left + right)
            return None if id is None else -float(scores[id])

        expected = [vocab.ids[symbol] for symbol in self.by_hand(list(marked), rank)]
        for _ in range(2):  # the second time from the cache
            assert [id for part in pieces.encode(text) for id in part] == expected

    def test_merges_of_tokens_that_do_not_exist_are_spelled_out(self) -> None:
        tokenizer = Tokenizer.from_metadata(byte_vocab("ab", merges=["a b", "ab c", "x y", "y x"]))
        assert tokenizer.decode(tokenizer.encode("abc xyxyx")) == "abc xyxyx"

    def test_the_first_of_equal_merges_counts(self) -> None:
        merges = ["a b", "b c", "a b", "b"]
        tokenizer = Tokenizer.from_metadata(byte_vocab("ab", "bc", merges=merges))
        assert tokenizer.encode("abc") == [256, BYTE_CHARACTERS.index("c")]

    def test_bytes_without_a_token_are_left_out(self) -> None:
        data = byte_vocab()
        keep = [t for t in data["tokenizer.ggml.tokens"] if t != "\u00f1"]
        tokenizer = Tokenizer.from_metadata(
            metadata({"tokens": keep, "merges": ["a b"], "unknown_token_id": 0})
        )
        assert tokenizer.decode(tokenizer.encode("a\U00050000b")) == "a\ufffd\ufffd\ufffdb"


class TestSpecialTokens:
    """Text is cut at special tokens, the longest first."""

    @staticmethod
    def split(text: str, *tokens: SpecialToken, parse: bool = True) -> list[str | int]:
        return SpecialTokens(tokens).split(text, parse)

    def test_longest_first_wherever_it_is(self) -> None:
        a, b = SpecialToken(1, "<a>", False), SpecialToken(2, "a><bb>", False)
        assert self.split("<a><bb><a>", a, b) == ["<", 2, 1]
        assert self.split("<a><b<a>", a, b) == [1, "<b", 1]

    def test_overlapping_occurrences_of_one_token(self) -> None:
        token = SpecialToken(1, "aa", False)
        assert self.split("aaaaa", token) == [1, 1, "a"]
        assert self.split("xaaay", token, SpecialToken(2, "aay", False)) == ["xa", 2]

    def test_white_space_is_swallowed(self) -> None:
        left = SpecialToken(1, "<l>", False, lstrip=True)
        right = SpecialToken(2, "<r>", False, rstrip=True)
        assert self.split("a \n<l> b", left) == ["a", 1, " b"]
        assert self.split("a <r> \tb", right) == ["a ", 2, "b"]
        assert self.split("<r>  <l>", left, right) == [2, 1]

    def test_families_that_let_tokens_swallow_white_space(self) -> None:
        kinds = (3, 3, 3)
        tokens = ("<|user|>", "<s>", "<mask>")
        a, space = (BYTE_CHARACTERS.index(c) for c in "a\u0120")
        phi3 = Tokenizer.from_metadata(
            {**byte_vocab(*tokens, kinds=kinds), "general.name": "My Phi-3 Mini"}
        )
        assert phi3.encode("a <|user|> \na<s> a") == [a, space, 256, a, 257, space, a]
        jina = Tokenizer.from_metadata(byte_vocab(*tokens, kinds=kinds, pre="jina-v2-de"))
        assert jina.encode("a <|user|> a \t<mask> a") == [a, space, 256, space, a, 258, space, a]

    @given(st.text("ab<>", max_size=30), st.lists(st.text("ab<>", min_size=1, max_size=4)))
    @settings(deadline=None)
    def test_like_looking_for_one_token_after_the_other(self, text: str, texts: list[str]) -> None:
        tokens = [SpecialToken(i, t, False) for i, t in enumerate(dict.fromkeys(texts))]
        expected: list[str | int] = [text] if text else []
        for token in sorted(tokens, key=lambda token: -len(token.text)):
            parts: list[str | int] = []
            for piece in expected:
                if isinstance(piece, int):
                    parts.append(piece)
                    continue
                for number, part in enumerate(piece.split(token.text)):
                    parts += [token.id] if number else []
                    parts += [part] if part else []
            expected = parts
        assert self.split(text, *tokens) == expected

    def test_many_tokens_in_a_long_text(self) -> None:
        tokens = [SpecialToken(i, f"<unused{i}>", False) for i in range(3000)]
        special = SpecialTokens(tokens)
        text = "".join(token.text + "x" for token in tokens)
        assert special.split(text, True)[:3] == [0, "x", 1]
        assert _seconds(lambda: special.split(text, True)) < 5
        assert _seconds(lambda: special.split("plain text " * 1000, True)) < 0.05


class TestEnds:
    """Which tokens end a generation."""

    def ends(self, *texts: str, **changes: Any) -> set[str]:
        tokenizer = Tokenizer.from_metadata(byte_vocab(*texts, **changes))
        return {tokenizer.token_text(id) for id in tokenizer.eog_ids}

    def test_by_their_text_and_by_the_file(self) -> None:
        texts = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "qq")
        assert self.ends(*texts) == {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>"}
        assert self.ends("qq", "rr", "ss", eos_token_id=256, eot_token_id=257) == {"qq", "rr"}
        assert self.ends("<|repo_name|>", "<|fim_pad|>", "<|fim_prefix|>") == {
            "<|repo_name|>",
            "<|fim_pad|>",
        }

    def test_a_message_of_several_does_not_end_the_turn(self) -> None:
        texts = ("<|end|>", "<|return|>", "<|call|>", "<|channel|>")
        assert self.ends(*texts) == {"<|return|>", "<|call|>"}
        tokenizer = Tokenizer.from_metadata(byte_vocab(*texts, kinds=(3, 3, 3, 3)))
        assert not tokenizer.is_special(256) and not tokenizer.is_special(259)
        assert tokenizer.encode("<|end|>", parse_special=False) == [256]
        assert self.ends("</s>", "<|tool_response>") == {"<|tool_response>"}
        assert self.ends("</s>") == {"</s>"}

    def test_become_control_tokens(self) -> None:
        tokenizer = Tokenizer.from_metadata(byte_vocab("<|im_end|>", kinds=(1,)))
        assert tokenizer.is_special(256)
        assert tokenizer.encode("<|im_end|>") == [256]
        assert 256 not in tokenizer.encode("<|im_end|>", parse_special=False)


class TestBadVocabularies:
    """Files are not trusted: what they say is used as it is, or refused by name."""

    @pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "nonsense", None, 5])
    def test_kinds_that_are_not_supported(self, kind: Any) -> None:
        with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model is .*gpt2.*llama"):
            Tokenizer.from_metadata(byte_vocab(model=kind), name="x.gguf")

    def test_unknown_pre_tokenizer(self) -> None:
        with pytest.raises(TokenizerError, match=r"'zebra', which is not known.*llama-bpe.*qwen2"):
            Tokenizer.from_metadata(byte_vocab(pre="zebra"))
        with pytest.raises(TokenizerError, match="must be a string"):
            Tokenizer.from_metadata(byte_vocab(pre=7))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokens": None}, "tokens must be a list of strings, it is missing"),
            ({"tokens": "abc"}, "tokens must be a list of strings"),
            ({"tokens": [1, 2]}, "strings only"),
            ({"tokens": [], "token_type": None}, "tokens is empty"),
            ({"tokens": ["a", "b\udcff"], "token_type": None}, "string 1 of .* not valid UTF-8"),
            ({"tokens": ["a", "b", "a"], "token_type": None}, "tokens 0 and 2 .* same text 'a'"),
            ({"merges": None}, "merges must be a list of strings, it is missing"),
            ({"merges": [5]}, "strings only"),
            ({"token_type": [1] * 255}, "token_type has 255 entries for 256 tokens"),
            ({"token_type": [1] * 257}, "token_type has 257 entries for 256 tokens"),
            ({"token_type": [1] * 255 + [77]}, "type of token 255 is 77"),
            ({"token_type": [-1] * 256}, "type of token 0 is -1"),
            ({"token_type": ["a"] * 256}, "token_type must be a list of numbers"),
            ({"token_type": [1] * 255 + [6]}, "token 255 is marked as a byte"),
            ({"bos_token_id": 256}, "bos_token_id is 256, but there are 256 tokens"),
            ({"eos_token_id": -7}, "eos_token_id is -7"),
            ({"eot_token_id": 2**40}, "eot_token_id is"),
            ({"fim_pad_token_id": 999}, "fim_pad_token_id is 999"),
            ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
            ({"eos_token_id": True}, "eos_token_id must be a token id"),
            ({"add_bos_token": True}, "add_bos_token is true, but there is no"),
            ({"add_eos_token": 1}, "add_eos_token must be true or false"),
        ],
    )
    def test_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(TokenizerError, match=rf"x\.gguf: .*{message}"):
            Tokenizer.from_metadata(byte_vocab(**changes), name="x.gguf")

    @pytest.mark.parametrize(
        "text", ["<0x-1>", "<0xZZ>", "<0x1>", "<0x 1>", "<0x0\u0661>", "", "x"]
    )
    def test_byte_tokens(self, text: str) -> None:
        tokens = {"model": "llama", "tokens": ["a", text], "token_type": [1, 6]}
        with pytest.raises(TokenizerError, match="token 1 is marked as a byte"):
            Tokenizer.from_metadata(metadata(tokens))

    @pytest.mark.parametrize("score", [float("nan"), float("inf")])
    def test_scores(self, score: float) -> None:
        tokens = {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, score]}
        with pytest.raises(TokenizerError, match="scores must be finite"):
            Tokenizer.from_metadata(metadata(tokens))
        with pytest.raises(TokenizerError, match="scores has 1 entries for 2 tokens"):
            Tokenizer.from_metadata(metadata(tokens, scores=np.zeros(1, dtype=np.float32)))

    def test_what_is_tolerated(self) -> None:
        tokenizer = Tokenizer.from_metadata(
            byte_vocab("", "", bos_token_id=0xFFFFFFFF, eos_token_id=-1, pre="llama-bpe")
        )
        assert tokenizer.bos is None and tokenizer.eos is None and not tokenizer.add_bos
        assert tokenizer.token_bytes(257) == b""  # empty texts pad a vocabulary
        assert tokenizer.decode(tokenizer.encode("x y")) == "x y"

    def test_a_vocabulary_that_cannot_write_a_byte(self) -> None:
        tokens = {"model": "llama", "tokens": ["<unk>", "a"]}
        tokenizer = Tokenizer.from_metadata(metadata(tokens, add_space_prefix=False))
        assert tokenizer.encode("ab", add_special=False) == [1, 0]  # 0: the unknown token

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_random_vocabularies_never_hang_or_crash(self, data: st.DataObject) -> None:
        texts = st.text("ab\u2581<>0x1\n \u0120", max_size=4)
        tokens = data.draw(st.lists(texts, min_size=1, max_size=20))
        kinds = data.draw(st.lists(st.integers(0, 7), min_size=len(tokens), max_size=len(tokens)))
        merges = data.draw(st.lists(st.text("ab \u0120", max_size=5), max_size=10))
        model = data.draw(st.sampled_from(["gpt2", "llama", "gemma4"]))
        fields = {"model": model, "tokens": tokens, "token_type": kinds, "merges": merges}
        try:
            tokenizer = Tokenizer.from_metadata(metadata(fields))
        except TokenizerError:
            return
        try:
            ids = tokenizer.encode(data.draw(st.text("ab <>0x1\n", max_size=20)))
        except TokenizerError as error:
            assert "no token for byte" in str(error)
            return
        tokenizer.decode(ids)


class TestCharacters:
    """The table of character classes."""

    def test_agrees_with_the_interpreter_where_both_know_the_character(self) -> None:
        table = characters.stand_ins()
        names = {stand_in: kind for kind, stand_in in characters.STAND_INS.items()}
        assert len(table) == characters.N_CODE_POINTS
        for code in range(128, characters.N_CODE_POINTS):
            category = unicodedata.category(chr(code))
            kind = names[table[code]]
            if category == "Cn" or kind in "OU":
                continue  # assigned in a version of Unicode that only one of them knows
            if kind == "W":
                assert chr(code).isspace()
            else:
                assert category[0] == ("L" if kind == "H" else kind), hex(code)

    def test_only_late_characters_are_unknown(self) -> None:
        table = characters.stand_ins()
        unknown = [
            code
            for code in range(128, 0x30000)
            if table[code] in (characters.STAND_INS["O"], characters.STAND_INS["U"])
            and unicodedata.category(chr(code))[0] in "LNPSM"
            and not _is_newer_than_the_table()
        ]
        assert unknown == []


def _is_newer_than_the_table() -> bool:
    return tuple(map(int, unicodedata.unidata_version.split("."))) > (15, 1, 0)


class TestHuggingFace:
    """Folders with a tokenizer.json."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        library = pytest.importorskip("tokenizers")
        tokens = {text: id for id, text in enumerate(BPE["tokens"][:1100])}
        merges = [tuple(pair.split(" ")) for pair in BPE["merges"]]
        tokenizer = library.Tokenizer(library.models.BPE(tokens, merges))
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        tokenizer.add_tokens(["<tool>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages }}"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1100]}))
        return tmp_path

    def test_the_same_interface(self, folder: Path) -> None:
        ours = Tokenizer.from_metadata(metadata(BPE, pre="gpt-2"))
        for tokenizer in (Tokenizer.from_hf(folder), Tokenizer(folder)):
            assert tokenizer.n_vocab == 1104
            assert tokenizer.eos == 1102 and tokenizer.bos is None
            assert tokenizer.eog_ids == {1100, 1102}
            assert not tokenizer.add_bos and not tokenizer.add_eos
            assert tokenizer.chat_template == "{{ messages }}"
            text = "Hello, it's 世界 <|im_start|>"
            ids = tokenizer.encode(text)
            assert ids == ours.encode(text)
            assert tokenizer.encode(text, parse_special=False) == ours.encode(text, False, False)
            assert tokenizer.decode(ids) == text
            assert [tokenizer.token_bytes(i) for i in ids] == [ours.token_bytes(i) for i in ids]
            assert tokenizer.is_special(1101) and not tokenizer.is_special(1103)
            with pytest.raises(TokenizerError, match="outside the vocabulary"):
                tokenizer.token_bytes(1104)

    def test_bad_folders(self, folder: Path, tmp_path: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
        with pytest.raises(TokenizerError, match="eos_token_id is 99999"):
            Tokenizer.from_hf(folder)
        (folder / "tokenizer_config.json").write_text("[")
        with pytest.raises(TokenizerError, match="not JSON"):
            Tokenizer.from_hf(folder)
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(TokenizerError, match="not a tokenizer"):
            Tokenizer.from_hf(folder)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(TokenizerError, match=r"there is no tokenizer\.json"):
            Tokenizer.from_hf(folder)

    @pytest.mark.skipif(not (SHARED / "models").is_dir(), reason="no models beside the repository")
    def test_golden_prompts(self) -> None:
        folder = SHARED / "models" / "tiny-dense"
        tokenizer = Tokenizer.from_hf(folder)
        prompts = json.loads((folder / "golden.json").read_text())["prompts"]
        for prompt in prompts:
            assert tokenizer.encode(prompt["text"]) == prompt["token_ids"]
            assert tokenizer.decode(prompt["token_ids"]) == prompt["text"]
        assert tokenizer.eog_ids


def test_words_are_cached_but_not_without_end() -> None:
    vocab = read_vocab(byte_vocab("ab"), "x", {})
    pairs = BytePairs(vocab, ["a b"], PRE_TOKENIZERS["gpt-2"])
    for _ in range(3):
        list(pairs.encode(" ".join(f"w{n}" for n in range(40_000))))
        list(pairs.encode("".join(random.Random(1).choices("ab", k=1000))))
    assert 0 < len(pairs._cache) <= 1 << 16
    assert max(map(len, pairs._cache)) <= 64


def _seconds(call: Any) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
