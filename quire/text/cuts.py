"""Where text of vocabularies that write spaces as marks can be cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from quire.text.bpe import SPACE_MARK

BEFORE_MARKS = re.compile(f"(?={SPACE_MARK})")


def pieces(text: str, cuts: re.Pattern[str]) -> Iterator[str]:
    """The text in pieces, cut at the places where a pattern matches."""
    at = 0
    for cut in cuts.finditer(text):
        if cut.start() > at:
            yield text[at : cut.start()]
            at = cut.start()
    if at < len(text):
        yield text[at:]


def harmless_cuts(texts: Iterable[str]) -> re.Pattern[str]:
    """Where text can be cut without changing the result: before a space mark, almost always.

    Nothing joins across a place between two characters that no token has side by side. So the
    text falls into words, which are short and repeat, except after the few characters that some
    token has directly before a space mark.
    """
    inside = set(re.findall(f"([^{SPACE_MARK}\n]){SPACE_MARK}", "\n".join(texts)))
    kept = "".join(map(re.escape, sorted(inside | {SPACE_MARK, "\n"})))
    return re.compile(f"(?<=[^{kept}])(?={SPACE_MARK})")
