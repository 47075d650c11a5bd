"""Requests are checked where they are made."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from quire.config import LoadConfig, parse_bytes
from quire.engine.generation import Generation, StopRules
from quire.errors import RequestError
from quire.types import Json, Sampling


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": -1},
        {"temperature": 1e308}, {"temperature": "hot"}, {"temperature": True},
        {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"top_k": -1}, {"top_k": 1.5},
        {"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": 2**40}, {"seed": -1},
        {"logprobs": -1}, {"logprobs": 10**9}, {"logit_bias": {-1: 0.0}},
        {"logit_bias": {3: math.nan}}, {"repetition_penalty": 0.0}, {"presence_penalty": math.nan},
    ],
)  # fmt: skip
def test_impossible_sampling_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        Sampling(**fields)


@pytest.mark.parametrize("one", [Sampling(), Sampling(seed=3, logit_bias={4: 1.0}), Json()])
def test_settings_travel(one: Sampling | Json) -> None:
    """To other processes, and as plain values."""
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)
    assert type(one)(**dataclasses.asdict(one)) == one


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="temprature"):
        Sampling().replace(temprature=1.0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), ("1.5 kib", 1536), (77, 77), ("12", 12)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4XB", 0, -3, True, "0"])
def test_bad_sizes_are_refused(text: Any) -> None:
    with pytest.raises(RequestError):
        parse_bytes(text)
    for setting, read in (
        ("memory_budget", lambda one: one.asked_bytes("cpu")),
        ("swap_space", LoadConfig.swap_bytes),
    ):
        if text not in (0, "0", True):
            with pytest.raises(RequestError, match=f"^{setting} is a number of bytes"):
                read(LoadConfig(**{setting: text}))


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 0},
        {"n_ctx": -1},
        {"page_tokens": 8},
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"activations": "f8"},
        {"moe_n_expert": 0},
        {"n_layer_exit": -1},
    ],
)
def test_bad_load_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        LoadConfig(**settings)


def test_random_numbers_depend_on_seed_and_place_alone() -> None:
    def draws(seed: int) -> list[float]:
        generation = Generation(Sampling(seed=seed), None, None, StopRules(frozenset(), 8))
        out = []
        for _ in range(200):
            out.append(generation.uniform())
            generation.token_ids.append(0)
        return out

    assert draws(7) == draws(7) != draws(8)
    assert all(0 <= u < 1 for u in draws(7))
    assert abs(sum(draws(7)) / 200 - 0.5) < 0.1
