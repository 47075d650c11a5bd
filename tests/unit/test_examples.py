"""The examples run, and do what they say, over a tiny random model."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from tests import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[quire.LLM]:
    tiny.write(tmp_path / "tiny.gguf", tiny.Tiny(tied=False))
    with quire.load(tmp_path / "tiny.gguf") as loaded:
        yield loaded
        loaded.forget()
        loaded.memory.audit()
        assert loaded.memory.as_dict()["stats"]["attention"]["pages_used"] == 0


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_best_of_n(llm: quire.LLM) -> None:
    answers = example("best_of_n")["best_of"](llm, "hello", 4, 10)
    assert len(answers) == 4 and answers == sorted(answers, reverse=True)
    assert len({text for _, text in answers}) > 1


def test_tree_search_finds_better_than_greedy(llm: quire.LLM) -> None:
    found = example("tree_search")["beam_search"](llm, "hello there", 4, 6)
    greedy = llm.generate("hello there", max_tokens=6, ignore_eos=True, logprobs=0)
    assert greedy.logprobs is not None
    assert found[0][0] >= sum(e.logprob for e in greedy.logprobs) - 1e-4
    assert [s for s, _ in found] == sorted((s for s, _ in found), reverse=True)


def test_undo(llm: quire.LLM) -> None:
    tried = example("undo")["story"](llm, [" a", " b", " a"], 8)
    assert tried[0] == tried[2] != tried[1]
