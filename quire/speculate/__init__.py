"""Drafts that are verified in one step: what `speculate=` takes.

llm.generate(prompt, speculate="ngram")
llm.generate(prompt, speculate=quire.speculate.Ngram(max_n=4))
"""

from __future__ import annotations

from typing import Final

from quire.errors import RequestError
from quire.speculate.draft_model import DraftModel
from quire.speculate.early_exit import EarlyExit
from quire.speculate.first_of import FirstOf
from quire.speculate.interface import Speculator
from quire.speculate.lookahead import Lookahead
from quire.speculate.ngram import Ngram
from quire.speculate.ngram_cache import NgramCache

__all__ = [
    "NAMES",
    "DraftModel",
    "EarlyExit",
    "FirstOf",
    "Lookahead",
    "Ngram",
    "NgramCache",
    "by_name",
]

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
            f"speculate is {name!r}; there are {', '.join(map(repr, NAMES))}, a loaded draft model "
            "and the classes of quire.speculate"
        )
    return NAMES[name]
