"""A draft model's memory: on a budget together, beside requests of its own, and afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.errors import QuireError
from tests import tiny
from tests.speculation import always, pages_held

__all__ = ["always"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256, layers=3))
    return made


@pytest.mark.parametrize("swap", [0, "1GiB"])
def test_any_budget_that_will_do_without_drafts_will_do_with_them(always, path, swap) -> None:
    prompts = [[5] * 100, [6] * 90, [7] * 40]
    fields = {"max_tokens": 60, "ignore_eos": True}
    with quire.load(path) as roomy:
        wanted = [c.token_ids for c in roomy.generate(prompts, **fields)]
        weights = 2 * roomy.budget.breakdown["weights"]
    rounds = 0
    for more in range(72_000, 420_000, 24_000):
        with (
            quire.load(path, memory_budget=weights + more, swap_space=swap) as llm,
            quire.load(path, beside=llm) as draft,
        ):
            got = llm.generate(prompts, **fields, speculate=draft)
            assert [c.token_ids for c in got] == wanted
            rounds += sum(c.speculation.rounds for c in got if c.speculation)
            assert pages_held(llm) == pages_held(draft) == 0
    assert rounds > 0
