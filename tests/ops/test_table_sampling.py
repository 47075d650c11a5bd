"""Sampling through the table, beside its plain definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.ops import Ops, Refused
from tests.ops.devices import TABLES, table

Floats = NDArray[np.float32]
VOCAB = 83


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def logits(rows: int, seed: int = 0) -> Floats:
    return (3 * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


def draw(ops: Ops, x: Floats, sampler: Any, n: int, masks: Any = None) -> list[int]:
    """Many draws from one row."""
    rows, uniforms = np.zeros(n, np.int32), np.random.default_rng(1).random(n)
    repeated = None if masks is None else np.repeat(masks, n, 0)
    return ops.sample(ops.array(x[None]), rows, [sampler] * n, uniforms, repeated).tolist()


def mask(*allowed: int) -> NDArray[np.uint32]:
    words = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1 << token % 32)
    return words


def test_temperature_zero_takes_the_likeliest(ops: Ops) -> None:
    x = logits(5)
    x[3, [7, 50]] = 90
    picked = ops.sample(ops.array(x), ids(4, 3, 0), [ops.sampler(0.0)] * 3, np.zeros(3))
    assert picked.tolist() == [int(x[4].argmax()), 7, int(x[0].argmax())]


def test_draws_have_the_frequencies_of_softmax(ops: Ops) -> None:
    x = logits(1)[0]
    picked = np.bincount(draw(ops, x, ops.sampler(1.5), 4000), minlength=VOCAB) / 4000
    p = np.exp(x / 1.5 - (x / 1.5).max())
    assert np.abs(picked - p / p.sum()).max() < 0.03


@pytest.mark.parametrize(
    ("settings", "count"), [({"top_k": 5}, 5), ({"top_p": 0.6}, None), ({"min_p": 0.2}, None)]
)
def test_filters_leave_the_likeliest(ops: Ops, settings: dict[str, Any], count: int | None) -> None:
    x = logits(1, 3)[0]
    order = np.argsort(-x)
    p = np.exp(x - x.max())[order]
    if "top_p" in settings:
        count = int((np.cumsum(p) / p.sum() < 0.6).sum()) + 1
    if "min_p" in settings:
        count = int((p >= 0.2).sum())
    assert count is not None
    assert set(draw(ops, x, ops.sampler(**settings), 2000)) == set(order[:count].tolist())


def test_bias_penalties_and_masks(ops: Ops) -> None:
    x = np.zeros(VOCAB, np.float32)
    x[[3, 4, 5]] = 5, 4.5, 4.2
    biased = ops.sampler(0.0, bias_ids=ids(9), bias_values=np.array([6.0], np.float32))
    assert draw(ops, x, biased, 1) == [9]
    for settings in ({"presence_penalty": 0.6}, {"frequency_penalty": 0.6}):
        sampler = ops.sampler(0.0, **settings)
        sampler.observe_prompt(ids(3))
        assert draw(ops, x, sampler, 1) == [3]
        sampler.observe(ids(3))
        assert draw(ops, x, sampler, 1) == [4]
        sampler.unobserve(ids(3))
        assert draw(ops, x, sampler, 1) == [3]
    repeated = ops.sampler(0.0, repetition_penalty=1.15)
    repeated.observe_prompt(ids(3))
    assert draw(ops, x, repeated, 1) == [4]
    often = ops.sampler(0.0, frequency_penalty=0.4)
    often.observe(ids(3, 3, 3, 4))
    assert draw(ops, x, often, 1) == [5]
    assert draw(ops, x, ops.sampler(0.0), 1, mask(40, 82)) == [40]
    assert set(draw(ops, x, ops.sampler(1.0), 200, mask(40, 82))) == {40, 82}


def test_every_device_draws_the_same_tokens() -> None:
    """The same random numbers pick the same tokens, but where rounding decides."""
    x, rows, u = logits(4, 7), np.repeat(ids(0, 1, 2, 3), 100), np.random.default_rng(2).random(400)
    found = []
    for name in TABLES:
        ops = table(name)
        sampler = ops.sampler(0.8, 40, 0.95, 0.01, 1.1, 0.2, 0.1)
        sampler.observe(ids(5, 6, 6))
        found.append(ops.sample(ops.array(x), rows, [sampler] * 400, u))
    for other in found[1:]:
        assert (other != found[0]).sum() <= 1


def test_logprobs(ops: Ops) -> None:
    x = logits(3, 9)
    x[1, [8, 60]] = 30  # of equals the lower id comes first
    wide = x.astype(np.float64)
    p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    chosen, top, values = ops.logprobs(ops.array(x), ids(0, 82, 40), 6)
    np.testing.assert_allclose(chosen, p[[0, 1, 2], [0, 82, 40]], atol=1e-5)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :6]
    np.testing.assert_array_equal(top, order)
    np.testing.assert_allclose(values, np.take_along_axis(p, order, -1), atol=1e-5)
    none = ops.logprobs(ops.array(x), ids(0, 82, 40), 0)
    assert none[1].shape == none[2].shape == (3, 0)


def test_what_cannot_be_drawn_is_refused(ops: Ops) -> None:
    for settings in (
        {"temperature": -1.0}, {"temperature": np.nan}, {"top_k": -1}, {"top_p": 0.0},
        {"top_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0},
        {"presence_penalty": np.inf}, {"bias_ids": ids(1)},
        {"bias_ids": ids(-1), "bias_values": np.zeros(1, np.float32)},
    ):  # fmt: skip
        with pytest.raises(Refused):
            ops.sampler(**settings)
    x, plain, u = ops.array(logits(2)), ops.sampler(), np.zeros(1)
    far = ops.sampler(bias_ids=ids(VOCAB), bias_values=np.ones(1, np.float32))
    calls: list[tuple[Any, ...]] = [
        (x, ids(2), [plain], u), (x, ids(-1), [plain], u), (x, ids(0), [], u),
        (x, ids(0), [plain], u + 1), (x, ids(0), [plain], np.zeros(2)), (x, ids(0), [far], u),
        (x, ids(0), [plain], u, mask()), (x, ids(0), [plain], u, mask(1)[:, :2].copy()),
        (ops.array(np.full((1, VOCAB), np.nan, np.float32)), ids(0), [plain], u),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(Refused):
            ops.sample(*call)
    penalising = ops.sampler(presence_penalty=1.0)
    with pytest.raises(Refused):
        penalising.unobserve(ids(4))
    with pytest.raises(Refused):
        penalising.observe(ids(-4))
    for tokens, top in ((ids(0), 1), (ids(0, VOCAB), 1), (ids(0, 1), VOCAB + 1), (ids(0, 1), -1)):
        with pytest.raises(Refused):
            ops.logprobs(x, tokens, top)
