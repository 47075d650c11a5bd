"""How few tokens a long word can become, known without merging it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from quire.errors import ContextError

_LONG: Final = 4096
"""Shorter words are merged in no time."""


class Fewest:
    """Counts a word's characters, each as its share of the longest token that has it.

    A token of n characters holds n shares of 1/n at most, so no word has fewer tokens than its
    shares make. Characters that may be left out, or become one with others, have no share.
    """

    def __init__(self, tokens: Collection[str], is_kept: Callable[[str], bool]) -> None:
        self._tokens = tokens
        self._is_kept = is_kept
        self._shares: dict[str, float] = {}

    def check(self, word: str, most: int | None) -> None:
        """Refuses a word of which more than so many tokens must come."""
        if most is None or len(word) <= max(_LONG, most):
            return
        shares = self._shares = self._shares or self._counted()
        least = int(sum(n * shares.get(c, 0.0) for c, n in Counter(word).items()) * (1 - 1e-9))
        if least > most:
            raise too_long(f"a word of at least {least} tokens", most)

    def _counted(self) -> dict[str, float]:
        longest: dict[str, int] = {}
        for text in sorted(self._tokens, key=len):
            longest.update(dict.fromkeys(text, len(text)))
        return {c: 1 / length for c, length in longest.items() if self._is_kept(c)}


def too_long(has: str, most: int) -> ContextError:
    """A text does not fit a context."""
    return ContextError(
        f"the text has {has}, and {most} fit; shorten it, or load the model with a larger n_ctx or "
        "more memory"
    )
