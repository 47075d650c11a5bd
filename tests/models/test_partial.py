"""Drafts of which a part is accepted, under real models: as if the rest had never been there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quire
from quire.engine.sequence import Sequence
from quire.memory.batch import SeqTokens
from tests.model_folders import RANDOM, TRAINED, model_folder

STEPS = 30
MOST = 480


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_what_is_not_accepted_was_never_there(name: str, tmp_path: Path) -> None:
    """Three sequences, drafts of up to 16 tokens, any part of which is right."""
    rng = np.random.default_rng(5)
    with quire.load(model_folder(name, tmp_path)) as llm:
        engine = llm.engine
        kept: dict[Sequence, list[int]] = {engine.new_sequence(): [] for _ in range(3)}
        for step in range(STEPS):
            new = {
                s: rng.integers(3, 4000, rng.choice([1, 2, 5, 9, 16]) if has else 30).tolist()
                for s, has in kept.items()
                if rng.random() < 0.7 or not has
            }
            if not new or any(len(kept[s]) + len(t) > MOST for s, t in new.items()):
                continue
            right = {s: int(rng.integers(1, len(t) + 1)) if kept[s] else 30 for s, t in new.items()}
            wanted = [SeqTokens(s.id, np.array(t, np.int32)) for s, t in new.items()]
            with engine.memory.reserve(wanted) as lease:
                rows = np.arange(sum(map(len, new.values())), dtype=np.int32)
                logits = llm.ops.numpy(engine.runner.forward_rows(lease, rows)).copy()
                lease.commit({s.id: n for s, n in right.items()})
            at = 0
            for s, tokens in new.items():
                if step % 5 == 4:
                    whole = llm.logits(kept[s] + tokens)[len(kept[s]) :]
                    assert np.array_equal(logits[at : at + len(tokens)], whole)
                at += len(tokens)
                kept[s] += tokens[: right[s]]
        for s in kept:
            engine.end(s)
        engine.memory.audit()
