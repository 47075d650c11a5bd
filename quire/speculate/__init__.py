"""Drafts that are verified in one step: what `speculate=` takes.

llm.generate(prompt, speculate="ngram")
llm.generate(prompt, speculate=quire.speculate.Ngram(max_n=4))
"""

from __future__ import annotations

from quire.speculate.draft_model import DraftModel
from quire.speculate.early_exit import EarlyExit
from quire.speculate.first_of import FirstOf
from quire.speculate.lookahead import Lookahead
from quire.speculate.ngram import Ngram
from quire.speculate.ngram_cache import NgramCache
from quire.speculate.parse import NAMES, by_name, speculator

__all__ = [
    "NAMES",
    "DraftModel",
    "EarlyExit",
    "FirstOf",
    "Lookahead",
    "Ngram",
    "NgramCache",
    "by_name",
    "speculator",
]
