"""From what people say about drafts to who makes them."""

from __future__ import annotations

from typing import Final

from quire.engine.drafter import Speculator
from quire.errors import RequestError
from quire.speculate.draft_model import DraftModel, Loaded
from quire.speculate.early_exit import EarlyExit
from quire.speculate.lookahead import Lookahead
from quire.speculate.ngram import Ngram

NAMES: Final[dict[str, Speculator]] = {
    "ngram": Ngram(),
    "lookahead": Lookahead(),
    "early-exit": EarlyExit(),
}
"""Ways to draft that need no further word."""


def by_name(name: str) -> Speculator:
    """A way to draft with its usual settings."""
    if name not in NAMES:
        raise RequestError(
            f"speculate is {name!r:.80}; there are {', '.join(map(repr, NAMES))}, a loaded draft "
            "model and the classes of quire.speculate"
        )
    return NAMES[name]


def speculator(way: object) -> Speculator:
    """Who drafts: by name, a loaded model, or as it is configured."""
    if isinstance(way, Speculator):
        return way
    if isinstance(way, str):
        return by_name(way)
    if isinstance(way, Loaded):
        return DraftModel(way)
    raise RequestError(
        f"speculate takes a name, a loaded model or an object of quire.speculate, not {way!r:.80}"
    )
