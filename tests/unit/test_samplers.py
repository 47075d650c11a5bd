"""Samplers on the host: each against its definition, and all of them in the engine's company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import quire
from quire.engine.host_sampler import HostSampler
from quire.errors import RequestError
from quire.ops.cpu import CpuOps
from quire.sampling import Sampling
from tests import tiny

OPS = CpuOps(1)
N = 200


def rows(count: int, seed: int = 0) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield (rng.standard_normal(N) * rng.uniform(0.5, 4)).astype(np.float32)


def sampler(breakers: frozenset[int] = frozenset(), **fields: Any) -> HostSampler:
    settings = Sampling(**{"temperature": 1.0, **fields})
    return HostSampler(settings, OPS.sampler(settings.temperature), breakers)


def left(one: HostSampler, row: np.ndarray, u: float = 0.0) -> set[int]:
    return set(np.flatnonzero(one.edit(row, None, u) > -np.inf).tolist())


def shares(row: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    x = row.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    return p / p.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_typical_keeps_what_is_about_as_surprising_as_the_mean(temperature: float) -> None:
    for row in rows(20):
        p = shares(row, temperature)
        far = np.abs(-np.log(p) - -(p * np.log(p)).sum())
        order = np.argsort(far, kind="stable")
        n = int((np.cumsum(p[order]) >= 0.6).argmax()) + 1
        got = left(sampler(typical_p=0.6, temperature=temperature), row)
        assert got == set(order[:n].tolist())


def test_top_n_sigma_keeps_what_is_near_the_best() -> None:
    for row in rows(20):
        x = row.astype(np.float64)
        expected = np.flatnonzero(x >= x.max() - 1.5 * x.std())
        assert left(sampler(top_n_sigma=1.5), row) == set(expected.tolist())
        assert left(sampler(top_n_sigma=1.5, temperature=3.0), row) == set(expected.tolist())


def test_the_usual_filters_are_the_devices_own() -> None:
    usual = {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3}
    device = OPS.sampler(1.3, 30, 0.8, 0.02)
    rng = np.random.default_rng(1)
    for row in rows(100):
        u = rng.random()
        plain = OPS.sample(OPS.array(row[None]), np.zeros(1, np.int32), [device], np.array([u]))
        assert sampler(**usual, logit_processors=[len_two]).choose(OPS, row, None, u) == plain[0]


def len_two(tokens: object, logits: object) -> None:
    """Changes nothing."""


def test_xtc_leaves_out_all_but_the_last_of_the_top_choices() -> None:
    always = sampler(xtc_probability=1.0, xtc_threshold=0.05)
    for row in rows(30):
        p = shares(row)
        top = [int(i) for i in np.argsort(-p) if p[i] >= 0.05]
        assert left(always, row) == set(range(N)) - set(top[:-1])
    some = sampler(xtc_probability=0.3, xtc_threshold=0.01)
    row = next(rows(1, seed=4))
    rng = np.random.default_rng(2)
    times = sum(len(left(some, row, rng.random())) < N for _ in range(2000))
    assert 500 < times < 700


def test_dry_counts_how_long_a_repetition_is() -> None:
    dry = {"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 2, "temperature": 0.0}
    row = np.zeros(N, np.float32)

    def penalties(prompt: list[int], breakers: frozenset[int] = frozenset(), **more: Any) -> dict:
        one = sampler(breakers, **{**dry, **more})
        one.observe_prompt(np.array(prompt[:3], np.int32))
        one.observe(np.array(prompt[3:], np.int32))
        edited = one.edit(row, None, 0.0)
        return {int(i): -float(edited[i]) for i in np.flatnonzero(edited)}

    assert penalties([1, 2, 3, 9, 1, 2]) == pytest.approx({3: 0.8})
    assert penalties([5, 1, 2, 3, 9, 5, 1, 2]) == pytest.approx({3: 1.6})
    assert penalties([1, 2, 3, 9, 8, 2]) == {}  # one token is no repetition yet
    assert penalties([1, 2, 3, 1, 2, 4, 9, 1, 2]) == pytest.approx({3: 0.8, 4: 0.8})
    assert penalties([5, 1, 2, 3, 9, 5, 1, 2], frozenset({1})) == {}
    assert penalties([5, 6, 1, 2, 3, 9, 5, 6, 1, 2], frozenset({6})) == pytest.approx({3: 0.8})
    assert penalties([1, 2, 3, 9, 1, 2], dry_penalty_last_n=4) == {}
    assert max(penalties([1] * 150, dry_base=1.0).values()) == pytest.approx(0.8)


@pytest.mark.parametrize("tau", [2.0, 4.0])
def test_mirostat_keeps_the_surprise(tau: float) -> None:
    one = sampler(mirostat=2, mirostat_tau=tau, mirostat_eta=0.2)
    rng = np.random.default_rng(3)
    bits = []
    for row in rows(600, seed=5):
        row *= 0.4  # about seven bits
        token = one.choose(OPS, row, None, rng.random())
        assert isinstance(token, int)
        p = shares(np.where(one.edit(row, None, 0.0) > -np.inf, row, -np.inf))
        bits.append(-np.log2(p[token]))
        one.observe(np.array([token], np.int32))
    assert np.mean(bits[100:]) == pytest.approx(tau, abs=0.3)


def test_what_was_tried_and_taken_back_leaves_no_trace() -> None:
    fields = {"mirostat": 2, "dry_multiplier": 1.0, "repetition_penalty": 1.3}
    one, other = sampler(**fields), sampler(**fields)
    for row in rows(20, seed=6):
        for s in (one, other):
            token = s.choose(OPS, row, None, 0.37)
            s.observe(np.array([token], np.int32))
        for try_ in rows(3, seed=7):
            one.choose(OPS, try_, None, 0.9)
            one.observe(np.array([3], np.int32))
        one.unobserve(np.array([3, 3, 3], np.int32))
        np.testing.assert_array_equal(one.edit(row, None, 0.5), other.edit(row, None, 0.5))


# -- in the engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[quire.LLM]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, tiny.Tiny(context=512))
    with quire.load(path) as loaded:
        yield loaded


ALL = {
    "temperature": 1.2, "seed": 7, "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5,
    "xtc_threshold": 0.02, "mirostat": 2, "dry_multiplier": 0.8, "repetition_penalty": 1.1,
    "max_tokens": 40, "ignore_eos": True,
}  # fmt: skip


def test_company_and_drafts_make_no_difference(llm: quire.LLM) -> None:
    prompts = ["abc abc abc", "xyz", "abc abc abc!"]
    alone = [llm.generate(p, **ALL).token_ids for p in prompts]
    assert [c.token_ids for c in llm.generate(prompts, **ALL)] == alone
    plain = llm.generate("abc", max_tokens=20, ignore_eos=True).token_ids
    stream = llm.stream("abc", max_tokens=20, ignore_eos=True)
    assert llm.generate(prompts[0], **ALL).token_ids == alone[0]
    list(stream)
    assert stream.completion.token_ids == plain
    for drafts in ("ngram", "early-exit", "lookahead"):
        assert llm.generate(prompts[0], speculate=drafts, **ALL).token_ids == alone[0]


def test_constraints_still_hold(llm: quire.LLM) -> None:
    done = llm.generate("a", constraint=quire.Regex("[ab]{30}"), **{**ALL, "ignore_eos": False})
    assert set(done.text) <= {"a", "b"} and len(done.text) == 30

    def wild(tokens: Any, logits: np.ndarray) -> None:
        logits[:] = 0.0
        logits[ord("z")] = 100.0

    done = llm.generate("a", constraint=quire.Regex("[ab]{5}"), logit_processors=[wild])
    assert set(done.text) <= {"a", "b"}


def test_processors_see_everything_and_decide(llm: quire.LLM) -> None:
    seen: list[list[int]] = []

    def count_up(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        out = np.full_like(logits, -np.inf)
        out[ord("0") + len(tokens) % 10] = 0.0
        return out

    done = llm.generate("ab", logit_processors=[count_up], max_tokens=5, ignore_eos=True)
    assert done.text == "23456"
    assert seen == [llm.encode("ab" + "23456"[:i]) for i in range(5)]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_processor_that_leaves_nothing_is_told(llm: quire.LLM, temperature: float) -> None:
    """No token comes that somebody has excluded."""

    def none(_: list[int], row: np.ndarray) -> None:
        row[:] = -np.inf

    def only_b(_: list[int], row: np.ndarray) -> None:
        row[np.arange(len(row)) != llm.encode("b", add_special=False)[0]] = -np.inf

    how: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 3}
    for processor, constraint in ((none, None), (only_b, quire.Regex("a"))):
        with pytest.raises(RequestError, match="exclude every token"):
            llm.generate("ab", logit_processors=[processor], constraint=constraint, **how)


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.filterwarnings("error")
def test_what_is_infinitely_likely_comes(llm: quire.LLM, temperature: float) -> None:
    """Also where only float32 has no room for it; of several, one."""
    wanted = llm.encode("xy", add_special=False)

    def force(_: list[int], row: np.ndarray) -> np.ndarray:
        made = row.astype(np.float64)
        made[wanted[0]], made[wanted[1]] = np.inf, 1e300
        return made

    how: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "max_tokens": 12}
    ways: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"typical_p": 0.5}, {"mirostat": 2}]
    for way in ways[: None if temperature else 1]:
        made = llm.generate("ab", logit_processors=[force], seed=3, **how, **way).token_ids
        assert set(made) <= set(wanted)
        assert temperature == 0 or way or len(set(made)) == 2


@pytest.mark.parametrize("wrong", [lambda t, x: 1 / 0, lambda t, x: x[:3], lambda t, x: x * np.nan,
                                   lambda t, x: np.full_like(x, -np.inf)])  # fmt: skip
def test_a_processor_that_fails_is_its_own_requests_error(llm: quire.LLM, wrong: Any) -> None:
    stream = llm.stream("hello", max_tokens=10, ignore_eos=True)
    with pytest.raises(RequestError):
        llm.generate("ab", logit_processors=[wrong], temperature=1.0)
    assert len(list(stream)) > 0 and stream.completion.finish_reason == "length"
    llm.memory.audit()


@pytest.mark.parametrize("odd", [
    {"typical_p": 0}, {"mirostat": 1}, {"xtc_threshold": 2}, {"dry_base": 0.5}, {"top_n_sigma": -1},
    {"dry_sequence_breakers": "x"}, {"dry_sequence_breakers": [""]}, {"logit_processors": [3]},
])  # fmt: skip
def test_odd_settings_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(odd))):
        Sampling(**odd)


def test_breakers_are_found_in_tokens(llm: quire.LLM) -> None:
    found = llm.engine.constrainer.tokens_with(("\n", ":"))
    assert found == {10, 58}
