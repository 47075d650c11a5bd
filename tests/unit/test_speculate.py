"""Drafts over a tiny random model: endings, constraints, chances, tight memory, refusals."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.api.requests import Speculate
from quire.cli import main
from quire.engine.odds import Choice, Costs, Odds, lengths
from quire.errors import FileError, ModelError, RequestError
from quire.speculate import NAMES, DraftModel, EarlyExit, FirstOf, Lookahead, Ngram, NgramCache
from quire.speculate.ngram import Index, sequel
from tests import tiny
from tests.speculation import always, pages_held

__all__ = ["always"]
PROMPT = "abcabcabc xyz xyz abc"
WAYS = ["ngram", "lookahead", "early-exit", "draft model", "first of"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256, layers=3))
    return made


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model once more; it is loaded without its last layer where it shall be wrong."""
    made = tmp_path_factory.mktemp("model") / "draft.gguf"
    tiny.write(made, tiny.Tiny(context=256, layers=3))
    return made


@pytest.fixture(scope="module")
def pair(path: Path, draft_path: Path) -> Iterator[tuple[quire.LLM, quire.LLM]]:
    with quire.load(path) as llm, quire.load(draft_path, beside=llm, n_layer_exit=2) as draft:
        yield llm, draft
        assert pages_held(llm) == pages_held(draft) == 0


def way(name: str, draft: quire.LLM) -> Speculate:
    configured: dict[str, Speculate] = {
        "lookahead": Lookahead(window=2, ngram=3, pool=2),
        "early-exit": EarlyExit(layers=2),
        "draft model": draft,
        "first of": FirstOf(Ngram(min_n=2), DraftModel(draft)),
    }
    return configured.get(name, name)


def outcome(done: quire.Completion) -> tuple[Any, ...]:
    return done.token_ids, done.text, done.finish_reason, done.logprobs


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"max_tokens": 7, "logprobs": 2},
        {"stop": ["b"], "temperature": 1.0, "seed": 4},
        {"stop": ["zz", "ca", "q"], "temperature": 1.5, "seed": 8, "logprobs": 0},
        {"constraint": quire.Regex("(abc|xyz )*"), "max_tokens": 30},
        {"constraint": quire.Regex("(abc){3,5}"), "temperature": 1.0, "seed": 2},
        {"logit_bias": {258: 6.0}, "temperature": 1.0, "seed": 3},
        {"logit_bias": {258: 9.0}, "ignore_eos": True, "max_tokens": 20},
        {"max_tokens": 10_000, "ignore_eos": True},
    ],
    ids=str,
)
def test_endings_are_the_same(always, pair, name: str, fields: dict[str, Any]) -> None:
    llm, draft = pair
    plain = llm.generate(PROMPT, **fields)
    drafted = llm.generate(PROMPT, speculate=way(name, draft), **fields)
    assert outcome(drafted) == outcome(plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "constraint", [quire.Regex("[0-9a-f ]{60,}"), quire.Json({"type": "integer"})], ids=str
)
def test_a_model_drafts_within_the_constraint(always, path, constraint, temperature) -> None:
    """The same model drafts what the model says, whatever it may say."""
    fields = {"max_tokens": 40, "constraint": constraint, "temperature": temperature, "seed": 5}
    with quire.load(path) as llm, quire.load(path, beside=llm) as draft:
        plain = llm.generate(PROMPT, **fields)
        done = llm.generate(PROMPT, **fields, speculate=draft)
    assert outcome(done) == outcome(plain)
    s = done.speculation
    assert s is not None and s.rounds > 1
    assert s.accepted > 0.9 * s.drafted


@pytest.mark.parametrize("name", WAYS)
def test_sampled_tokens_have_the_models_distribution(always, pair, name: str) -> None:
    """Chi-squared over all runs of three tokens, of which drafts propose the second and third."""
    llm, draft = pair
    runs, kinds = 600, 4
    prompt = llm.encode(PROMPT)
    chances = joint(llm, prompt, kinds)
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, runs, 50):
        streams = [
            llm.stream(
                prompt, max_tokens=4, temperature=1.3, top_k=kinds, seed=seed, ignore_eos=True,
                speculate=way(name, draft),
            )
            for seed in range(start, start + 50)
        ]  # fmt: skip
        for stream in streams:
            list(stream)
            seen[tuple(stream.completion.token_ids[1:4])] += 1
    assert set(seen) <= set(chances)
    common = {run: p for run, p in chances.items() if p * runs >= 5}
    rest = runs - sum(seen[run] for run in common), 1 - sum(common.values())
    cells = [(seen[run], p) for run, p in common.items()] + [rest]
    chi2 = sum((n - p * runs) ** 2 / (p * runs) for n, p in cells)
    freedom = len(cells) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)  # five deviations above the mean


def joint(llm: quire.LLM, prompt: list[int], kinds: int) -> dict[tuple[int, ...], float]:
    """The exact chances of the second to fourth token together."""
    chances: Counter[tuple[int, ...]] = Counter()
    runs = {(): 1.0}
    for _ in range(4):
        grown: dict[tuple[int, ...], float] = {}
        for run, chance in runs.items():
            row = llm.logits([*prompt, *run])[-1].astype(np.float64) / 1.3
            top = np.argsort(-row, kind="stable")[:kinds]
            p = np.exp(row[top] - row[top].max())
            for token, share in zip(top.tolist(), p / p.sum(), strict=True):
                grown[(*run, token)] = chance * share
        runs = grown
    for run, chance in runs.items():
        chances[run[1:]] += chance
    return dict(chances)


@pytest.mark.parametrize("name", WAYS)
def test_too_little_memory_for_everybody(always, path, draft_path, name: str) -> None:
    prompts = [[i] * (20 + i) for i in range(8)]
    with quire.load(path) as roomy:
        wanted = [c.token_ids for c in roomy.generate(prompts, max_tokens=40, ignore_eos=True)]
    with (
        quire.load(path, kv_cache_tokens=160, swap_space=0) as llm,
        quire.load(draft_path, beside=llm, n_layer_exit=2) as draft,
    ):
        got = llm.generate(prompts, max_tokens=40, ignore_eos=True, speculate=way(name, draft))
        assert [c.token_ids for c in got] == wanted
        assert llm.memory.as_dict()["preemption"]["recomputed"] > 0
        assert pages_held(llm) == pages_held(draft) == 0


@pytest.mark.host
def test_a_draft_model_gives_way_to_the_model(always, path, draft_path) -> None:
    """On one budget, what drafts hold goes before anybody is preempted."""
    with quire.load(path) as roomy:
        wanted = roomy.generate([5] * 200, max_tokens=40, ignore_eos=True).token_ids
        weights = 2 * roomy.budget.breakdown["weights"]
    with (
        quire.load(path, memory_budget=weights + 200_000, n_ctx=256) as llm,
        quire.load(draft_path, beside=llm, n_ctx=256) as draft,
    ):
        done = llm.generate([5] * 200, max_tokens=40, ignore_eos=True, speculate=draft)
        assert done.token_ids == wanted
        assert not any(llm.memory.as_dict()["preemption"].values())
        assert pages_held(llm) == pages_held(draft) == 0
    assert llm.budget.used == 0


def test_statistics(always, pair) -> None:
    llm, draft = pair
    assert llm.generate(PROMPT, max_tokens=20).speculation is None
    done = llm.generate(PROMPT, max_tokens=60, ignore_eos=True, speculate=draft)
    s = done.speculation
    assert s is not None and 0 < s.accepted < s.drafted and 0 < s.rounds < 60
    assert s.accepted + s.rounds <= 60 <= s.accepted + s.rounds + 2
    assert s.mean_accepted == s.accepted / s.rounds
    assert min(s.draft_s, s.verify_s, s.rollback_s) > 0
    assert {"drafted", "accepted", "rounds", "mean_accepted"} <= set(s.as_dict())


def test_odds_learn_from_the_draft_that_was_made(always, path, monkeypatch) -> None:
    """A draft model whose memory can take back two tokens drafts two where five were wanted."""
    learned: list[tuple[int, int]] = []
    learn = Odds.learn
    monkeypatch.setattr(
        Odds, "learn", lambda odds, *draft: (learned.append(draft), learn(odds, *draft))
    )
    with quire.load(path) as llm, quire.load(path, beside=llm) as draft:
        monkeypatch.setattr(draft.engine.memory, "room_for_draft", lambda seq: 2)
        done = llm.generate(PROMPT, max_tokens=20, ignore_eos=True, speculate=draft)
    assert done.speculation is not None and done.speculation.accepted > 0
    assert learned and all(right <= drafted <= 2 for drafted, right in learned)


def test_what_cannot_be_is_refused(pair, path, tmp_path) -> None:
    llm, _ = pair
    with pytest.raises(RequestError, match="no-such-way"):
        llm.generate("x", speculate="no-such-way")
    with pytest.raises(RequestError, match="early-exit"):
        llm.generate("x", speculate=llm)
    with pytest.raises(RequestError, match="not 5"):
        llm.generate("x", speculate=5)
    for layers in (0, 3, -1):
        with pytest.raises(RequestError, match="3, so 1 to 2"):
            llm.generate("x", speculate=EarlyExit(layers))
    for wrong in ({"min_n": 0}, {"min_n": 4}, {"most": 0}):
        with pytest.raises(RequestError, match="Ngram"):
            Ngram(**wrong)
    with pytest.raises(RequestError, match="Lookahead"):
        Lookahead(window=0)
    with pytest.raises(RequestError, match="two"):
        FirstOf(Ngram())
    for wrong in ({"max_n": 2.5}, {"most": "4"}, {"cache": "file"}):
        with pytest.raises(RequestError, match=f"Ngram's {next(iter(wrong))}"):
            Ngram(**wrong)
    for wrong in (1.5, "2", True):
        with pytest.raises(RequestError, match="EarlyExit's layers"):
            EarlyExit(wrong)
    with pytest.raises(RequestError, match="Lookahead's pool"):
        Lookahead(pool=1.5)
    with pytest.raises(RequestError, match=r"some.gguf.*quire.load"):
        DraftModel("some.gguf")
    with pytest.raises(RequestError, match="no-such-way"):
        FirstOf("ngram", "no-such-way")
    with pytest.raises(FileError, match="missing"):
        NgramCache.load(tmp_path / "missing")
    with pytest.raises(RequestError, match="vocabulary of 7"):
        llm.generate("x", speculate=Ngram(cache=NgramCache.build([], 7)))
    with pytest.raises(RequestError, match="memory_budget"):
        quire.load(path, beside=llm, memory_budget="1GiB")


def test_several_ways_are_named_like_one(pair) -> None:
    _, draft = pair
    assert FirstOf("ngram", EarlyExit(1)).ways == (Ngram(), EarlyExit(1))
    drafts = FirstOf("lookahead", draft).ways[1]
    assert isinstance(drafts, DraftModel) and drafts.llm is draft


def test_a_model_of_one_layer_has_no_early_exit(tmp_path) -> None:
    tiny.write(tmp_path / "one.gguf", tiny.Tiny(context=64, layers=1))
    with (
        quire.load(tmp_path / "one.gguf") as llm,
        pytest.raises(RequestError, match="single layer"),
    ):
        llm.generate("x", speculate="early-exit")


def test_a_model_does_not_keep_its_draft_model_alive(always, path, draft_path) -> None:
    with quire.load(path) as llm:
        with quire.load(draft_path, beside=llm) as draft:
            done = llm.generate(PROMPT, max_tokens=9, ignore_eos=True, speculate=draft)
            assert done.speculation is not None and done.speculation.rounds > 0
        gone = weakref.ref(draft.model)
        del draft
        gc.collect()
        assert gone() is None
        assert set(llm.budget.breakdown) <= {"weights", "pages of attention", "compute"}
        llm.generate(PROMPT, max_tokens=9)


def test_a_draft_model_that_is_closed_drafts_no_more(always, path, draft_path) -> None:
    with quire.load(path) as llm, quire.load(draft_path, beside=llm) as draft:
        plain = llm.generate(PROMPT, max_tokens=30, ignore_eos=True).token_ids
        stream = llm.stream(PROMPT, max_tokens=30, ignore_eos=True, speculate=draft)
        pieces = iter(stream)
        next(pieces), next(pieces)
        draft.close()
        list(pieces)
        assert stream.completion.token_ids == plain
        with pytest.raises(RequestError, match="closed"):
            llm.generate(PROMPT, speculate=draft)


def test_draft_models_need_the_same_vocabulary(pair, tmp_path, monkeypatch) -> None:
    llm, _ = pair
    words = tiny.byte_tokens()
    words[65], words[66] = words[66], words[65]
    monkeypatch.setattr(tiny, "byte_tokens", lambda: words)
    tiny.write(tmp_path / "other.gguf", tiny.Tiny(context=256))
    with (
        quire.load(tmp_path / "other.gguf") as other,
        pytest.raises(RequestError, match="token 65") as refused,
    ):
        llm.generate("x", speculate=other)
    with pytest.raises(RequestError) as planned:
        quire.plan(llm.path, draft=tmp_path / "other.gguf")
    assert str(planned.value) == str(refused.value)


# -- n-grams ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 2))
def test_the_index_finds_the_latest_longest_match(tokens: list[int], min_n: int, more: int) -> None:
    index = Index(min_n, min_n + more)
    for end in range(1, len(tokens) + 1):
        known = tokens[:end]
        index.extend(known)
        expected = 0
        for n in range(min_n + more, min_n - 1, -1):
            places = [at for at in range(n, end) if known[at - n : at] == known[-n:]]
            if places and n < end:
                expected = places[-1]
                break
        place, matched = index.find(known)
        assert place == expected
        assert known[place - matched : place] == known[len(known) - matched :]


def test_a_sequel_goes_on_in_circles() -> None:
    assert sequel([1, 2, 3, 1, 2, 3, 1], 1, 8) == (2, 3, 1, 2, 3, 1, 2, 3)
    assert sequel([7, 7], 1, 4) == (7, 7, 7, 7)


def test_cache_files(pair, tmp_path) -> None:
    llm, _ = pair
    text = llm.encode("the quick brown fox. the quick brown dog. the quick brown fox.")
    cache = NgramCache.build([text], llm.tokenizer.n_vocab, n=4)
    assert cache.sequel(llm.encode("a the "), 6) == tuple(llm.encode("quick "))
    cache.save(tmp_path / "ngrams")
    again = NgramCache.load(tmp_path / "ngrams")
    assert again.sequel(llm.encode("a the "), 99) == cache.sequel(llm.encode("a the "), 99)
    assert len(again) == len(cache) > 10
    whole = (tmp_path / "ngrams").read_bytes()
    for damaged in (whole[:-1], whole[:20], whole[:-1] + b"\xff", b"", whole[:50] + whole[49:]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ModelError, match="damaged"):
            NgramCache.load(tmp_path / "damaged")
    for nowhere in (tmp_path / "no folder" / "ngrams", tmp_path):
        with pytest.raises(FileError, match="cannot be saved"):
            cache.save(nowhere)


def test_texts_of_n_grams_are_read_one_after_the_other() -> None:
    """All of them may be more than memory holds."""
    unread = iter([[1, 2], [99], [3, 4]])
    with pytest.raises(RequestError, match="outside a vocabulary"):
        NgramCache.build(unread, 64)
    assert list(unread) == [[3, 4]]


def test_a_cache_drafts_where_the_text_is_new(always, pair) -> None:
    llm, _ = pair
    prompt = llm.encode("q")
    plain = llm.generate(prompt, max_tokens=40, ignore_eos=True).token_ids
    cache = NgramCache.build([[*prompt, *plain]] * 2, llm.tokenizer.n_vocab, n=1)
    done = llm.generate(
        prompt, max_tokens=40, ignore_eos=True, speculate=Ngram(min_n=16, max_n=16, cache=cache)
    )
    assert done.token_ids == plain
    assert done.speculation is not None and done.speculation.accepted > 0


# -- how far to draft ---------------------------------------------------------------------------


def costs(*seconds: float) -> Costs:
    made = Costs()
    for _ in range(20):
        for tokens, value in enumerate(seconds, 1):
            made.add(tokens, value)
    return made


def test_lengths_follow_chances_and_costs() -> None:
    cheap, dear = costs(*[1 + 0.1 * i for i in range(20)]), costs(*range(1, 20))
    sure, unsure = Odds(0.9), Odds(0.1)

    def length(odds: Odds, prices: Costs, per_token: float = 0.0) -> int:
        return lengths([Choice(odds, 8, per_token, 0.0, "s")], 1, 1, prices)[0]

    assert length(sure, cheap) == 8
    assert length(sure, dear) == 0 and length(unsure, cheap) <= 1
    assert length(sure, cheap, per_token=2.0) == 0
    for _ in range(30):
        sure.learn(8, 3)
    assert length(sure, cheap) == 3


def test_a_batch_drafts_for_those_who_are_sure() -> None:
    chosen = lengths(
        [Choice(Odds(p), 6, 0.0, 0.0, "s") for p in (0.95, 0.1, 0.6)], 3, 3,
        costs(*[1 + 0.12 * i for i in range(30)]),
    )  # fmt: skip
    assert chosen[0] == 6 and chosen[1] == 0 and 0 < chosen[2] < 6


def test_of_several_ways_the_one_that_gains_most_is_taken() -> None:
    prices = costs(*[1 + 0.05 * i for i in range(20)])

    def chosen(*ways: tuple[float, float]) -> list[bool]:
        choices = [Choice(Odds(p), 6, each, 0.0, each, sequence="s") for p, each in ways]
        return [n > 0 for n in lengths(choices, 1, 1, prices)]

    assert chosen((0.9, 0.0), (0.9, 0.2)) == [True, False]
    assert chosen((0.1, 0.0), (0.9, 0.1)) == [False, True]
    assert chosen((0.8, 0.0), (0.8, 0.0)) == [True, False]
    assert chosen((0.1, 0.1), (0.2, 0.5)) == [False, False]


def test_a_way_that_was_passed_over_is_tried_again() -> None:
    """N-grams that failed come back when they are right, though another way does well."""
    ngrams, other = Odds(0.95), Odds(0.7)
    for _ in range(12):
        ngrams.learn(2, 0)
    prices = costs(*[1 + 0.05 * i for i in range(20)])
    taken = []
    for _ in range(400):
        ways = [(ngrams, 0.0), (other, 0.2)]
        asked = [(odds, each) for odds, each in ways if not odds.skip_this_step()]
        choices = [Choice(odds, 6, each, 0.0, each, sequence="s") for odds, each in asked]
        found = [
            (odds, n)
            for (odds, _), n in zip(asked, lengths(choices, 1, 1, prices), strict=True)
            if n
        ]
        assert len(found) <= 1
        for odds, n in found:
            odds.learn(n, n if odds is ngrams else min(n, 2))
            prices.add(1 + n, 1 + 0.05 * n)
            taken.append(odds)
        if not found:
            prices.add(1, 1.0)
    assert taken[0] is other
    assert taken[-50:].count(ngrams) > 40


def test_a_probe_that_has_to_catch_up_first_is_dear() -> None:
    prices = costs(1.0, 1.1, 1.2)

    def steps_until_tried(once: float) -> int:
        odds = Odds(0.05)
        for step in range(10_000):
            if lengths([Choice(odds, 2, 0.0, 0.0, "s", seconds_once=once)], 1, 1, prices)[0]:
                return step
            prices.add(1, 1.0)
        return 10_000

    assert steps_until_tried(50.0) > 1000 > steps_until_tried(0.0)


@pytest.mark.parametrize("wide", [1.05, 3.0])
def test_what_a_wide_step_costs_is_measured_early(wide: float) -> None:
    """Lookahead fills a step with twenty tokens: who knows whether that is dear here."""
    prices, odds = Costs(), Odds(0.3, 4)
    drafts, seconds = [], 0.0
    for step in range(1000):
        asked = not odds.skip_this_step()
        (n,) = lengths([Choice(odds, 2, 0.0, 0.0, "s", 20)], 1, 1, prices) if asked else (0,)
        took = wide if n else 1.0
        prices.add(1 + n + (20 if n else 0), took)
        seconds += took
        if n:
            drafts.append(step)
            odds.learn(n, 1)
    assert drafts[0] < 100
    if wide < 1.3:
        assert len(drafts) > 800
    else:
        assert seconds < 1.03 * 1000


@pytest.mark.parametrize(("price", "burst"), list(product((0.3, 3.0), (1, 4))))
def test_what_does_not_pay_is_tried_ever_more_rarely(price: float, burst: int) -> None:
    """Over a long time, trying costs little; and what begins to pay is found out."""
    prices, odds = costs(1.0, 1 + price / 2, 1 + price), Odds(0.9, burst)
    spent, rounds = 0.0, []
    for step in range(4000):
        (n,) = lengths([Choice(odds, 8, 0.0, 0.0, "s")], 1, 1, prices)
        prices.add(1 + min(n, 2), 1 + min(n, 2) * price / 2)
        if n:
            odds.learn(n, 0)
            spent += price
            rounds.append(step)
    assert spent < 0.05 * 4000
    assert len(rounds) > 3
    gaps = [b - a for a, b in pairwise(rounds)]
    assert gaps[-1] >= gaps[0]


def test_a_new_generation_knows_what_others_learned() -> None:
    elder = Odds(0.5)
    first = Odds(0.5, elder=elder)
    for _ in range(20):
        first.learn(4, 4)
    assert Odds(0.5, elder=elder).reach(1)[0] > 0.85
    assert Odds(0.5).reach(1)[0] == 0.5


def test_costs_move_with_the_machine() -> None:
    made = costs(1.0, 1.5, 2.0)
    for _ in range(60):
        made.add(1, 3.0)
    assert made.of(1) == pytest.approx(3.0, rel=0.05)
    assert 3.0 < made.of(3) < 8.0  # slower as well, though it was not measured
    assert made.of(1) <= made.of(2) <= made.of(3)
    assert made.stale(3) is False and made.of(10) > made.of(3)
    for _ in range(10):
        made.add(1, 3.0)
    assert made.stale(3)


def test_speculation_in_json(always, pair, path, tmp_path) -> None:
    words = ["run", "abcabcabcabc", "--raw", "-m", str(path), "-n", "30", "--json"]
    plain = json.loads(CliRunner().invoke(main, words).stdout)
    llm, _ = pair
    text = [*llm.encode("abcabcabcabc"), *plain["token_ids"]]
    NgramCache.build([text] * 2, llm.tokenizer.n_vocab).save(tmp_path / "ngrams")
    for how in (
        "ngram", "lookahead", "early-exit", "early-exit:1", f"ngram:{tmp_path / 'ngrams'}",
        str(path), "ngram+early-exit", f"ngram+{path}",
    ):  # fmt: skip
        made = json.loads(CliRunner().invoke(main, [*words, "--speculate", how]).stdout)
        assert made["token_ids"] == plain["token_ids"]
        assert made["speculation"]["rounds"] > 0
    assert plain["speculation"] is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no-such-way", "'no-such-way'"),
        ("ngram+erly-exit", "'erly-exit'"),
        ("ngram+", "''"),
        ("early-exit:two", "'two'"),
        ("early-exit:3", "1 to 2"),
        ("ngram:no-such-file", "no-such-file: the n-gram cache cannot be read"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_named(path, how: str, said: str) -> None:
    words = ["run", "abc", "--raw", "-m", str(path), "--speculate", how]
    wrong = CliRunner().invoke(main, words)
    assert wrong.exit_code != 0 and said in wrong.output
    if said[1:-1] in ("no-such-way", "erly-exit", ""):
        assert all(name in wrong.output for name in NAMES)
