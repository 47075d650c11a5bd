"""Byte pair encoding: words are built from bytes (or characters) by ranked merges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from quire.text.length import Fewest
from quire.text.merge import merge, merge_few
from quire.text.parts import Parts
from quire.text.pretokenize import PreTokenizer, WordSplitter
from quire.text.vocab import Vocab

SPACE_MARK = "\u2581"

_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 64
_FEW = 32
"""Characters of a word whose pairs are few."""


def _byte_characters() -> str:
    """The character that stands for each byte in byte-level vocabularies, by GPT-2's rule."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
_BYTES = {ord(character): byte for byte, character in enumerate(BYTE_CHARACTERS)}


def bytes_of_characters(text: str) -> bytes:
    """The bytes that a byte-level token stands for; plain UTF-8 if it is not written that way."""
    if all(ord(character) in _BYTES for character in text):
        return bytes(_BYTES[ord(character)] for character in text)
    return text.encode()


class BytePairs:
    """Encodes text with the merges of one vocabulary."""

    def __init__(self, vocab: Vocab, merges: Sequence[str], variant: PreTokenizer) -> None:
        self._ids = vocab.ids
        self._variant = variant
        self._parts = Parts(WordSplitter(variant))
        # A merge is written "left right". Of two equal ones the first counts.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
        self._cache: dict[str, list[int]] = {}
        self._fewest = Fewest(self._ids, lambda character: bool(self._spelled(character)))

    def encode(self, text: str, most: int | None = None) -> Iterator[list[int]]:
        """The ids of a text without special tokens, some at a time, if there may be so many."""
        if not self._variant.byte_level:
            text = text.replace(" ", SPACE_MARK)
        cached, encoded = self._cache.get, self._encode_word
        return self._parts.encode(
            text, lambda words: [id for word in words for id in cached(word) or encoded(word, most)]
        )

    def _encode_word(self, word: str, most: int | None) -> list[int]:
        symbols = word
        if self._variant.byte_level:
            symbols = word.encode().decode("latin-1").translate(BYTE_CHARACTERS)
        self._fewest.check(symbols, most)
        ids = self._whole(symbols) or self._merged(symbols)
        if len(word) <= _CACHED_LENGTH:
            if len(self._cache) >= _CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _whole(self, symbols: str) -> list[int] | None:
        if self._variant.ignore_merges or (self._variant.whole_lines and not symbols.strip("\n")):
            id = self._ids.get(symbols)
            return None if id is None else [id]
        return None

    def _merged(self, symbols: str) -> list[int]:
        ranks, ids = self._ranks, []
        if len(symbols) <= _FEW:
            parts = merge_few(symbols, ranks)
        else:
            ends = merge(len(symbols), lambda a, b, c: ranks.get(f"{symbols[a:b]} {symbols[b:c]}"))
            parts = [symbols[start:end] for start, end in pairwise([0, *ends])]
        for part in parts:
            id = self._ids.get(part)
            if id is None:
                ids.extend(self._spelled(part))
            else:
                ids.append(id)
        return ids

    def _spelled(self, symbol: str) -> list[int]:
        """The characters or bytes of what is no token, for want of one or by a stray merge.

        Some vocabularies lack tokens for bytes that only unassigned code points have. Such bytes
        are left out, as they were when the model was trained; an unknown token would be worse,
        since some files give that role to the token that ends a text.
        """
        if self._variant.byte_level:
            parts = list(symbol)
        else:
            parts = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        return [self._ids[part] for part in parts if part in self._ids]
