"""Tokenizers of Hugging Face folders: tokenizer.json, and what the files beside it say of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.errors import TokenizerError
from quire.text.added import AddedTokens
from quire.text.bpe import SPACE_MARK, bytes_of_characters
from quire.text.cuts import BEFORE_MARKS, harmless_cuts, pieces
from quire.text.hf_decoder import Metaspace
from quire.text.hf_file import TokenizerFile, read_tokenizer
from quire.text.parts import Parts
from quire.text.pretokenize import WordSplitter
from quire.text.vocab import END_TEXTS, FILL_ROLES, byte_of
from quire.weights.folder import read_beside


class HFEncoder:
    """Encodes with a tokenizer.json; what the tokens are for comes from the files beside it."""

    def __init__(self, folder: Path) -> None:
        self._name = str(folder / "tokenizer.json")
        file = self.file = _load(folder, self._name)
        ids = file.pairs.ids | {token.text: token.id for token in file.added}
        self._texts = {id: text for text, id in ids.items()}
        self._specials = {token.id: token.special for token in file.added}
        plain = [(token.text, token) for token in file.added if not token.normalized]
        normal = [(self._normalized(t.text), t) for t in file.added if t.normalized]
        self._added = AddedTokens(plain, self._name)
        self._added_later = AddedTokens(normal, self._name)
        # A token that is looked for in normalized text is written as it is there.
        self._written = self._texts | {token.id: text for text, token in normal}
        words = file.words
        self._parts = None if words is None or isinstance(words, Metaspace) else (
            Parts(WordSplitter(words)))  # fmt: skip
        settings = _read(folder / "tokenizer_config.json")
        self.n_vocab = _n_vocab(folder, max(self._texts) + 1)
        self._cuts = BEFORE_MARKS
        if self._parts is None and not (isinstance(words, Metaspace) and words.split):
            self._cuts = harmless_cuts(file.pairs.ids)
        most = max([*file.pairs.ids.values(), *file.before, *file.behind])
        if most >= self.n_vocab:
            raise TokenizerError(
                f"{self._name}: token {self._texts[most]!r} has the id {most}, "
                f"but the model has {self.n_vocab} tokens"
            )
        self.bos = ids.get(_token(settings.get("bos_token")))
        self.eos = ids.get(_token(settings.get("eos_token")))
        self.fill: Mapping[str, int] = self._fill(ids)
        self.eog_ids = self._ends(folder, ids)
        self.add_bos = self.bos is not None and file.before[:1] == [self.bos]
        framed = file.before + file.behind
        self.add_eos = self.eos is not None and framed[self.add_bos :][-1:] == [self.eos]
        self.space_prefix = file.decoding.strip
        self.chat_template = chat_template(folder)

    @property
    def longest(self) -> int:
        """The most bytes of text that one token can stand for."""
        # Normalization composes: nine bytes can become three.
        return max(len(text.encode()) for text in self._texts.values()) * (
            3 if self.file.shrinks else 1
        )

    def encode(
        self, text: str, add_special: bool, parse_special: bool, most: int | None = None
    ) -> Iterator[list[int]]:
        """The ids of a text, some at a time, if there may be so many."""
        if add_special:
            yield self.file.before
        for piece, start in self._added.split(text, parse_special):
            if isinstance(piece, int):
                yield self._one(piece)
                continue
            for part, at in self._added_later.split(self._normalized(piece), parse_special):
                if isinstance(part, int):
                    yield self._one(part)
                else:
                    yield from self._encode(part, start + at == 0, most)
        if add_special:
            yield self.file.behind

    def _one(self, id: int) -> list[int]:
        if id >= self.n_vocab:
            raise TokenizerError(
                f"{self._name}: {self._texts[id]!r} in the text is token {id}, "
                f"but the model has {self.n_vocab} tokens"
            )
        return [id]

    def _normalized(self, text: str) -> str:
        for normalize in self.file.normalize:
            text = normalize(text)
        return text

    def _encode(self, text: str, first: bool, most: int | None) -> Iterator[list[int]]:
        """The ids of a piece of normalized text without added tokens, word by word."""
        pairs, words = self.file.pairs, self.file.words
        if self._parts is not None:
            if self.file.prefix_space and not text.startswith(" "):
                text = " " + text
            return self._parts.encode(text, lambda words: pairs.encode_bytes(words, most))
        if isinstance(words, Metaspace):
            text = text.replace(" ", SPACE_MARK)
            wanted = words.scheme == "always" or (words.scheme == "first" and first)
            if wanted and not text.startswith(SPACE_MARK):
                text = SPACE_MARK + text
        return pairs.encode(pieces(text, self._cuts), most)

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for; none for a gap in the vocabulary."""
        text = self._written.get(id, "")
        decoding = self.file.decoding
        if decoding.byte_level:
            return bytes_of_characters(text)
        if decoding.marks:
            text = text.replace(SPACE_MARK, " ")
        byte = byte_of(text) if decoding.byte_tokens else None
        return text.encode() if byte is None else bytes([byte])

    def token_text(self, id: int) -> str:
        """How the vocabulary writes a token."""
        return self._texts.get(id, "")

    def is_special(self, id: int) -> bool:
        """Whether a token is one of control."""
        return self._specials.get(id, False)

    def _fill(self, ids: dict[str, int]) -> dict[str, int]:
        """Tokens that a gap to be filled is described with."""
        found: dict[str, int] = {}
        for roles, _, texts in FILL_ROLES:
            for text in texts:
                if ids.get(text) in self._specials:
                    found.setdefault(roles[0], ids[text])
        return found

    def _ends(self, folder: Path, ids: dict[str, int]) -> frozenset[int]:
        ends = {ids[text] for text in END_TEXTS if text in ids and ids[text] in self._specials}
        ends |= {
            self.fill[roles[0]] for roles, end, _ in FILL_ROLES if end and roles[0] in self.fill
        }
        if self.eos is not None:
            ends.add(self.eos)
        for name in ("config.json", "generation_config.json"):
            named = _settings(folder / name).get("eos_token_id")
            for id in named if isinstance(named, list) else [named]:
                if isinstance(id, int):
                    if not 0 <= id < self.n_vocab:
                        raise TokenizerError(
                            f"{folder / name}: eos_token_id is {id}, "
                            f"but there are {self.n_vocab} tokens"
                        )
                    ends.add(id)
        return frozenset(ends)


def _n_vocab(folder: Path, n_tokens: int) -> int:
    """As many tokens as the model has outputs for, which is often more than there are."""
    size = _settings(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) and size > 0 else n_tokens


def _settings(path: Path) -> dict[str, Any]:
    """What a file says of the text model, which one that also sees holds inside."""
    outer = _read(path)
    inner = outer.get("text_config")
    if not isinstance(inner, dict):
        return outer
    return {**inner, **{key: value for key, value in outer.items() if value is not None}}


def _load(folder: Path, name: str) -> TokenizerFile:
    text = read_beside(folder, "tokenizer.json")
    if text is None:
        raise TokenizerError(
            f"{folder}: there is no tokenizer.json, which is needed; get it from where the model "
            "is from, or save it with transformers (AutoTokenizer, save_pretrained)"
        )
    return read_tokenizer(text, name)


def _read(path: Path) -> dict[str, Any]:
    text = read_beside(path.parent, path.name)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must be a JSON object")
    return value


def _token(value: object) -> str:
    """A token of the settings, written as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def chat_template(folder: Path) -> str | None:
    """How a conversation is written, where the folder says it."""
    text = read_beside(folder, "chat_template.jinja")
    if text is not None:
        return text.decode(errors="replace")
    template = _read(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = [entry.get("template") for entry in entries if entry.get("name") == "default"]
        template = named[0] if named else None
    return template if isinstance(template, str) else None
