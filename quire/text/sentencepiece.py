"""SentencePiece vocabularies: characters are joined as long as the result is a token, best
score first; what remains and is no token is written as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.errors import TokenizerError
from quire.text.bpe import SPACE_MARK
from quire.text.cuts import harmless_cuts, pieces
from quire.text.length import Fewest
from quire.text.merge import merge
from quire.text.vocab import Vocab

_CACHED_CHUNKS = 1 << 16
_CACHED_LENGTH = 64


class SentencePieces:
    """Encodes text with the scores of one vocabulary."""

    def __init__(self, vocab: Vocab, scores: Sequence[float]) -> None:
        self._vocab = vocab
        self._ids = vocab.ids
        self._urgency = [-score for score in scores]
        self._cuts = harmless_cuts(vocab.texts)
        self._cache: dict[str, list[int]] = {}
        self._fewest = Fewest(self._ids, lambda character: True)

    def encode(self, text: str, most: int | None = None) -> Iterator[list[int]]:
        """The ids of a text without special tokens, chunk by chunk, if there may be so many."""
        cached = self._cache.get
        for chunk in pieces(text.replace(" ", SPACE_MARK), self._cuts):
            yield cached(chunk) or self._encode_chunk(chunk, most)

    def _encode_chunk(self, chunk: str, most: int | None) -> list[int]:
        self._fewest.check(chunk, most)
        token_ids, urgency = self._ids, self._urgency

        def priority(a: int, b: int, c: int) -> float | None:
            id = token_ids.get(chunk[a:c])
            return None if id is None else urgency[id]

        ids = []
        start = 0
        for end in merge(len(chunk), priority):
            id = token_ids.get(chunk[start:end])
            if id is None:
                ids.extend(self._spelled(chunk[start:end]))
            else:
                ids.append(id)
            start = end
        if len(chunk) <= _CACHED_LENGTH:
            if len(self._cache) >= _CACHED_CHUNKS:
                self._cache.clear()
            self._cache[chunk] = ids
        return ids

    def _spelled(self, character: str) -> list[int]:
        ids = []
        for byte in character.encode():
            id = self._ids.get(f"<0x{byte:02X}>", self._vocab.unknown)
            if id is None:
                raise TokenizerError(
                    f"{self._vocab.name}: the vocabulary has no token for byte 0x{byte:02X} "
                    "and no unknown token"
                )
            ids.append(id)
        return ids
