"""A draft model's memory: on a budget together, beside requests of its own, and afterwards."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import quire
from tests import tiny
from tests.speculation import always, pages_held

__all__ = ["always"]
pytestmark = pytest.mark.host


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


def test_what_gave_way_is_not_computed_again_every_few_steps(always, path) -> None:
    """Whatever the budget, a draft model computes each token a few times at most."""
    prompts = [[5] * 100, [6] * 90, [7] * 40]
    with quire.load(path) as roomy:
        weights = 2 * roomy.budget.breakdown["weights"]
    for more in (144_000, 186_000, 228_000, 264_000, 288_000, 330_000):
        with (
            quire.load(path, memory_budget=weights + more) as llm,
            quire.load(path, beside=llm) as draft,
        ):
            llm.generate(prompts, max_tokens=100, ignore_eos=True, speculate=draft)
            assert draft.engine.runner.tokens_run < 2 * 530


def test_drafts_take_nothing_from_requests_of_the_draft_model(always, path) -> None:
    """Neither where its follower was parked nor where it has to be computed."""
    for tokens in (224, 240, 256):
        with (
            quire.load(path) as llm,
            quire.load(path, kv_cache_tokens=tokens, swap_space="1GiB") as draft,
        ):
            preempted: list[int] = []
            take = draft.engine.room.preempt

            def preempt(sequence, take=take, preempted=preempted) -> bool:
                preempted.append(sequence.id)
                return take(sequence)

            draft.engine.room.preempt = preempt
            drafted = llm.stream([5] * 60, max_tokens=100, ignore_eos=True, speculate=draft)
            own = [draft.stream([i] * 50, max_tokens=60, ignore_eos=True) for i in (1, 2)]
            pieces = [iter(stream) for stream in (drafted, *own)]
            for _ in range(100):
                for one in pieces:
                    next(one, None)
            assert preempted == []
            assert [len(s.completion.token_ids) for s in (drafted, *own)] == [100, 60, 60]


def test_a_model_that_is_dropped_leaves_nothing_in_its_draft_model(always, path) -> None:
    with quire.load(path) as draft:
        for _ in range(2):
            llm = quire.load(path)
            stream = llm.stream([5] * 60, max_tokens=20, ignore_eos=True, speculate=draft)
            pieces = iter(stream)
            next(pieces), next(pieces)
            assert len(draft.engine._sequences) == 1
            del llm, stream, pieces
            gc.collect()


def test_a_closed_draft_model_has_nothing_to_give(always, path) -> None:
    with quire.load(path) as llm:
        draft = quire.load(path, beside=llm)
        stream = llm.stream([5] * 60, max_tokens=40, ignore_eos=True, speculate=draft)
        pieces = iter(stream)
        next(pieces), next(pieces), next(pieces)
        draft.close()
        assert llm.engine.drafting.give_way() is False
        assert len(list(pieces)) > 0


def test_a_model_that_nobody_holds_gives_its_share_back(path: Path) -> None:
    """One that drafted, one whose session and stream outlive it for a while."""
    with quire.load(path, memory_budget="64MiB") as llm:
        llm.generate([5, 6, 7], max_tokens=4)
        for _ in range(3):
            draft = quire.load(path, beside=llm)
            llm.generate([5, 6] * 9, max_tokens=20, speculate=draft, ignore_eos=True)
            session = draft.session().append([5, 6, 7])
            stream = session.stream(max_tokens=9, ignore_eos=True)
            next(stream)
            del draft, session
            gc.collect()
            assert "".join(stream) and stream.completion.finish_reason == "length"
            del stream
            gc.collect()
            assert not [use for use in llm.memory.breakdown if ":" in use]
        llm.memory.audit()
