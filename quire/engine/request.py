"""What is asked of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.drafter import Speculator
from quire.types import Constraint, Sampling


@dataclass(frozen=True)
class Request:
    """Tokens to compute, and how to go on from them; it never changes after it was made."""

    tokens: tuple[int, ...]
    sampling: Sampling
    constraint: Constraint | None = None
    salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""
    speculate: Speculator | None = None
    """Who drafts for it; None: nobody."""
    owner: str = ""
    """Whose it is: prompts of several owners are computed fairly."""
    priority: int = 0
    """Lower comes first."""
