"""The vocabulary of a Hugging Face folder as the metadata of a GGUF file.

Such a file names its way to split text, and knows no other. So what is written is read again, and
must give the same ids for texts that tell the ways apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from quire.errors import TokenizerError
from quire.text.hf import HFEncoder
from quire.text.hf_file import TokenizerFile
from quire.text.pretokenize import PreTokenizer, WordSplitter
from quire.text.tokenizer import Tokenizer
from quire.text.variants import PRE_TOKENIZERS
from quire.text.vocab import Kind, byte_of
from quire.weights.folder import read_beside

_PROBES: Final = (
    "Hello world! It's John's, WE'LL see; I'd say 'twas they'VE who've 12 1234567 3.14 x2y",
    "three\n\n\n \t ",
    "a  b   c    d\n  indented\r\n\tTab \n \n x=y+z; foo_bar(baz)//http://a.b/c?d=e&f#g \n",
    "déjà vu Überraschung ÀÉ ñandú Привет мир Ελληνικά שלום مرحبا नमस्ते 你好世界",
    "こんにちは 안녕하세요 １２３ ½ ² ₂ 🙂🙃👩\u200d👩\u200d👧 ﬁ",
    "— “quotes” … €100 $5.00 %x @y #z ^_^ <tag> {a:[1]} ~`|\\ \u00a0x\u3000y",
    "camelCase HTTPServer ABCdef 0x1F 1,000,000.50 2024-01-31T12:00:00Z don't DON'T",
    "   leading and trailing   ",
    "a",
)
# One name for each way to split, those first that many models have.
_COMMON: Final = ("qwen2", "llama-bpe", "gpt-2", "smollm", "gpt-4o", "tekken", "deepseek-v3")


def gguf_vocabulary(folder: Path, architecture: str, n_tokens: int) -> dict[str, Any]:
    """Metadata under GGUF's keys; refuses a tokenizer that no such metadata can say."""
    encoder = HFEncoder(folder)
    whole = _tokens(encoder, n_tokens)
    merges = _merges(folder)
    if _has_marks(encoder.file):
        ways = _sentencepiece(encoder, merges, n_tokens)
    else:
        ways = _byte_pairs(encoder.file, merges, architecture)
    original = Tokenizer.from_hf(folder)
    for way in ways:
        metadata = _with_ends({**whole, **way}, original)
        if metadata is not None and _agrees(original, metadata):
            return metadata
    raise TokenizerError(
        f"{folder / 'tokenizer.json'}: no GGUF file can say how it splits text, so the model can "
        "only be run from its folder"
    )


def _has_marks(file: TokenizerFile) -> bool:
    """Whether spaces are written as marks, and not as bytes."""
    return not isinstance(file.words, PreTokenizer)


def _tokens(encoder: HFEncoder, n_tokens: int) -> dict[str, Any]:
    """All tokens with their kinds, those of the model that have no text too."""
    texts = [f"[PAD{i}]" for i in range(n_tokens)]
    kinds = np.full(n_tokens, Kind.UNUSED, np.int32)
    for text, id in encoder.file.pairs.ids.items():
        texts[id] = text
        is_byte = _has_marks(encoder.file) and byte_of(text) is not None
        kinds[id] = Kind.BYTE if is_byte else Kind.NORMAL
    for token in encoder.file.added:
        if token.id < n_tokens:
            texts[token.id] = token.text
            kinds[token.id] = Kind.CONTROL if token.special else Kind.USER_DEFINED
    found: dict[str, Any] = {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": encoder.add_bos,
        "tokenizer.ggml.add_eos_token": encoder.add_eos,
    }
    for role, known in (("bos", encoder.bos), ("eos", encoder.eos)):
        if known is not None:
            found[f"tokenizer.ggml.{role}_token_id"] = known
    if encoder.chat_template is not None:
        found["tokenizer.chat_template"] = encoder.chat_template
    return found


def _merges(folder: Path) -> list[str]:
    """The merges in their order, each as one text; the file was read and checked before."""
    text = read_beside(folder, "tokenizer.json") or b""
    return [m if isinstance(m, str) else " ".join(m) for m in json.loads(text)["model"]["merges"]]


def _byte_pairs(file: TokenizerFile, merges: list[str], architecture: str) -> list[dict[str, Any]]:
    """Every known way to split that gives the same words."""
    words = file.words
    assert isinstance(words, PreTokenizer)
    wanted = [WordSplitter(words).split(text) for text in _PROBES]
    names = [name for name in (architecture, *_COMMON, *PRE_TOKENIZERS) if name in PRE_TOKENIZERS]
    return [
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name,
         "tokenizer.ggml.merges": merges}
        for name in dict.fromkeys(names)
        if [WordSplitter(PRE_TOKENIZERS[name]).split(text) for text in _PROBES] == wanted
    ]  # fmt: skip


def _sentencepiece(encoder: HFEncoder, merges: list[str], n_tokens: int) -> list[dict[str, Any]]:
    """Scores in the order of the merges: whoever is made first is joined first."""
    ids = encoder.file.pairs.ids
    scores = np.full(n_tokens, -1e6, np.float32)
    for rank, merge in reversed(list(enumerate(merges))):
        scores[ids[merge.replace(" ", "", 1)]] = -rank
    unknown = encoder.file.pairs.unknown
    role = {} if unknown is None else {"tokenizer.ggml.unknown_token_id": unknown}
    return [
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores,
         "tokenizer.ggml.add_space_prefix": prefix, **role}
        for prefix in (encoder.space_prefix, not encoder.space_prefix)
    ]  # fmt: skip


def _with_ends(metadata: dict[str, Any], original: Tokenizer) -> dict[str, Any] | None:
    """With roles for the ends of generation that a file does not know by their text."""
    missing = sorted(original.eog_ids - Tokenizer.from_metadata(metadata).eog_ids)
    roles = ("eot", "eom")
    if len(missing) > len(roles):
        return None
    ends = zip(roles, missing, strict=False)
    return metadata | {f"tokenizer.ggml.{role}_token_id": id for role, id in ends}


def _agrees(original: Tokenizer, metadata: dict[str, Any]) -> bool:
    made = Tokenizer.from_metadata(metadata)
    specials = "".join(original.token_text(id) for id in sorted(original.eog_ids))
    texts = [*_PROBES, f"x{specials} y"]
    if metadata["tokenizer.ggml.model"] == "llama":
        # Such files put a space before texts and behind special tokens, whatever a folder says.
        texts = [text for text in _PROBES if not text.startswith(" ")]
    same = all(original.encode(text) == made.encode(text) for text in texts)
    return same and original.eog_ids <= made.eog_ids
