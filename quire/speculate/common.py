"""What several drafters share."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.engine.drafter import Draft, DraftRequest, Source, Target
from quire.errors import RequestError


class Known(Source):
    """Drafts of those who say at once what they would draft."""

    def draft(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """The first tokens of each offer."""
        return [Draft(one.offer.tokens[: one.n]) for one in requests]


def known_source(target: Target) -> Known:
    """The one that all drafters of this kind share."""
    source = target.sources.setdefault(Known, Known())
    assert isinstance(source, Known)
    return source


def check_whole(what: str, value: object) -> None:
    """Refuses a setting that counts something and is no whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{what} is {value!r:.80}; it takes a whole number")
