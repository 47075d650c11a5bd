"""Text to token ids and back, by the vocabulary that comes with a model."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from quire.errors import TokenizerError
from quire.text.bpe import SPACE_MARK, BytePairs, bytes_of_characters
from quire.text.length import too_long
from quire.text.pretokenize import PreTokenizer
from quire.text.sentencepiece import SentencePieces
from quire.text.special import SpecialToken, SpecialTokens
from quire.text.variants import pre_tokenizer
from quire.text.vocab import Kind, Vocab, byte_of, flag, read_vocab, scores, strings

SUPPORTED = "gpt2 (byte pairs), gemma4 (byte pairs), llama (SentencePiece)"
_COUNTED = 4
"""Texts that are too long are counted, so that whoever wrote one knows by how much: up to so many
times as many tokens as fit."""


class Encoder(Protocol):
    """What a `Tokenizer` is made of: one per kind of vocabulary file."""

    n_vocab: int
    bos: int | None
    eos: int | None
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    chat_template: str | None
    fill: Mapping[str, int]

    @property
    def longest(self) -> int:
        """The most bytes of text that one token can stand for."""

    def encode(
        self, text: str, add_special: bool, parse_special: bool, most: int | None = None
    ) -> Iterator[list[int]]:
        """The ids of a text, some at a time, if there may be so many."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token of the vocabulary stands for."""

    def token_text(self, id: int) -> str:
        """How the vocabulary writes a token."""

    def is_special(self, id: int) -> bool:
        """Whether a token is one of control."""


class Tokenizer:
    """A vocabulary: from a .gguf file, with or without weights, or a folder with tokenizer.json.

    `eog_ids` end a generation, `fill` describe a gap. With `space_prefix`, a space is put before
    text at the start and after special tokens, and taken away when decoding from the start.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from quire.weights.gguf import GGUF

        if os.path.isdir(_path(path)):
            self._use(_hf_encoder(path))
            return
        with GGUF.open(path) as file:
            self._use(GGUFEncoder(file.metadata, str(path)))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], name: str = "the file") -> Tokenizer:
        """The tokenizer that GGUF metadata describes; `name` is what errors call it."""
        return cls._of(GGUFEncoder(metadata, name))

    @classmethod
    def from_hf(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: tokenizer.json and the settings beside it."""
        return cls._of(_hf_encoder(folder))

    @classmethod
    def _of(cls, encoder: Encoder) -> Tokenizer:
        tokenizer = cls.__new__(cls)
        tokenizer._use(encoder)
        return tokenizer

    def _use(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.n_vocab = encoder.n_vocab
        self.bos = encoder.bos
        self.eos = encoder.eos
        self.eog_ids = encoder.eog_ids
        self.add_bos = encoder.add_bos
        self.add_eos = encoder.add_eos
        self.space_prefix = encoder.space_prefix
        self.chat_template = encoder.chat_template
        self.fill = encoder.fill

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = True, *,
        max_tokens: int | None = None,
    ) -> list[int]:  # fmt: skip
        """The ids of a text.

        A text of more than `max_tokens` is refused: one that is too long whatever its tokens are
        before it is looked at, any other as soon as there are far too many.

        `add_special` adds BOS and EOS where the vocabulary asks for them; without
        `parse_special`, control tokens that are written out in the text are plain text. Of the
        characters that a vocabulary cannot write (some lack bytes that only unassigned code
        points have), what it cannot write is left out.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text to encode must be a string, not {type(text).__name__}")
        if max_tokens is not None and len(text) > max_tokens * self._longest:
            least = -(-len(text) // self._longest)
            raise too_long(f"{len(text)} characters, so at least {least} tokens", max_tokens)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has a lone surrogate at position {error.start} and cannot be encoded"
            ) from None
        every = chain.from_iterable(
            self._encoder.encode(text, add_special, parse_special, max_tokens)
        )
        if max_tokens is None:
            return list(every)
        ids = list(islice(every, _COUNTED * max_tokens + 1))
        if len(ids) > _COUNTED * max_tokens:
            raise too_long(f"more than {_COUNTED * max_tokens} tokens", max_tokens)
        if len(ids) > max_tokens:
            raise too_long(f"{len(ids)} tokens", max_tokens)
        return ids

    @cached_property
    def _longest(self) -> int:
        return self._encoder.longest

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of token ids from the start of a text; invalid UTF-8 becomes U+FFFD."""
        try:
            each = iter(ids)
        except TypeError:
            raise TokenizerError(f"ids to decode must be a list, not {ids!r:.80}") from None
        pieces = [self.token_bytes(id) for id in each if not (skip_special and self.is_special(id))]
        data = b"".join(pieces)
        if self.space_prefix:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for: a part of a UTF-8 text, not always whole characters."""
        return self._encoder.token_bytes(self._checked(id))

    def token_text(self, id: int | None) -> str:
        """How the vocabulary writes a token, and "" for no token: `token_text(bos)`."""
        return "" if id is None else self._encoder.token_text(self._checked(id))

    def is_special(self, id: int) -> bool:
        """Whether a token is one of control: not part of the text."""
        return self._encoder.is_special(self._checked(id))

    def _checked(self, id: int) -> int:
        try:
            id = operator.index(id)
        except TypeError:
            raise TokenizerError(f"a token id is a whole number, not {id!r:.80}") from None
        if not 0 <= id < self.n_vocab:
            raise TokenizerError(
                f"token id {id} is outside the vocabulary of {self.n_vocab} tokens"
            )
        return id


class GGUFEncoder:
    """Encodes with the vocabulary in the metadata of a GGUF file."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        model = metadata.get("tokenizer.ggml.model")
        if model == "llama":
            variant = None
            vocab = read_vocab(metadata, name, {"bos": 1, "eos": 2, "unknown": 0})
            self._words: BytePairs | SentencePieces = SentencePieces(
                vocab, scores(metadata, len(vocab.texts), name)
            )
        elif model in ("gpt2", "gemma4"):
            variant = pre_tokenizer("gemma4" if model == "gemma4" else _pre(metadata, name))
            vocab = read_vocab(metadata, name, {})
            merges = strings(metadata, "tokenizer.ggml.merges", name)
            self._words = BytePairs(vocab, merges, variant)
        else:
            kind = "missing" if model is None else f"{model!r}, which is not supported"
            raise TokenizerError(
                f"{name}: tokenizer.ggml.model is {kind}; supported are {SUPPORTED}"
            )
        self._vocab = vocab
        self._specials = SpecialTokens(_special_tokens(vocab, metadata))
        self._byte_level = variant is not None and variant.byte_level
        self.n_vocab = len(vocab.texts)
        self.bos = vocab.bos
        self.eos = vocab.eos
        self.eog_ids = vocab.ends
        self.fill = vocab.fill
        self.add_bos, self.add_eos = _additions(metadata, vocab, variant)
        self.space_prefix = variant is None and flag(metadata, "add_space_prefix", name, True)
        template = metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None

    @property
    def longest(self) -> int:
        """The most bytes of text that one token can stand for."""
        return max(len(text.encode()) for text in self._vocab.texts)

    def encode(
        self, text: str, add_special: bool, parse_special: bool, most: int | None = None
    ) -> Iterator[list[int]]:
        """The ids of a text, some at a time, if there may be so many."""
        if add_special and self.add_bos and self.bos is not None:
            yield [self.bos]
        after_special = True
        for piece in self._specials.split(text, parse_special):
            if isinstance(piece, int):
                yield [piece]
            else:
                spaced = " " + piece if self.space_prefix and after_special else piece
                yield from self._words.encode(spaced, most)
            after_special = isinstance(piece, int)
        if add_special and self.add_eos and self.eos is not None:
            yield [self.eos]

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for; none for unused tokens."""
        text = self._vocab.texts[id]
        kind = self._vocab.kinds[id]
        if kind == Kind.NORMAL:
            if self._byte_level:
                return bytes_of_characters(text)
            return text.replace(SPACE_MARK, " ").encode()
        if kind == Kind.BYTE:
            byte = byte_of(text)
            assert byte is not None
            return bytes([byte])
        return b"" if kind in (Kind.UNUSED, Kind.UNDEFINED) else text.encode()

    def token_text(self, id: int) -> str:
        """How the vocabulary writes a token."""
        return self._vocab.texts[id]

    def is_special(self, id: int) -> bool:
        """Whether a token is one of control."""
        return self._vocab.kinds[id] in (Kind.CONTROL, Kind.UNKNOWN)


def _hf_encoder(folder: str | os.PathLike[str]) -> Encoder:
    from quire.text.hf import HFEncoder

    return HFEncoder(Path(_path(folder)))


def _path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if not isinstance(path, (str, os.PathLike)):
        raise TokenizerError(f"a path is a text, not {path!r:.80}")
    return path


def _pre(metadata: Mapping[str, Any], name: str) -> str:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str):
        raise TokenizerError(f"{name}: tokenizer.ggml.pre must be a string, it is {pre!r}")
    return pre or "default"


def _additions(
    metadata: Mapping[str, Any], vocab: Vocab, variant: PreTokenizer | None
) -> tuple[bool, bool]:
    """Whether BOS and EOS are added; by default only where there is such a token."""
    default_bos = variant is None or variant.add_bos or variant.force_bos
    add_bos = flag(metadata, "add_bos_token", vocab.name, default_bos and vocab.bos is not None)
    add_eos = flag(metadata, "add_eos_token", vocab.name, False)
    if variant is not None and variant.force_bos:
        add_bos = vocab.bos is not None
    for wanted, id, role in ((add_bos, vocab.bos, "bos"), (add_eos, vocab.eos, "eos")):
        if wanted and id is None:
            raise TokenizerError(
                f"{vocab.name}: tokenizer.ggml.add_{role}_token is true, "
                f"but there is no tokenizer.ggml.{role}_token_id"
            )
    return add_bos, add_eos


def _special_tokens(vocab: Vocab, metadata: Mapping[str, Any]) -> list[SpecialToken]:
    """The tokens to look for in text; a few families let them swallow white space."""
    model = str(metadata.get("general.name", "")).lower()
    is_jina = metadata.get("tokenizer.ggml.pre") in ("jina-v2-de", "jina-v2-es", "jina-v2-code")
    is_phi3 = not is_jina and ("phi-3" in model or "phi3" in model)
    mask = "<mask>" if is_jina else "[MASK]" if "modern-bert" in model and not is_phi3 else None
    tight, always = ("<unk>", "<s>", "<|endoftext|>"), Kind.USER_DEFINED
    return [
        SpecialToken(
            id, text, vocab.kinds[id] == always, text == mask, is_phi3 and text not in tight
        )
        for id in vocab.of_kind(Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
        if (text := vocab.texts[id])
    ]
