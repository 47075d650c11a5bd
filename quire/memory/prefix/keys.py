"""Keys that stand for tokens: a chain of BLAKE2b, seeded at random in every process.

    origin = H(layout and model) ──▶ root = H(origin, salt) ──▶ first page = H(root, its tokens)

Nobody outside can tell a key, or tokens with a given key, in advance. A key decides which places
are compared at all (the root) and tells why nothing was found (the first page, remembered after
its tokens are gone); what a match is, the tokens themselves decide.
"""

from __future__ import annotations

import os
from hashlib import blake2b

from quire.memory.prefix.entries import ROOT_BYTES, TOKEN_BYTES

_SALTS = 1024
"""How many salts have their roots at hand."""


class Keys:
    """The keys of one index."""

    def __init__(self, page_tokens: int, identity: str) -> None:
        self._seed = os.urandom(32)
        self._page_end = ROOT_BYTES + page_tokens * TOKEN_BYTES
        self._roots: dict[str, bytes] = {}
        self._origin = self._key(b"", f"{page_tokens} {identity}")

    def root(self, salt: str) -> bytes:
        """What the places of a salt begin with."""
        known = self._roots.get(salt)
        if known is None:
            if len(self._roots) >= _SALTS:
                self._roots.clear()
            known = self._roots[salt] = self._key(self._origin, salt)
        return known

    def first_page(self, place: bytes, any_salt: bool = False) -> bytes:
        """The key of a place's first page of tokens; empty where that page is not whole."""
        if len(place) < self._page_end:
            return b""
        previous = self._origin if any_salt else place[:ROOT_BYTES]
        return self._hash(previous + place[ROOT_BYTES : self._page_end])

    def _key(self, previous: bytes, text: str) -> bytes:
        return self._hash(previous + text.encode("utf-8", "surrogatepass"))

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=ROOT_BYTES, key=self._seed).digest()
