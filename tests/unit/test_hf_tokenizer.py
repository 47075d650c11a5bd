"""tokenizer.json: the ids and texts that the `tokenizers` library gives, or a refusal by name."""

from __future__ import annotations

import copy
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import TokenizerError
from quire.text.hf_patterns import LAST_SPACES, PARTIAL, TOTAL
from quire.text.tokenizer import Tokenizer
from quire.text.variants import CASED_LETTERS
from quire.weights.gguf import GGUF

library = pytest.importorskip("tokenizers")

MODELS = Path(__file__).parents[1] / "data" / "models"
MARK = "\u2581"
EXAMPLES = 50
BASE: dict[str, Any] = json.loads((MODELS / "tiny-dense" / "tokenizer.json").read_text())
LLAMA3, QWEN2, QWEN35 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + rest
    for rest in (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    )
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{CASED_LETTERS}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
)  # fmt: skip


def byte_level(**fields: Any) -> dict[str, Any]:
    usual = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "ByteLevel", **usual, **fields}


def split(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def sequence(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}


def before(*parts: dict[str, Any]) -> dict[str, Any]:
    return sequence("pretokenizers", *parts)


def added(text: str, id: int, **flags: bool) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": text, **usual, "special": True, **flags}


def template(token: str, id: int) -> dict[str, Any]:
    single = [
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "type": "TemplateProcessing", "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }  # fmt: skip


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


MARKS_DECODER = (replace(MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"})
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@cache
def pieces() -> dict[str, Any]:
    """A vocabulary as SentencePiece makes them: characters, bytes to fall back to, merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = library.trainers.BpeTrainer(
        vocab_size=1200, special_tokens=tokens, show_progress=False, limit_alphabet=70
    )
    made = library.Tokenizer(library.models.BPE(byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = library.pre_tokenizers.Metaspace()
    made.train_from_iterator([(MODELS / "validation.txt").read_text()[:60_000]], trainer)
    out: dict[str, Any] = json.loads(made.to_str())
    out["model"]["unk_token"] = "<unk>"
    out["added_tokens"] = [added(text, id) for id, text in enumerate(tokens[:3])]
    return out


def shape(base: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A file with other parts; `more` are tokens behind the vocabulary, `model` some settings."""
    file = copy.deepcopy(base)
    size = len(file["model"]["vocab"])
    more = parts.pop("more", [])
    file["added_tokens"] += [added(text, size + i, **flags) for i, (text, flags) in enumerate(more)]
    file["model"] |= parts.pop("model", {})
    return file | parts


MORE = [
    ("<|eot|>", {}), ("<|eot_id|>", {}), ("<tool>", {"special": False}),
    ("<think>", {"special": False, "normalized": True}), ("caf\u00e9!", {"special": False}),
    ("e\u0301t", {"special": False, "normalized": True}),
    ("<\uff5cend\u2581of\uff5c>", {}),
]  # fmt: skip
SPACES = [(" " * n, {"special": False, "normalized": True}) for n in range(24, 1, -1)]
SWALLOWING = [("<l>", {"lstrip": True}), ("<r>", {"rstrip": True}),
              ("<b>", {"lstrip": True, "rstrip": True, "normalized": True})]  # fmt: skip
NFC = {"type": "NFC"}
EVERY_BYTE = byte_level()


def shapes() -> dict[str, dict[str, Any]]:
    """Files in the shapes of the models that are read here."""
    llama2 = sequence("normalizers", {"type": "Prepend", "prepend": MARK}, replace(" ", MARK))
    metaspace = {"type": "Metaspace", "replacement": MARK}
    made = sequence("decoders", *MARKS_DECODER)
    stripped = sequence("decoders", *MARKS_DECODER, STRIP)
    return {
        "as it is": BASE,
        "gpt-2": shape(BASE, pre_tokenizer=byte_level(use_regex=True), more=MORE),
        "prefix space": shape(
            BASE, pre_tokenizer=byte_level(use_regex=True, add_prefix_space=True), more=MORE
        ),
        "llama 3": shape(
            BASE, pre_tokenizer=before(split(LLAMA3), EVERY_BYTE), more=MORE,
            model={"ignore_merges": True},
            post_processor=sequence(
                "processors", byte_level(), template("<|endoftext|>", 0)
            ),
        ),
        "qwen": shape(
            BASE, normalizer=NFC, pre_tokenizer=before(split(QWEN2), EVERY_BYTE), more=MORE
        ),
        "qwen 3.5": shape(
            BASE, normalizer=NFC, pre_tokenizer=before(split(QWEN35), EVERY_BYTE), more=MORE
        ),
        "smollm": shape(
            BASE, pre_tokenizer=before(
                {"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)
            ),
        ),
        "mamba": shape(
            BASE, normalizer=NFC, pre_tokenizer=byte_level(use_regex=True), more=SPACES
        ),
        "tekken": shape(BASE, pre_tokenizer=before(split(TEKKEN), EVERY_BYTE)),
        "o200k": shape(BASE, pre_tokenizer=before(split(O200K), EVERY_BYTE)),
        "cl100k": shape(BASE, pre_tokenizer=before(split(CL100K, "Removed", True), EVERY_BYTE)),
        "deepseek": shape(
            BASE, pre_tokenizer=before(*map(split, DEEPSEEK), EVERY_BYTE), more=MORE
        ),
        "deepseek llm": shape(
            BASE, pre_tokenizer=before(
                *map(split, DEEPSEEK_LLM), {"type": "Digits", "individual_digits": True},
                EVERY_BYTE,
            ),
        ),
        "swallowing": shape(BASE, more=SWALLOWING),
        "unknown": shape(
            BASE, model={"unk_token": "<|endoftext|>", "fuse_unk": True, "vocab": {
                t: id for t, id in BASE["model"]["vocab"].items() if t not in "\u0120\u00e3"
            }, "merges": []}, added_tokens=[],
        ),
        "gemma": shape(
            pieces(), normalizer=replace(" ", MARK), decoder=made, more=MORE,
            pre_tokenizer={"type": "Split", "pattern": {"String": " "},
                           "behavior": "MergedWithPrevious", "invert": False},
            post_processor=template("<s>", 1),
        ),
        "llama 2": shape(
            pieces(), normalizer=llama2, pre_tokenizer=None, decoder=stripped, more=MORE
        ),
        "metaspace first": shape(
            pieces(), pre_tokenizer={**metaspace, "prepend_scheme": "first", "split": False},
            decoder=stripped, more=SWALLOWING,
        ),
        "metaspace always": shape(
            pieces(), pre_tokenizer={**metaspace, "prepend_scheme": "always", "split": True},
            decoder={**metaspace, "prepend_scheme": "always", "split": True},
        ),
        "metaspace never": shape(
            pieces(), pre_tokenizer={**metaspace, "prepend_scheme": "never"},
            decoder={**metaspace, "prepend_scheme": "never", "split": True},
        ),
    }  # fmt: skip


SHAPES = shapes()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Our tokenizer and the library's, and the library's that takes special tokens for text."""

    @cache
    def of(name: str) -> tuple[Tokenizer, Any, Any]:
        folder = tmp_path_factory.mktemp("tokenizer")
        text = json.dumps(SHAPES[name])
        (folder / "tokenizer.json").write_text(text)
        theirs, plain = (library.Tokenizer.from_str(text) for _ in range(2))
        plain.encode_special_tokens = True
        return Tokenizer(folder), theirs, plain

    return of


PARTS = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\u3000", "\xa0", "\x85", "\x1c", MARK, "'s", "'\u017f", "'LL",
     "'Re", "1", "12", "1234567", "\u0663", "\u00bd", "Hello", "world", "AbCd", "\u01c5", "\u02b0",
     "\u00c9cole", "caf\u00e9!", "cafe\u0301!", "e\u0301t", "\u00e9t", "\u4e16\u754c", "\u3042",
     "\ud55c", "\u1112\u1161\u11ab", "\U0001f642", "!?", "/", "_", "...", "<|eot|>", "<|eot_id|>",
     "<|eot", "<tool>", "<think>", "<l>", "<r>", "<b>", "<s>", "</s>", "<unk>", "<0x0A>",
     "<|endoftext|>", "<|im_start|>", "<\uff5cend\u2581of\uff5c>", "\u0301", "\u0489", "\x00",
     "\u200b", "\ufffd", "$=+"]
)  # fmt: skip
CHARACTERS = st.characters(exclude_categories=["Cs", "Cn"])
TEXTS = st.lists(PARTS | CHARACTERS | st.text(CHARACTERS, max_size=6), max_size=14).map("".join)


class TestSameAsTheLibrary:
    @pytest.mark.parametrize("name", SHAPES)
    def test_texts(self, name: str, pairs: Any) -> None:
        ours, theirs, plain = pairs(name)

        @given(TEXTS)
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        def check(text: str) -> None:
            for add_special in (False, True):
                ids = theirs.encode(text, add_special_tokens=add_special).ids
                assert ours.encode(text, add_special) == ids
                assert ours.encode(text, add_special, False) == (
                    plain.encode(text, add_special_tokens=add_special).ids
                )
            for skip in (False, True):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)

        check()

    @pytest.mark.parametrize("name", SHAPES)
    def test_any_ids_are_decoded_alike(self, name: str, pairs: Any) -> None:
        ours, theirs, _ = pairs(name)
        # Of bytes that make no character, the library makes more U+FFFD than Python does.
        fallback = SHAPES[name]["model"]["byte_fallback"]
        tokens = range(3 + 256 * fallback, ours.n_vocab)

        @given(st.lists(st.sampled_from(tokens), max_size=12))
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        def check(ids: list[int]) -> None:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)

        check()

    @pytest.mark.parametrize("name", ["as it is", "llama 3", "smollm", "gemma", "llama 2"])
    def test_a_long_text(self, name: str, pairs: Any) -> None:
        ours, theirs, _ = pairs(name)
        text = (MODELS / "validation.txt").read_text()
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, True) == theirs.decode(ids)

    @pytest.mark.parametrize("regex", [*TOTAL, *PARTIAL])
    def test_every_known_pattern(self, regex: str) -> None:
        from quire.text.pretokenize import PreTokenizer, WordSplitter

        theirs = library.pre_tokenizers.Split(library.Regex(regex), "isolated")
        ours = WordSplitter(PreTokenizer(((TOTAL | PARTIAL)[regex],), cased=True))

        @given(TEXTS)
        @settings(max_examples=EXAMPLES // 2, deadline=None)
        def check(text: str) -> None:
            assert ours.split(text) == [word for word, _ in theirs.pre_tokenize_str(text)]

        check()

    def test_every_character_has_its_class(self) -> None:
        from quire.text.pretokenize import PreTokenizer, WordSplitter

        text = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
        parts = [text[at : at + 4096] for at in range(0, len(text), 4096)]  # a long one takes long
        for name in ("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "P", "S"):
            regex = rf"\p{{{name}}}"
            theirs = library.pre_tokenizers.Split(library.Regex(regex), "removed", invert=True)
            ours = WordSplitter(PreTokenizer((rf"{regex}",), cased=True))
            known = {word for part in parts for word, _ in theirs.pre_tokenize_str(part)}
            found = ours.split(text)
            assert {word for word in found if word in known} == known
            assert not known.intersection(w for w in found if len(w) > 1)

    @pytest.mark.parametrize("folder", sorted(p.name for p in MODELS.glob("tiny-*")))
    def test_the_models_here(self, folder: str) -> None:
        ours = Tokenizer(MODELS / folder)
        theirs = library.Tokenizer.from_file(str(MODELS / folder / "tokenizer.json"))
        text = (MODELS / "validation.txt").read_text()[:40_000]
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "tokenizers"


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no vocabularies beside the repository")
@pytest.mark.parametrize(
    ("name", "regex"), [("llama-bpe", LLAMA3), ("qwen2", QWEN2), ("gpt-2", "")]
)
def test_whole_vocabularies(name: str, regex: str, tmp_path: Path) -> None:
    """Real ones, written as a tokenizer.json: the library's ids, and as quickly built."""
    with GGUF.open(GOLDEN / f"ggml-vocab-{name}.gguf") as file:
        tokens = file.get_strings("tokenizer.ggml.tokens")
        kinds = file.get_array("tokenizer.ggml.token_type")
        merges = file.get_strings("tokenizer.ggml.merges")
    size = next(i for i in range(len(tokens), 0, -1) if kinds[i - 1] == 1)
    vocab = {text: id for id, text in enumerate(tokens[:size])}
    extra = [added(text, id) for id, text in enumerate(tokens[size:], size)]
    steps = before(split(regex), EVERY_BYTE) if regex else byte_level(use_regex=True)
    model = {"vocab": vocab, "merges": merges, "ignore_merges": name == "llama-bpe"}
    text = json.dumps(shape(BASE, added_tokens=extra, pre_tokenizer=steps, model=model))
    (tmp_path / "tokenizer.json").write_text(text)
    start = time.process_time()
    ours = Tokenizer(tmp_path)
    took = time.process_time() - start
    theirs = library.Tokenizer.from_str(text)
    assert took < 4  # 0.6 on an idle machine, as long as the library takes
    texts = (GOLDEN / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode()
    for sample in (
        texts,
        (MODELS / "validation.txt").read_text()[:50_000],
        "<|eot_id|>".join("ab"),
    ):
        ids = theirs.encode(sample).ids
        assert ours.encode(sample) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    tokens = {f"t{i}": i for i in range(150_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(shape(
        BASE, added_tokens=[], model={"vocab": tokens, "merges": []}
    )))  # fmt: skip
    start = time.process_time()
    Tokenizer(tmp_path)
    assert time.process_time() - start < 2  # 0.3 on an idle machine
    assert LAST_SPACES[0] not in TOTAL | PARTIAL  # it is known behind the split of lines only


class TestRefused:
    """What is not known is named, and nothing of it is run."""

    def refused(self, folder: Path, file: Any, match: str) -> None:
        text = file if isinstance(file, str) else json.dumps(file)
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match=match) as caught:
            Tokenizer(folder)
        assert "tokenizer.json" in str(caught.value)
        assert len(str(caught.value)) < 700

    @pytest.mark.parametrize(
        ("model", "match"),
        [
            ({"continuing_subword_prefix": "a"}, "continuing_subword_prefix is 'a'"),
            ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
            ({"dropout": 0.1}, "dropout is '0.1'"),
            ({"type": "WordPiece"}, "'WordPiece'.*must be BPE"),
            ({"type": "Unigram"}, "'Unigram'"),
            ({"type": 5}, "type"),
            ({"vocab": {}}, "0 tokens"),
            ({"vocab": []}, "vocab is a list"),
            ({"vocab": {"a": 0, "b": 0}, "merges": []}, "same id"),
            ({"vocab": {"a": -1}, "merges": []}, "from -1"),
            ({"vocab": {"a": 2**40}, "merges": []}, "ids go from"),
            ({"vocab": {"a": 1.5}, "merges": []}, "whole numbers"),
            ({"vocab": {"a": True}, "merges": []}, "whole numbers"),
            ({"vocab": {"\ud800": 1}, "merges": []}, "Unicode"),
            ({"vocab": {"a" * 5000: 1}, "merges": []}, "4096 characters"),
            ({"vocab": {"a": 0, "b": 4}, "merges": []}, "has the id"),
            ({"merges": ["a"]}, "merge 0"),
            ({"merges": ["a b c"]}, "merge 0"),
            ({"merges": [["a", "zzzz"]]}, "merge 0"),
            ({"merges": [["a", ["b"]]]}, "merge 0"),
            ({"merges": [5]}, "merge 0"),
            ({"merges": "a b"}, "merges"),
            ({"unk_token": "nowhere"}, "unk_token 'nowhere' is not in the vocabulary"),
            ({"byte_fallback": True}, "no token <0x00>"),
            ({"surprise": 1}, "'surprise'"),
        ],
    )
    def test_models(self, tmp_path: Path, model: Any, match: str) -> None:
        self.refused(tmp_path, shape(BASE, model=model), match)

    @pytest.mark.parametrize(
        ("parts", "match"),
        [
            ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
             "'Precompiled': is not known"),
            ({"normalizer": sequence("normalizers", *[replace("a", "aaaaaaaaaa")] * 20)}, "String"),
            ({"normalizer": sequence("normalizers", *[replace(" ", MARK)] * 2)}, "once"),
            ({"normalizer": {"type": "Lowercase"}}, "'Lowercase'"),
            ({"normalizer": sequence("normalizers", *[NFC] * 100)}, "more than 32 parts"),
            ({"pre_tokenizer": before(split("(a+)+b"), EVERY_BYTE)}, r"\(a\+\)\+b' is not one"),
            ({"pre_tokenizer": before(split(r"\s+$"), EVERY_BYTE)}, "not one of those"),
            ({"pre_tokenizer": before(split(r"\p{N}", "Removed"), EVERY_BYTE)}, "Removed"),
            ({"pre_tokenizer": split(LLAMA3)}, "must end in a ByteLevel"),
            ({"pre_tokenizer": before(EVERY_BYTE, EVERY_BYTE)}, "must be last"),
            ({"pre_tokenizer": {"type": "Whitespace"}}, "'Whitespace'"),
            ({"pre_tokenizer": None}, "both be ByteLevel"),
            ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, "replacement"),
            ({"pre_tokenizer": []}, "must be an object"),
            ({"decoder": None}, "decoder is 'missing'"),
            ({"decoder": {"type": "WordPiece"}}, "'WordPiece'"),
            ({"decoder": sequence("decoders", STRIP)}, "the decoder is 'Strip'"),
            ({"decoder": {"type": "Strip", "content": " ", "start": 10**9, "stop": 0}}, "start"),
            ({"post_processor": template("<|endoftext|>", 5)}, "not those of the vocabulary"),
            ({"post_processor": template("nowhere", 5)}, "not those of the vocabulary"),
            ({"post_processor": {"type": "BertProcessing"}}, "'BertProcessing'"),
            ({"added_tokens": [added("<x>", 10**9)]}, "due is 4096"),
            ({"added_tokens": [added("<x>", -1)]}, "due is 4096"),
            ({"model": {"vocab": {"a": 0, "b": 2}, "merges": []},
              "added_tokens": [added("<x>", 2)]}, "has the id '2'"),
            ({"added_tokens": [added("<x>", 4096), added("<y>", 4096)]}, "due is 4097"),
            ({"added_tokens": [added("<x>", 4096), added("<x>", 4097)]}, "twice"),
            ({"added_tokens": [added("", 4096)]}, "0 characters"),
            ({"added_tokens": [added("<x>", 4096, single_word=True)]}, "single_word"),
            ({"added_tokens": [added(" ", 4096), added("<x>", 4097, rstrip=True)]}, "swallow"),
            ({"added_tokens": [added("a" * n, 4094 + n) for n in range(2, 400)]}, "begin alike"),
            ({"added_tokens": [7]}, "token 0 must be an object"),
            ({"more_to_come": 1}, "'more_to_come'"),
        ],
    )  # fmt: skip
    def test_parts(self, tmp_path: Path, parts: dict[str, Any], match: str) -> None:
        self.refused(tmp_path, shape(BASE, **parts), match)

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("{}", "no model"), ("[]", "must be an object"), ("[" * 100_000, "not JSON"),
            ('{"model": 1, "model": 2}', "twice"), ("", "not JSON"), ("1" * 9999, "not"),
            ("[" + "1," * 9_000_000 + "1]", "values"),
        ],
    )  # fmt: skip
    def test_other_files(self, tmp_path: Path, text: str, match: str) -> None:
        self.refused(tmp_path, text, match)

    def test_ids_that_the_model_has_not(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"vocab_size": 4000}')
        self.refused(tmp_path, BASE, "has the id 4095, but the model has 4000 tokens")

    def test_an_added_token_that_the_model_has_not(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"vocab_size": 4096}')
        file = shape(BASE, more=[("<image>", {})])
        (tmp_path / "tokenizer.json").write_text(json.dumps(file))
        tokenizer = Tokenizer(tmp_path)
        assert tokenizer.decode(tokenizer.encode("some text")) == "some text"
        with pytest.raises(TokenizerError, match="'<image>' in the text is token 4096"):
            tokenizer.encode("an <image>")
