"""The default model before and after a restart: the same tokens, and nothing computed again."""

from __future__ import annotations

from pathlib import Path

import quire

STORY = "The lighthouse keeper wrote in his log every night. " * 12


def test_a_saved_session_goes_on_after_a_restart(
    llm: quire.LLM, model_path: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "story.quire"
    with llm.session() as session:
        session.append(STORY)
        session.checkpoint("story")
        session.generate(max_tokens=8, temperature=0)
        session.save(saved)
        position = session.position
        expected = session.generate(max_tokens=32, temperature=0).token_ids
        logits = session.logits()
    with quire.load(model_path) as other, other.open(saved) as session:
        done = session.generate(max_tokens=32, temperature=0)
        assert done.cached_tokens == position - 1
        assert done.token_ids == expected
        assert session.logits().tobytes() == logits.tobytes()
        session.rewind(session.marks["story"])
        assert session.generate(max_tokens=8, temperature=0).cached_tokens == len(llm.encode(STORY))
        other.memory.audit()
