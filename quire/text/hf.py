"""Tokenizers of Hugging Face folders, through the `tokenizers` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import TokenizerError
from quire.text.bpe import SPACE_MARK, bytes_of_characters
from quire.text.vocab import END_TEXTS, byte_of
from quire.weights.folder import read_beside


class HFEncoder:
    """Encodes with a tokenizer.json; what the tokens are for comes from the files beside it."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        self._as_text: Any = None
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise TokenizerError(f"{folder}: tokenizer.json has no tokens")
        self._texts = {id: text for text, id in ids.items()}
        self._added: dict[int, bool] = {
            id: token.special for id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        settings = _read(folder / "tokenizer_config.json")
        decoder = _decoder(self._tokenizer)
        self._byte_level = "ByteLevel" in decoder
        self.n_vocab = _n_vocab(folder, max(self._texts) + 1)
        self.bos = ids.get(_token(settings.get("bos_token")))
        self.eos = ids.get(_token(settings.get("eos_token")))
        self.eog_ids = self._ends(folder, ids)
        framed = self._tokenizer.encode("", add_special_tokens=True).ids
        self.add_bos = self.bos is not None and framed[:1] == [self.bos]
        self.add_eos = self.eos is not None and framed[self.add_bos :][-1:] == [self.eos]
        self.space_prefix = bool({"Strip", "Metaspace"} & decoder)
        self.chat_template = chat_template(folder)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """The ids of a text."""
        tokenizer = self._tokenizer if parse_special else self._plain()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for; none for a gap in the vocabulary."""
        text = self._texts.get(id, "")
        if id in self._added:
            return text.encode()
        if self._byte_level:
            return bytes_of_characters(text)
        byte = byte_of(text)
        return text.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])

    def token_text(self, id: int) -> str:
        """How the vocabulary writes a token."""
        return self._texts.get(id, "")

    def is_special(self, id: int) -> bool:
        """Whether a token is one of control."""
        return self._added.get(id, False)

    def _plain(self) -> Any:
        """A second tokenizer that takes special tokens in the text for text."""
        if self._as_text is None:
            self._as_text = type(self._tokenizer).from_str(self._tokenizer.to_str())
            self._as_text.encode_special_tokens = True
        return self._as_text

    def _ends(self, folder: Path, ids: dict[str, int]) -> frozenset[int]:
        ends = {ids[text] for text in END_TEXTS if text in ids and ids[text] in self._added}
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


def _load(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TokenizerError(
            f"{folder}: reading tokenizer.json needs the tokenizers library: "
            "pip install 'quire[hf]'"
        ) from error
    text = read_beside(folder, "tokenizer.json")
    if text is None:
        raise TokenizerError(
            f"{folder}: there is no tokenizer.json, which is needed; get it from where the model "
            "is from, or save it with transformers (AutoTokenizer, save_pretrained)"
        )
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"{folder / 'tokenizer.json'}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _decoder(tokenizer: Any) -> set[str]:
    """The types of the decoder's parts."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


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
