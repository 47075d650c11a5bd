"""Drafts on every kind of model: the same output, and nothing computed twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.api.requests import Speculate
from quire.engine import drafting
from quire.speculate import DraftModel, EarlyExit, FirstOf, Lookahead, Ngram
from tests.speculation import always, counting, pages_held

__all__ = ["always"]
MODELS = Path(__file__).parents[1] / "data" / "models"
NAMES = sorted(p.parent.name for p in MODELS.glob("*/golden.json"))
WAYS = ["ngram", "lookahead", "early-exit", "draft model", "first of"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 11},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 1.2, "seed": 5, "top_k": 40, "presence_penalty": 0.5},
]


Pair = tuple[quire.LLM, quire.LLM]


@contextmanager
def loaded(name: str, **settings: Any) -> Iterator[Pair]:
    """A trained model, and another one that drafts for it on the same budget."""
    other = {"tiny-dense": "tiny-recurrent", "tiny-moe": "tiny-hybrid"}.get(name, "tiny-dense")
    with (
        quire.load(MODELS / name, **settings) as llm,
        quire.load(MODELS / other, beside=llm) as draft,
    ):
        yield llm, draft
        assert pages_held(llm) == pages_held(draft) == 0


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with loaded(request.param) as both:
        yield both


@pytest.fixture(scope="module", params=NAMES)
def on_host(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same where every step is Python that can be counted and broken: GPUs replay theirs."""
    with loaded(request.param, device="cpu") as both:
        yield both


@pytest.fixture(scope="module")
def text() -> str:
    return (MODELS / "validation.txt").read_text()


def way(name: str, draft: quire.LLM) -> Speculate:
    configured: dict[str, Speculate] = {
        "lookahead": Lookahead(window=3, ngram=4, pool=2),
        "early-exit": EarlyExit(layers=1),
        "later exit": EarlyExit(layers=2),
        "draft model": draft,
        "first of": FirstOf(Ngram(min_n=2), DraftModel(draft)),
    }
    return configured.get(name, name)


def tokens(llm: quire.LLM, prompt: str, **fields: Any) -> list[int]:
    return llm.generate(prompt, ignore_eos=True, **fields).token_ids


@pytest.mark.parametrize("name", WAYS)
def test_output_is_the_same(always, pair, text, name: str) -> None:
    llm, draft = pair
    for settings in SETTINGS[1:3]:
        plain = tokens(llm, text[:300], max_tokens=48, **settings)
        done = llm.generate(
            text[:300], ignore_eos=True, max_tokens=48, speculate=way(name, draft), **settings
        )
        assert done.token_ids == plain
        assert done.speculation is not None and done.speculation.rounds > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_long_greedy_output_is_the_same(always, pair, text, name: str) -> None:
    llm, draft = pair
    prompt = text[1000:1200]
    plain = tokens(llm, prompt, max_tokens=520)
    assert tokens(llm, prompt, max_tokens=520, speculate=way(name, draft)) == plain


def test_left_to_itself_output_is_the_same(pair, text) -> None:
    """Lengths that follow the clock change from run to run; the output does not."""
    llm, draft = pair
    plain = tokens(llm, text[:300], max_tokens=100)
    for name in WAYS:
        assert tokens(llm, text[:300], max_tokens=100, speculate=way(name, draft)) == plain


def test_a_batch_of_everything(always, pair, text) -> None:
    """Every way to draft beside each other, with prompts that come in between."""
    llm, draft = pair
    jobs = [
        (text[300 * i : 300 * i + 60 + 40 * i], name, SETTINGS[i % len(SETTINGS)])
        for i, name in enumerate([*WAYS, None, "later exit", *WAYS])
    ]
    alone = [tokens(llm, prompt, max_tokens=40, **settings) for prompt, _, settings in jobs]
    streams = []
    for prompt, name, settings in jobs:
        drafts = way(name, draft) if name else None
        made = llm.stream(prompt, ignore_eos=True, max_tokens=40, speculate=drafts, **settings)
        streams.append((made, iter(made)))
        next(streams[-1][1])
    for _, pieces in streams:
        list(pieces)
    assert [made.completion.token_ids for made, _ in streams] == alone
    llm.memory.audit()
    draft.memory.audit()


@pytest.mark.slow
def test_a_long_batch_of_everything(pair, text, monkeypatch) -> None:
    """Drafts of any length, from none on, side by side for as long as the context goes."""
    llm, draft = pair
    rng = random.Random(1)
    monkeypatch.setattr(
        drafting, "lengths", lambda choices, *_: [rng.randint(0, min(c.most, 6)) for c in choices]
    )
    n = min(520, llm.n_ctx - 90)
    jobs = [
        (text[300 * i : 300 * i + 80], name, SETTINGS[i % len(SETTINGS)])
        for i, name in enumerate([*WAYS, "later exit"])
    ]

    def all_tokens(drafts: bool) -> list[list[int]]:
        streams = [
            llm.stream(
                prompt, ignore_eos=True, max_tokens=n,
                speculate=way(name, draft) if drafts else None, **settings,
            )
            for prompt, name, settings in jobs
        ]  # fmt: skip
        for stream in streams:
            list(stream)
        return [stream.completion.token_ids for stream in streams]

    assert all_tokens(True) == all_tokens(False)


@pytest.mark.parametrize("name", ["ngram", "early-exit", "draft model", "first of"])
def test_rollback_moves_and_computes_nothing(always, on_host, text, name: str) -> None:
    """Rejected tokens are computed once, in vain; all others once, and no page is copied."""
    llm, draft = on_host
    llm.forget()
    draft.forget()
    with counting(llm) as ours, counting(draft) as theirs:
        done = llm.generate(
            text[:200], ignore_eos=True, max_tokens=100, speculate=way(name, draft),
            temperature=1.0, seed=7,
        )  # fmt: skip
    s = done.speculation
    assert s is not None and s.drafted > s.accepted
    rejected = s.drafted - s.accepted
    assert ours["tokens"] == done.prompt_tokens + len(done.token_ids) - 1 + rejected
    assert ours["rows"] == ours["tokens"] * llm.model.n_layers
    assert ours["copies"] == theirs["copies"] == 0
    if name == "draft model":
        assert 0 < theirs["tokens"] <= done.prompt_tokens + len(done.token_ids) + rejected


def test_forks_of_lookahead_copy_a_page_each_at_most(always, on_host, text) -> None:
    llm, _ = on_host
    llm.forget()
    with counting(llm) as counts:
        done = llm.generate(
            text[:200], ignore_eos=True, max_tokens=60, speculate=Lookahead(3, 3, 2)
        )
    s = done.speculation
    assert s is not None and s.accepted > 0
    pools = len(llm.memory.as_dict()["stats"])
    assert counts["copies"] <= s.rounds * (3 + 2 - 1) * pools


@pytest.mark.parametrize("name", WAYS)
def test_sessions_go_on_the_same(always, pair, text, name: str) -> None:
    """A session that drafted holds what one that did not holds."""
    llm, draft = pair
    with llm.session() as plain, llm.session() as drafted:
        for s, drafts in ((plain, None), (drafted, way(name, draft))):
            s.append(text[:150])
            mark = s.checkpoint()
            first = s.generate(max_tokens=20, ignore_eos=True, speculate=drafts).token_ids
            s.rewind(mark)
            assert s.generate(max_tokens=20, ignore_eos=True, speculate=drafts).token_ids == first
            s.append(text[150:200])
            s.generate(max_tokens=20, speculate=drafts, stop="e")
        assert plain.tokens == drafted.tokens
        assert (plain.logits() == drafted.logits()).all()


def test_nothing_is_held_after_aborts(always, pair, text) -> None:
    """Streams that are closed anywhere, and steps that fail, leave nothing behind."""
    llm, draft = pair
    rng = random.Random(3)
    for _ in range(3):
        open_streams = []
        for name in WAYS:
            start = rng.randrange(2000)
            made = llm.stream(
                text[start : start + 100], ignore_eos=True, max_tokens=60,
                speculate=way(name, draft),
            )  # fmt: skip
            open_streams.append((made, iter(made)))
        for made, pieces in rng.sample(open_streams, len(open_streams)):
            for _ in range(rng.randrange(8)):
                next(pieces, None)
            if rng.random() < 0.8:
                made.close()
        for made, _ in open_streams:
            made.close()
        llm.memory.audit()
        draft.memory.audit()
    assert pages_held(llm) == pages_held(draft) == 0


@pytest.mark.parametrize("name", WAYS)
def test_a_step_that_fails_changes_nothing(always, on_host, text, name: str) -> None:
    """Drafts of it are gone as well: the next step goes on as if it had not been."""
    llm, draft = on_host
    plain = tokens(llm, text[:200], max_tokens=40)
    made = llm.stream(text[:200], ignore_eos=True, max_tokens=40, speculate=way(name, draft))
    pieces = iter(made)
    next(pieces)
    for what in ("logits", "run"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.model, what, broken)
            with pytest.raises(ZeroDivisionError):
                llm.engine.step()
        llm.memory.audit()
        draft.memory.audit()
        next(pieces, None)
    list(pieces)
    assert made.completion.token_ids == plain


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError
