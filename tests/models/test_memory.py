"""What memory does never changes what a model says: every kind of model, greedily."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.errors import RequestError
from tests.model_folders import RANDOM, TRAINED, model_folder

PROMPT = [int(i) for i in np.random.default_rng(8).integers(3, 4096, 100)]
OTHER = [int(i) for i in np.random.default_rng(9).integers(3, 4096, 23)]
PROMPTS = [PROMPT[i : i + 20 + 3 * i] for i in range(8)]


@pytest.fixture(scope="module", params=[*TRAINED, *RANDOM])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[quire.LLM]:
    with quire.load(folder) as llm:
        yield llm


@pytest.fixture
def llm(loaded: quire.LLM) -> Iterator[quire.LLM]:
    """A model that knows nothing of earlier tests, and must hold nothing afterwards."""
    yield loaded
    loaded.memory.audit()
    loaded.forget()
    assert {s["pages_used"] for s in loaded.memory.as_dict()["stats"].values()} == {0}


def greedy(llm: quire.LLM, prompt: list[int], n: int) -> list[int]:
    """What comes after a prompt that nothing is known of."""
    llm.forget()
    return llm.generate(prompt, max_tokens=n, ignore_eos=True).token_ids


def goes_on(session: quire.Session, n: int) -> list[int]:
    return session.generate(max_tokens=n, ignore_eos=True).token_ids


def test_forks_go_their_own_ways(llm: quire.LLM) -> None:
    expected = greedy(llm, PROMPT, 40)
    apart = greedy(llm, PROMPT + expected[:10] + OTHER, 20)
    llm.forget()
    with llm.session() as s:
        assert goes_on(s.append(PROMPT), 10) == expected[:10]
        with s.fork() as twin, s.fork() as third:
            assert goes_on(twin, 30) == goes_on(s, 30) == expected[10:]
            assert goes_on(third.append(OTHER), 20) == apart


def test_marks_are_returned_to(llm: quire.LLM) -> None:
    expected = greedy(llm, PROMPT, 40)
    llm.forget()
    with llm.session() as s:
        start = s.append(PROMPT).checkpoint()
        assert goes_on(s, 40) == expected
        assert goes_on(s.rewind(start), 5) == expected[:5]
        middle = s.checkpoint()
        s.append(OTHER)
        assert goes_on(s.rewind(middle), 35) == expected[5:]
        assert goes_on(s.rewind(start), 40) == expected


@pytest.mark.parametrize("back", [1, 2, 5, 17, 30, 70])
def test_rewinding_by_tokens(llm: quire.LLM, back: int) -> None:
    made = greedy(llm, PROMPT, 30)
    llm.forget()
    with llm.session() as s:
        goes_on(s.append(PROMPT), 30)
        rest = (PROMPT + made)[: 130 - back]
        assert s.rewind(-back).tokens == rest
        assert np.array_equal(s.logits(), llm.logits(rest)[-1])
        s.append((PROMPT + made)[130 - back :])
        assert s.tokens == PROMPT + made
        assert np.array_equal(s.logits(), llm.logits(PROMPT + made)[-1])


def test_rewinding_a_prompt(llm: quire.LLM) -> None:
    """Where no token was generated yet, so that a recurrent state stands at the prompt's end."""
    expected = greedy(llm, PROMPT[:-3], 20)
    llm.forget()
    with llm.session() as s:
        assert goes_on(s.append(PROMPT).rewind(-3), 20) == expected


def test_a_known_beginning_is_not_computed_again(llm: quire.LLM) -> None:
    longer = PROMPT + OTHER
    alone, expected = greedy(llm, PROMPT, 20), greedy(llm, longer, 20)
    assert greedy(llm, PROMPT, 20) == alone
    again = llm.generate(longer, max_tokens=20, ignore_eos=True)
    assert again.cached_tokens == len(PROMPT) and again.token_ids == expected
    same = llm.generate(longer, max_tokens=20, ignore_eos=True)
    assert same.cached_tokens >= len(PROMPT) and same.token_ids == expected


def test_a_kept_place_is_branched_off_from(llm: quire.LLM) -> None:
    expected = [greedy(llm, [*PROMPT, i], 12) for i in range(3, 6)]
    llm.forget()
    with llm.session() as s:
        s.append(PROMPT).keep()
        found = llm.generate([[*PROMPT, i] for i in range(3, 6)], max_tokens=12, ignore_eos=True)
    assert [c.token_ids for c in found] == expected
    assert {c.cached_tokens for c in found} == {len(PROMPT)}


def test_tokens_leave_the_middle_or_nothing_changes(llm: quire.LLM) -> None:
    with llm.session() as s:
        before = s.append(PROMPT).logits()
        if llm.engine.memory.can_shift:
            assert s.remove(3, 9).tokens == PROMPT[:3] + PROMPT[9:]
        else:
            with pytest.raises(RequestError, match=r"cannot move|cannot be taken out"):
                s.remove(3, 9)
            assert s.tokens == PROMPT and np.array_equal(s.logits(), before)


@pytest.mark.parametrize("manner", ["parked", "recomputed"])
@pytest.mark.host
def test_too_little_memory_for_all(
    folder: Path, manner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    swap = "1GiB" if manner == "parked" else 0
    with quire.load(folder, swap_space=swap) as llm:
        together = llm.generate(PROMPTS, max_tokens=30, ignore_eos=True)
        llm.forget()
        monkeypatch.setattr(llm.engine.room, "_seconds_per_token", lambda: 1e6)
        needed = _one_sequence(llm)
        llm.engine.compute.trim()  # only pages are to compete for what is left
        monkeypatch.setattr(llm.engine.compute, "pay", lambda _: None)
        llm.budget.reserve(llm.budget.free - needed * 5 // 2, "taken by the test")
        got = llm.generate(PROMPTS, max_tokens=30, ignore_eos=True)
        assert [c.token_ids for c in got] == [c.token_ids for c in together]
        assert llm.memory.as_dict()["preemption"][manner] > 0
        llm.memory.audit()


def _one_sequence(llm: quire.LLM) -> int:
    """Bytes that the longest of the prompts needs with what is generated behind it."""
    with llm.session() as s:
        goes_on(s.append(PROMPTS[-1]), 30)
        stats = llm.memory.as_dict()["stats"]
    llm.forget()
    return sum(group["bytes_committed"] for group in stats.values())
