"""Sampling: parity with the reference on ordinary and hostile logits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import _cpu
from quire.ops.reference import sampling as reference
from quire.ops.reference.sampling import Sampling
from tests.ops.devices import ISAS

Floats = NDArray[np.float32]


@cache
def cpu(isa: str, threads: int = 2) -> _cpu.Cpu:
    return _cpu.Cpu(threads, isa)


def sampler(s: Sampling, counts: dict[int, int] | None = None) -> _cpu.Sampler:
    ids = np.array([i for i, _ in s.bias], np.int32)
    values = np.array([v for _, v in s.bias], np.float32)
    made = _cpu.Sampler(
        s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty,
        s.frequency_penalty, ids, values,
    )  # fmt: skip
    seen = [i for i, n in (counts or {}).items() for _ in range(n)]
    made.observe(np.array(seen, np.int32))
    made.observe_prompt(np.array([i for i, n in (counts or {}).items() if n == 0], np.int32))
    return made


def random_logits(rows: int, vocab: int, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def words(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def near_edge(x: Floats, s: Sampling, u: float) -> bool:
    """Whether rounding may decide otherwise than the reference: filters weigh in float32."""
    wide = reference.candidates(x, Sampling(s.temperature, s.top_k))[1]
    if s.temperature and s.top_p < 1 and np.abs(np.cumsum(wide) - s.top_p).min() < 1e-6:
        return True
    if s.temperature and s.min_p and np.abs(wide / wide[0] - s.min_p).min() < 1e-6:
        return True
    score = np.sort(reference.race(*reference.candidates(x, s), u))[-2:]
    return bool(score[0] != score[-1] and score[0] > score[-1] * (1 - 1e-12))


SETTINGS = [
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.7, top_k=40, top_p=0.9),
    Sampling(1.3, top_p=0.95),
    Sampling(1.0, top_p=0.1),
    Sampling(2.5, min_p=0.02),
    Sampling(0.8, top_k=1),
    Sampling(0.8, top_k=100, min_p=0.1),
    Sampling(1.0, top_k=7, top_p=0.5, min_p=0.3),
    Sampling(1.5, top_k=3000, top_p=0.99),
    Sampling(30.0, top_p=0.999),
    Sampling(0.01),
]


def hostile(vocab: int) -> dict[str, Floats]:
    """Rows on which selection by value, mass or order goes wrong easily."""
    rng = np.random.default_rng(2)
    ties = rng.integers(-3, 4, vocab).astype(np.float32)
    holes = random_logits(1, vocab, 4)[0]
    holes[rng.random(vocab) < 0.7] = -np.inf
    huge = (rng.standard_normal(vocab) * 1e38).astype(np.float32)
    one = np.full(vocab, -np.inf, np.float32)
    one[vocab // 2] = -5
    infinite = random_logits(1, vocab, 5)[0]
    infinite[[3, vocab - 1]] = np.inf
    zeros = np.where(np.arange(vocab) % 3 == 0, np.float32(-0.0), np.float32(0.0))
    steps = -np.floor(np.arange(vocab) / 10).astype(np.float32)
    return {
        "flat": np.zeros(vocab, np.float32), "ties": ties, "holes": holes, "huge": huge,
        "one": one, "infinite": infinite, "zeros": zeros, "steps": steps,
        "rising": np.linspace(-40, 40, vocab, dtype=np.float32),
        "tail": np.where(np.arange(vocab) == 9, np.float32(5), np.float32(-8)),
    }  # fmt: skip


def compare(x: Floats, settings: list[Sampling], per_row: int = 6) -> None:
    """Each row with each setting and several random numbers."""
    rng = np.random.default_rng(9)
    rows = np.repeat(np.arange(len(x), dtype=np.int32), per_row)
    for s in settings:
        u = rng.random(len(rows))
        u[::per_row] = 0.0
        u[1::per_row] = np.nextafter(1.0, 0.0)
        points = [(i, int(rows[i]), u[i]) for i in range(len(rows))]
        sure = {i: reference.sample(x[r], s, p) for i, r, p in points if not near_edge(x[r], s, p)}
        whole = [r for r in range(len(x)) if not near_edge(x[r], s, 0.5)]
        want = {r: reference.probabilities(x[r], s) for r in whole}
        for isa in ISAS:
            logits = cpu(isa).array(x)
            got = cpu(isa).sample(logits, rows, [sampler(s)] * len(rows), u)
            assert {i: int(got[i]) for i in sure} == sure, (isa, s)
            p = cpu(isa).probabilities(logits, rows[::per_row], [sampler(s)] * len(x))
            for r in whole:
                np.testing.assert_allclose(p[r], want[r], rtol=2e-5, atol=1e-7, err_msg=isa)


@pytest.mark.parametrize("vocab", [1, 17, 1000, 5003])
def test_random_logits(vocab: int) -> None:
    compare(random_logits(3, vocab), SETTINGS)


@pytest.mark.parametrize("vocab", [65, 4096])
def test_hostile_logits(vocab: int) -> None:
    with np.errstate(over="ignore"):
        compare(np.stack(list(hostile(vocab).values())), SETTINGS)


def test_a_large_vocabulary() -> None:
    x = random_logits(1, 151_936, 3)
    settings = [SETTINGS[i] for i in (1, 2, 3, 5, 10)]
    compare(np.concatenate([x, x * 0]), settings, per_row=4)


def test_bias_penalties_and_mask(isa: str) -> None:
    rng = np.random.default_rng(6)
    x = random_logits(8, 700)
    allowed = rng.random(x.shape) < 0.5
    allowed[:, 690:] = True
    settings, counts = [], []
    for row in range(8):
        bias = tuple((int(i), float(rng.normal() * 4)) for i in rng.choice(700, 5, replace=False))
        bias += ((int(x[row].argmax()), float("-inf")),)
        settings.append(Sampling(0.0 if row == 3 else 0.9, 50, 0.95, 0.01, 1.3, 0.4, 0.2, bias))
        counts.append({int(i): int(rng.integers(1, 5)) for i in np.argsort(-x[row])[:40]})
    samplers = [sampler(s, c) for s, c in zip(settings, counts, strict=True)]
    rows = np.arange(8, dtype=np.int32)
    u = rng.random(8)
    for masks, bits in ((None, None), (words(allowed), allowed)):
        got = cpu(isa).sample(cpu(isa).array(x), rows, samplers, u, masks)
        for row in range(8):
            keep = None if bits is None else bits[row]
            edited = reference.edit_logits(x[row], settings[row], counts[row], keep)
            assert got[row] == reference.sample(edited, settings[row], u[row])


@pytest.mark.parametrize("s", SETTINGS, ids=str)
def test_the_company_of_a_winner_changes_nothing(isa: str, s: Sampling) -> None:
    """Who wins among all wins among any of them: filters and masks only take others away."""
    draws, vocab = 200, 3000
    x, device = random_logits(1, vocab, 11), cpu(isa)
    logits, rows = device.array(x), np.zeros(draws, np.int32)
    rng = np.random.default_rng(5)
    u = rng.random(draws)
    every = device.sample(logits, rows, [sampler(Sampling(s.temperature))] * draws, u)
    left = device.sample(logits, rows, [sampler(s)] * draws, u)
    kept = device.probabilities(logits, rows[:1], [sampler(s)])[0] > 0
    assert kept[left].all()
    np.testing.assert_array_equal(left[kept[every]], every[kept[every]])
    allowed = rng.random((draws, vocab)) < 0.3
    allowed[rows, x.argmax()] = True
    plain = [sampler(Sampling(s.temperature))] * draws
    masked = device.sample(logits, rows, plain, u, words(allowed))
    assert allowed[np.arange(draws), masked].all()
    stays = allowed[np.arange(draws), every]
    np.testing.assert_array_equal(masked[stays], every[stays])


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_similar_distributions_mostly_draw_the_same(isa: str, noise: float) -> None:
    """At least (1 - d) / (1 + d) of the time, d being how far apart they are; (1 - d) is best."""
    draws = 5000
    x = random_logits(1, 500, 12)
    y = (x + np.random.default_rng(4).standard_normal(x.shape) * noise).astype(np.float32)
    d = np.abs(np.subtract(*(reference.probabilities(r[0], Sampling()) for r in (x, y)))).sum() / 2
    u, rows = np.random.default_rng(2).random(draws), np.zeros(draws, np.int32)
    plain = [sampler(Sampling())] * draws
    a, b = (cpu(isa).sample(cpu(isa).array(r), rows, plain, u) for r in (x, y))
    deviation = 4 * 0.5 / np.sqrt(draws)
    assert (1 - d) / (1 + d) - deviation < (a == b).mean() < 1 - d + deviation


def test_all_instruction_sets_draw_the_same() -> None:
    x = random_logits(4, 20_000, 13)
    rows = np.repeat(np.arange(4, dtype=np.int32), 100)
    u = np.random.default_rng(6).random(400)
    for s in (Sampling(1.0), Sampling(1.7, top_k=500), Sampling(1.0, min_p=0.01)):
        want = [reference.sample(x[r], s, p) for r, p in zip(rows, u, strict=True)]
        for isa in ISAS:
            got = cpu(isa).sample(cpu(isa).array(x), rows, [sampler(s)] * 400, u)
            assert got.tolist() == want, isa


def test_a_prompts_tokens_are_penalised_for_repetition_alone() -> None:
    x = random_logits(1, 50)
    s = Sampling(1.0, repetition_penalty=1.7, presence_penalty=1.0, frequency_penalty=0.5)
    made = sampler(s, {3: 2, 7: 0, 9: 0})
    made.observe(np.array([9], np.int32))
    made.unobserve(np.array([9], np.int32))
    device = cpu(ISAS[-1])
    got = device.probabilities(device.array(x), np.zeros(1, np.int32), [made])[0]
    edited = reference.edit_logits(x[0], s, {3: 2, 7: 0, 9: 0}, None)
    np.testing.assert_allclose(got, reference.probabilities(edited, s), rtol=1e-5)


def test_unobserve_takes_back() -> None:
    x = np.zeros((1, 50), np.float32)
    s = Sampling(1.0, presence_penalty=1.0, frequency_penalty=0.5)
    made = sampler(s, {3: 2, 4: 1, 49: 5})
    made.unobserve(np.array([3, 4, 49, 49], np.int32))
    device = cpu(ISAS[-1])
    got = device.probabilities(device.array(x), np.zeros(1, np.int32), [made])[0]
    edited = reference.edit_logits(x[0], s, {3: 1, 49: 3}, None)
    np.testing.assert_allclose(got, reference.probabilities(edited, s), rtol=1e-5)
    with pytest.raises(ValueError, match="token 4 was not observed"):
        made.unobserve(np.array([4], np.int32))


@pytest.mark.parametrize("s", [Sampling(1.5, top_k=21), Sampling(1.5), Sampling(1.5, top_p=0.9)])
@pytest.mark.parametrize("step", [0, 1])
def test_frequencies_follow_the_distribution(isa: str, s: Sampling, step: int) -> None:
    """Chi-squared over 20,000 draws: the 20 most likely and the rest, 45 is beyond p = 0.001.

    Both for random numbers and for neighbouring ones, which must not draw alike.
    """
    x = random_logits(1, 300, 8)
    order, p = reference.candidates(x[0], s)
    draws = 20_000
    u = np.arange(draws) / draws if step else np.random.default_rng(1).random(draws)
    rows = np.zeros(draws, np.int32)
    got = cpu(isa).sample(cpu(isa).array(x), rows, [sampler(s)] * draws, u)
    assert set(got) <= set(order)
    count = np.array([(got == token).sum() for token in order[:20]])
    count, want = np.append(count, draws - count.sum()), draws * np.append(p[:20], p[20:].sum())
    assert ((count - want) ** 2 / want).sum() < 45


def test_company_and_threads_change_nothing() -> None:
    x = random_logits(16, 2000)
    samplers = [sampler(SETTINGS[i % len(SETTINGS)]) for i in range(16)]
    u = np.random.default_rng(3).random(16)
    rows = np.arange(16, dtype=np.int32)[::-1].copy()
    device = cpu("auto", 1)
    alone = [
        int(device.sample(device.array(x[[i]]), rows[:1] * 0, [samplers[i]], u[[i]])[0])
        for i in range(16)
    ]
    device = cpu("auto", 3)
    got = device.sample(device.array(x), rows, samplers[::-1], u[::-1].copy())
    assert got.tolist() == alone[::-1]


def test_argmax(isa: str) -> None:
    x = np.stack([*hostile(999).values(), *random_logits(5, 999)])
    got = cpu(isa).argmax(cpu(isa).array(x))
    np.testing.assert_array_equal(got, x.argmax(1))


@pytest.mark.parametrize("top", [0, 1, 5, 200])
def test_logprobs(isa: str, top: int) -> None:
    cases = hostile(1003)
    del cases["infinite"]
    x = np.stack([*cases.values(), *random_logits(5, 1003)])
    ids = np.random.default_rng(0).integers(0, 1003, len(x)).astype(np.int32)
    got = cpu(isa).logprobs(cpu(isa).array(x), ids, top)
    with np.errstate(over="ignore"):
        want = reference.logprobs(x, ids, top)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=3e-7, atol=1e-6)


def test_mistakes_are_named(isa: str) -> None:
    device = cpu(isa)
    x = random_logits(3, 100)
    x[1, 99] = np.nan
    logits = device.array(x)
    rows, u = np.arange(3, dtype=np.int32), np.zeros(3)
    plain = [sampler(Sampling())] * 3
    for call, args in (
        (device.sample, (rows, plain, u)),
        (device.argmax, ()),
        (device.logprobs, (rows, 2)),
        (device.probabilities, (rows, plain)),
    ):
        with pytest.raises(ValueError, match="row 1 of the logits contains NaN"):
            call(logits, *args)
    assert device.sample(logits, rows[[0, 2]], plain[:2], u[:2]).shape == (2,)
    nothing = words(np.zeros((1, 100), bool))
    with pytest.raises(ValueError, match=r"row 2 .* exclude every token"):
        device.sample(logits, rows[2:], plain[:1], u[:1], nothing)
    with pytest.raises(ValueError, match=r"masks must be 32-bit words \[1, 4\]"):
        device.sample(logits, rows[2:], plain[:1], u[:1], nothing[:, :3].copy())
    with pytest.raises(ValueError, match=r"row 0 .* lies outside them"):
        device.sample(logits, rows[:1], [sampler(Sampling(presence_penalty=1.0), {100: 1})], u[:1])
    with pytest.raises(ValueError, match=r"uniform numbers must lie in \[0, 1\)"):
        device.sample(logits, rows[:1], plain[:1], np.ones(1))
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"top_k": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            _cpu.Sampler(**wrong)
