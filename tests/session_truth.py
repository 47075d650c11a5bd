"""What sessions must hold, from their tokens alone: a roomy model computes it anew.

A `Past` says how a session came to hold what it holds. Where no token was taken out of the middle
its tokens say all; else what was done to it is done again, in the same order, with room for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

import quire

GO: dict[str, Any] = {"ignore_eos": True}
_MOST_KNOWN = 200_000
Deed = tuple[Any, ...]
"""("add", tokens), ("cut", start, stop) or ("back", length)."""


@dataclass(frozen=True)
class Past:
    """The tokens of a session, and how they came about."""

    tokens: tuple[int, ...] = ()
    deeds: tuple[Deed, ...] = ()
    """Empty where tokens say all."""

    def add(self, tokens: list[int] | tuple[int, ...]) -> Past:
        """More tokens at the end."""
        deeds, more = self.deeds, tuple(tokens)
        if deeds and more:
            whole = deeds[-1][1] + more if deeds[-1][0] == "add" else more
            deeds = (*(deeds[:-1] if deeds[-1][0] == "add" else deeds), ("add", whole))
        return Past(self.tokens + more, deeds)

    def back(self, length: int) -> Past:
        """Only the first so many."""
        if not self.deeds or length == len(self.tokens):
            return Past(self.tokens[:length], self.deeds)
        if length <= self.whole + 1:
            return Past(self.tokens[:length])
        gone, last = len(self.tokens) - length, self.deeds[-1]
        if last[0] == "add" and gone < len(last[1]):
            deeds = (*self.deeds[:-1], ("add", last[1][:-gone]))
        else:
            deeds = (*self.deeds, ("back", length))
        return Past(self.tokens[:length], deeds)

    def cut(self, start: int, stop: int) -> Past:
        """Without some of them."""
        if stop == len(self.tokens):
            return self.back(start)
        deeds = (*(self.deeds or (("add", self.tokens),)), ("cut", start, stop))
        past = Past(self.tokens[:start] + self.tokens[stop:], deeds)
        return Past(past.tokens) if len(past.tokens) <= past.whole + 1 else past

    @property
    def whole(self) -> int:
        """How many first tokens saw nothing that was taken out; the last one is computed anew."""
        return min([deed[1] for deed in self.deeds if deed[0] == "cut"], default=len(self.tokens))


class Truth:
    """A model with plenty of memory that remembers what it found out."""

    def __init__(self, llm: quire.LLM) -> None:
        self.llm = llm
        self._known: dict[bytes, tuple[int, bytes]] = {}  # by tokens: the next one, the logits
        self._edited: dict[Past, NDArray[np.float32]] = {}
        self._salts = 0

    def check(self, past: Past, found: NDArray[np.float32]) -> None:
        """Whether these are the logits after a past, bit for bit."""
        if digest(found) != self._digest(past):
            real = self.logits(past)
            raise AssertionError(
                f"logits after {len(past.tokens)} tokens differ by {np.abs(real - found).max()}; "
                f"{past}"
            )

    def logits(self, past: Past) -> NDArray[np.float32]:
        """The logits after a past, computed now."""
        if not past.deeds:
            return self.llm.logits(past.tokens)[-1]
        if past not in self._edited:
            if len(self._edited) > 500:
                self._edited.clear()
            with self._replayed(past) as session:
                self._edited[past] = session.logits()
        return self._edited[past]

    def go_on(self, past: Past, n: int) -> list[int]:
        """The n likeliest tokens, one after the other."""
        if past.deeds:
            with self._replayed(past) as session:
                return session.generate(max_tokens=n, **GO).token_ids
        found: list[int] = []
        *_, key = keys(past.tokens)
        while len(found) < n and key in self._known:
            found.append(self._known[key][0])
            *_, key = keys((*past.tokens, *found))
        if left := n - len(found):
            start = [*past.tokens, *found]
            made = self.llm.generate(start, max_tokens=left, cache_salt=self._salt(), **GO)
            found += made.token_ids
            self._learn((*past.tokens, *found))
        return found

    def sample(self, past: Past, n: int, chance: dict[str, Any]) -> list[int]:
        """What chance makes of it."""
        return self.llm.generate(
            past.tokens, max_tokens=n, cache_salt=self._salt(), **chance, **GO
        ).token_ids

    def _digest(self, past: Past) -> bytes:
        if past.deeds:
            return digest(self.logits(past))
        *_, key = keys(past.tokens)
        if key not in self._known:
            self._learn(past.tokens)
        return self._known[key][1]

    def _learn(self, tokens: tuple[int, ...]) -> None:
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        for key, row in zip(keys(tokens), self.llm.logits(tokens), strict=True):
            self._known[key] = (int(row.argmax()), digest(row))

    def _replayed(self, past: Past) -> quire.Session:
        session = self.llm.session(self._salt())
        for what, *how in past.deeds:
            if what == "add":
                session.append(how[0])
            elif what == "cut":
                session.remove(*how)
            else:
                session.rewind(how[0] - session.position)
        assert session.tokens == list(past.tokens)
        return session

    def _salt(self) -> str:
        """One that nobody has shared with yet, so that nothing is found but computed."""
        self._salts += 1
        if self._salts % 64 == 0:
            self.llm.forget()
        return f"truth {self._salts}"


def digest(row: NDArray[np.float32]) -> bytes:
    """What tells logits apart, to the last bit."""
    return blake2b(row.tobytes(), digest_size=16).digest()


def keys(tokens: tuple[int, ...]) -> list[bytes]:
    """A key for each beginning of these tokens."""
    state, found = blake2b(digest_size=16), []
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        found.append(state.copy().digest())
    return found
