"""Sampling: the tokens that the reference draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Draw, Refused
from quire.ops.cuda import drawing as cuts
from quire.ops.cuda.arrays import values_of
from quire.ops.reference import sampling as plain
from quire.ops.reference.sampling import Sampling
from tests.cuda.sides import GPU, cuda, reference

Floats = NDArray[np.float32]
SETTINGS = [
    Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=40, top_p=0.9), Sampling(1.3, top_p=0.95),
    Sampling(1.0, top_p=0.1), Sampling(2.5, min_p=0.02), Sampling(0.8, top_k=1),
    Sampling(0.8, top_k=100, min_p=0.1), Sampling(1.0, top_k=7, top_p=0.5, min_p=0.3),
    Sampling(1.5, top_k=3000, top_p=0.99), Sampling(30.0, top_p=0.999), Sampling(0.01),
]  # fmt: skip


def sampler(ops: Any, s: Sampling, counts: dict[int, int] | None = None) -> Any:
    ids = np.array([i for i, _ in s.bias], np.int32)
    values = np.array([v for _, v in s.bias], np.float32)
    made = ops.sampler(
        s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty,
        s.frequency_penalty, ids, values,
    )  # fmt: skip
    for token, count in (counts or {}).items():
        made.observe(np.full(count, token, np.int32))
        if count == 0:
            made.observe_prompt(np.array([token], np.int32))
    return made


def near_edge(x: Floats, s: Sampling, u: float) -> bool:
    """Whether rounding may decide otherwise than the reference."""
    wide = plain.candidates(x, Sampling(s.temperature, s.top_k))[1]
    if s.temperature and s.top_p < 1 and np.abs(np.cumsum(wide) - s.top_p).min() < 1e-9:
        return True
    if s.temperature and s.min_p and np.abs(wide / wide[0] - s.min_p).min() < 1e-9:
        return True
    score = np.sort(plain.race(*plain.candidates(x, s), u))[-2:]
    return bool(score[0] != score[-1] and score[0] > score[-1] * (1 - 1e-11))


def random_logits(rows: int, vocab: int, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def hostile(vocab: int) -> Floats:
    rng = np.random.default_rng(2)
    ties = rng.integers(-3, 4, vocab).astype(np.float32)
    holes = random_logits(1, vocab, 4)[0]
    holes[rng.random(vocab) < 0.7] = -np.inf
    one = np.full(vocab, -np.inf, np.float32)
    one[vocab // 2] = -5
    infinite = random_logits(1, vocab, 5)[0]
    infinite[[3, vocab - 1]] = np.inf
    zeros = np.where(np.arange(vocab) % 3 == 0, np.float32(-0.0), np.float32(0.0))
    steps = -np.floor(np.arange(vocab) / 10).astype(np.float32)
    rising = np.linspace(-40, 40, vocab, dtype=np.float32)
    return np.stack([ties * 0, ties, holes, one, infinite, zeros, steps, rising])


@pytest.mark.parametrize("vocab", [1, 17, 2503, 50_257] if GPU else [17, 2503])
def test_draws_are_the_references(vocab: int) -> None:
    x = random_logits(3, vocab)
    if vocab > 20:
        x = np.concatenate([x, hostile(vocab)])
    rng = np.random.default_rng(9)
    rows = np.repeat(np.arange(len(x), dtype=np.int32), 4 if GPU else 1)
    for s in SETTINGS[:: 1 if GPU else 3]:  # the interpreter takes its time
        u = rng.random(len(rows))
        u[::4], u[1::4] = 0.0, np.nextafter(1.0, 0.0)
        with np.errstate(invalid="ignore"):
            sure = {
                i: plain.sample(x[r], s, u[i])
                for i, r in enumerate(rows)
                if not near_edge(x[r], s, u[i])
            }
        got = cuda().sample(cuda().array(x), rows, [sampler(cuda(), s)] * len(rows), u)
        assert {i: int(got[i]) for i in sure} == sure, s


@pytest.mark.parametrize("vocab", [2503, 151_936] if GPU else [2503])
def test_cuts_leave_what_sorting_leaves(vocab: int) -> None:
    x = np.concatenate([random_logits(1, vocab, 8), hostile(vocab)])
    settings = [Sampling(0.9, top_k=30), Sampling(1.1, top_p=0.7), Sampling(2.0, 300, 0.9)]
    for turn in range(3 if GPU else 1):
        chosen = [settings[(row + turn) % 3] for row in range(len(x))]
        samplers = [sampler(cuda(), s) for s in chosen]
        machine, on_gpu = cuda().machine, values_of(cuda().array(x))
        draws = [Draw(one, 0.0) for one in samplers]
        choice = cuts.Choice.of(draws)
        columns = cuts.columns_of(machine, draws, choice, len(x), vocab)
        rows, _ = choice.given([machine.upload(column) for column in columns])
        assert rows is not None
        edges = cuts.edges_of(on_gpu, on_gpu.amax(1), choice, rows).cpu().numpy()
        bits = (x + 0.0).view(np.int32).astype(np.int64)
        places = np.where(bits < 0, -1 - bits, bits + 2**31)
        same = places == edges[:, :1]
        left = (places > edges[:, :1]) | (same & (np.cumsum(same, 1) <= edges[:, 1:]))
        for row, s in enumerate(chosen):
            with np.errstate(invalid="ignore"):
                want = set(plain.candidates(x[row], s)[0].tolist())
            assert set(np.flatnonzero(left[row] & (x[row] > -np.inf)).tolist()) == want, (row, s)


def test_bias_penalties_and_masks() -> None:
    rng = np.random.default_rng(6)
    x = random_logits(8, 700)
    allowed = rng.random(x.shape) < 0.5
    allowed[:, 690:] = True
    padded = np.zeros((8, 704), np.uint8)
    padded[:, :700] = allowed
    masks = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    settings, counts = [], []
    for row in range(8):
        bias = tuple((int(i), float(rng.normal() * 4)) for i in rng.choice(700, 5, replace=False))
        bias += ((int(x[row].argmax()), float("-inf")),)
        settings.append(Sampling(0.0 if row == 3 else 0.9, 50, 0.95, 0.01, 1.3, 0.4, 0.2, bias))
        counts.append({int(i): int(rng.integers(0, 5)) for i in np.argsort(-x[row])[:40]})
    x[5, 695], counts[5][695] = np.inf, 2
    rows, u = np.arange(8, dtype=np.int32), rng.random(8)
    for mask in (None, masks):
        got, want = (
            ops.sample(
                ops.array(x), rows,
                [sampler(ops, s, c) for s, c in zip(settings, counts, strict=True)], u, mask,
            )
            for ops in (cuda(), reference())
        )  # fmt: skip
        assert got.tolist() == want.tolist()


def test_drafts_that_are_taken_back_leave_nothing() -> None:
    """Tokens are seen and drawn with, one by one, and taken back, from before the first one on."""
    rng, sides = np.random.default_rng(0), (cuda(), reference())
    s = Sampling(0.0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9)
    both = [sampler(ops, s, {3: 0, 9: 0}) for ops in sides]

    def draw(likely: NDArray[np.int32]) -> None:
        x = random_logits(1, 64, int(rng.integers(1000)))
        x[0, likely] = x.max() + 0.1  # so that it shows whether they are penalised
        row = np.zeros(1, np.int32)
        drawn = [ops.sample(ops.array(x), row, [one], np.zeros(1)).item()
                 for ops, one in zip(sides, both, strict=True)]  # fmt: skip
        assert drawn[0] == drawn[1]

    for _ in range(4):
        draft = rng.integers(0, 64, 3).astype(np.int32)
        for i in range(3):
            draw(draft)
            for one in both:
                one.observe(draft[i : i + 1])
        draw(draft)
        for one in both:
            one.unobserve(draft)
        draw(draft)
        for one in both:
            one.observe(draft[:1])


def test_company_changes_nothing() -> None:
    x = random_logits(12, 2000)
    samplers = [sampler(cuda(), s) for s in SETTINGS]
    u, rows = np.random.default_rng(3).random(12), np.arange(12, dtype=np.int32)
    together = cuda().sample(cuda().array(x), rows, samplers, u)
    alone = [
        int(cuda().sample(cuda().array(x[[i]]), rows[:1], samplers[i : i + 1], u[[i]])[0])
        for i in range(12)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("top", [0, 1, 5, 200])
def test_logprobs(top: int) -> None:
    x = np.concatenate([np.delete(hostile(1003), 4, 0), random_logits(5, 1003)])
    ids = np.random.default_rng(0).integers(0, 1003, len(x)).astype(np.int32)
    got, want = (ops.logprobs(ops.array(x), ids, top) for ops in (cuda(), reference()))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=3e-7, atol=1e-6)


def test_mistakes_are_named() -> None:
    ops, x = cuda(), random_logits(3, 100)
    x[1, 99] = np.nan
    logits, rows, u = ops.array(x), np.arange(3, dtype=np.int32), np.zeros(3)
    samplers = [sampler(ops, Sampling())] * 3
    with pytest.raises(Refused, match="row 1 of the logits contains NaN"):
        ops.sample(logits, rows, samplers, u)
    with pytest.raises(Refused, match="row 1 of the logits contains NaN"):
        ops.logprobs(logits, rows, 2)
    nothing = np.zeros((1, 4), np.uint32)
    with pytest.raises(Refused, match=r"row 2: .* exclude every token"):
        ops.sample(logits, rows[2:], samplers[:1], u[:1], nothing)
    with pytest.raises(Refused, match="masks must be 32-bit words"):
        ops.sample(logits, rows[2:], samplers[:1], u[:1], nothing[:, :3].copy())
    with pytest.raises(Refused, match="outside the vocabulary"):
        ops.sample(
            logits, rows[:1], [sampler(ops, Sampling(presence_penalty=1.0), {100: 1})], u[:1]
        )
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"top_k": -1}):
        with pytest.raises(Refused, match=next(iter(wrong))):
            ops.sampler(**wrong)
