"""Whatever is done with sessions on a GPU, they hold what their tokens say: forks, rewinds, drafts,
aborts, interrupts and files, with too little room, so that sequences are parked and come back.

What they must hold is computed anew by a roomy model on the same GPU, and compared bit by bit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests import session_kinds
from tests.models.test_session_oracle import many_worlds
from tests.models.test_session_oracle import surroundings as surroundings  # a fixture

pytestmark = pytest.mark.gpu
tight = session_kinds.tight


def tight_on_a_gpu(kind: str, rng: random.Random, weight_bytes: int) -> dict[str, Any]:
    """As on the host, but for bytes: of such small pages one slab of a GPU holds thousands."""
    found = tight(kind, rng, weight_bytes)
    found.pop("memory_budget", None)
    return found | {"device": "cuda"}


@pytest.mark.parametrize("kind", session_kinds.KINDS)
def test_sessions_hold_what_their_tokens_say(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_kinds, "tight", tight_on_a_gpu)
    many_worlds(kind, tmp_path, range(3), 100)
