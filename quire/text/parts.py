"""Long texts become ids a part at a time, and parts that came before are known.

Prompts begin alike and conversations are sent anew with every turn: most of them is text whose ids
were just made. Parts are cut by a text's beginning alone, so that texts have the same ones as far
as they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.text.pretokenize import WordSplitter

_LENGTH = 1 << 11
"""Characters of a part."""
_KEPT = 1 << 20
"""Characters and ids that are kept."""
_EACH = 1 << 6
"""So many of them take as much memory as what a part is kept in, which short ones are most of."""


class Parts:
    """Makes ids of the words of one way of splitting."""

    def __init__(self, splitter: WordSplitter, length: int = _LENGTH) -> None:
        self._splitter = splitter
        self._length = length
        self._known: dict[tuple[str, bool], tuple[list[int], int]] = {}
        self._kept = 0

    def encode(self, text: str, ids_of: Callable[[list[str]], list[int]]) -> Iterator[list[int]]:
        """The ids of a text, so that whoever has enough can stop."""
        at, length = 0, self._length
        while at < len(text):
            part = text[at : at + length]
            last = len(part) < length
            known = self._known.get((part, last))
            if known is None:
                words = self._splitter.split(part) if last else self._splitter.sure(part)
                if not words:
                    length *= 2
                    continue
                known = ids_of(words), sum(map(len, words))
                self._keep((part, last), known)
            yield known[0]
            at += known[1]

    def _keep(self, part: tuple[str, bool], known: tuple[list[int], int]) -> None:
        size = len(part[0]) + len(known[0]) + _EACH
        if size > _KEPT:
            return
        if self._kept + size > _KEPT:
            self._known.clear()
            self._kept = 0
        self._known[part] = known
        self._kept += size
