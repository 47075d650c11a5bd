"""The model of a tokenizer.json: byte pairs over ids, with or without bytes to fall back to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from quire.errors import TokenizerError
from quire.text.bpe import BYTE_CHARACTERS
from quire.text.hf_part import Part
from quire.text.length import Fewest
from quire.text.merge import merge_ids
from quire.weights.gguf_format import quote

MOST_TOKENS: Final = 4_000_000
MOST_MERGES: Final = 4_000_000
MOST_LENGTH: Final = 4096
_CACHED_WORDS: Final = 1 << 16
_CACHED_LENGTH: Final = 64


class Pairs:
    """Encodes words with ranked merges of pairs of tokens."""

    def __init__(self, part: Part, ids: dict[str, int], merges: list[object]) -> None:
        self.ids = ids
        self._base = max(ids.values(), default=0) + 1
        self._ignore_merges = part.get("ignore_merges", bool, False)
        self._fuse_unknown = part.get("fuse_unk", bool, False)
        unknown = part.get("unk_token", str, None)
        if unknown is not None and unknown not in ids:
            part.refuse(f"unk_token {quote(unknown)} is not in the vocabulary")
        self.unknown = None if unknown is None else ids[unknown]
        self._bytes = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        self._fallback = part.get("byte_fallback", bool, False)
        if self._fallback and -1 in self._bytes:
            missing = self._bytes.index(-1)
            part.refuse(f"byte_fallback is true, but there is no token <0x{missing:02X}>")
        # Merges of these would reach over places where text is cut.
        apart = {*(self._bytes if self._fallback else ()), self.unknown}
        self._ranks, self._made = _ranks(part, ids, merges, self._base, apart)
        self._cache: dict[str, list[int]] = {}
        self._fewest = Fewest(ids, ids.__contains__)

    def encode_bytes(self, words: Iterable[str], most: int | None = None) -> list[int]:
        """The ids of words whose every byte is written as a character."""
        cached, encoded = self._cache.get, self._encode_bytes
        return [id for word in words for id in cached(word) or encoded(word, most)]

    def encode(self, words: Iterable[str], most: int | None = None) -> Iterator[list[int]]:
        """The ids of words, word by word, if there may be so many."""
        cached = self._cache.get
        for word in words:
            yield cached(word) or self._encode(word, word, most)

    def _encode_bytes(self, word: str, most: int | None) -> list[int]:
        return self._encode(word, word.encode().decode("latin-1").translate(BYTE_CHARACTERS), most)

    def _encode(self, word: str, characters: str, most: int | None) -> list[int]:
        self._fewest.check(characters, most)
        whole = self.ids.get(characters) if self._ignore_merges else None
        if whole is None:
            found = merge_ids(self._symbols(characters), self._ranks, self._made, self._base)
        else:
            found = [whole]
        if len(word) <= _CACHED_LENGTH:
            if len(self._cache) >= _CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = found
        return found

    def _symbols(self, characters: str) -> list[int]:
        """A token for each character; for one without, its bytes, or unknown, or nothing."""
        ids = self.ids
        symbols: list[int] = []
        after_unknown = False
        for character in characters:
            id = ids.get(character)
            if id is not None:
                symbols.append(id)
            elif self._fallback:
                symbols.extend(self._bytes[byte] for byte in character.encode())
            elif self.unknown is not None and not (after_unknown and self._fuse_unknown):
                symbols.append(self.unknown)
            after_unknown = id is None
        return symbols


def read_model(part: Part | None, name: str) -> Pairs:
    """The model, with its sizes checked before anything is made of it."""
    if part is None:
        raise TokenizerError(f"{name}: not a tokenizer: it has no model")
    if part.get("type", str, "BPE") != "BPE":
        part.refuse("is not known; the model must be BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        part.expect(key, None, *([""] if key != "dropout" else [0.0, 0]))
    vocab, merges = part.get("vocab", dict), part.get("merges", list)
    if not 0 < len(vocab) <= MOST_TOKENS:
        part.refuse(f"it has {len(vocab)} tokens, 1 to {MOST_TOKENS} may be")
    if len(merges) > MOST_MERGES:
        part.refuse(f"it has {len(merges)} merges, at most {MOST_MERGES} may be")
    if set(map(type, vocab.values())) != {int}:
        part.refuse("ids of tokens must be whole numbers")
    if max(map(len, vocab)) > MOST_LENGTH:
        part.refuse(f"a token has more than {MOST_LENGTH} characters")
    least, most = min(vocab.values()), max(vocab.values())
    if least < 0 or most >= 2 * MOST_TOKENS:
        part.refuse(f"ids go from {least} to {most}, 0 to {2 * MOST_TOKENS - 1} may be")
    if len(set(vocab.values())) != len(vocab):
        part.refuse("several tokens have the same id")
    try:
        "".join(vocab).encode()
    except UnicodeEncodeError:
        part.refuse("a token is not valid Unicode")
    pairs = Pairs(part, vocab, merges)
    part.finish()
    return pairs


def _ranks(
    part: Part, ids: dict[str, int], merges: list[object], base: int, apart: set[int | None]
) -> tuple[dict[int, int], list[int]]:
    """The rank of each pair of ids, and the token that a merge of each rank makes."""
    ranks: dict[int, int] = {}
    made: list[int] = []
    for merge in merges:
        try:
            left, right = merge.split(" ") if isinstance(merge, str) else _listed(merge)
            key = ids[left] * base + ids[right]
            new = ids[left + right]
        except (KeyError, TypeError, ValueError):
            part.refuse(f"merge {len(made)} must be of two tokens that make a third")
        if ids[left] in apart or ids[right] in apart:
            part.refuse(f"merge {len(made)} is of a byte or of the unknown token")
        ranks[key] = len(made)  # of two equal ones the last counts
        made.append(new)
    return ranks, made


def _listed(merge: object) -> list[str]:
    if not isinstance(merge, list) or not all(isinstance(token, str) for token in merge):
        raise TypeError
    return merge
