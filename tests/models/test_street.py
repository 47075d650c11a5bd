"""Two models on one budget, used by many at once, hold what their tokens say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import quire
from tests import session_kinds
from tests.flying import HostSteps
from tests.flying import flying as flying  # a fixture
from tests.model_folders import model_folder
from tests.models.test_session_oracle import surroundings as surroundings  # a fixture
from tests.session_market import Market
from tests.session_street import Street
from tests.session_truth import Truth

pytestmark = pytest.mark.host
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"type_k": "f32", "type_v": "bf16"},
    "window": {"type_v": "f32"},
    "moe": {"exact_batches": False, "page_tokens": 32},
    "hybrid": {"type_k": "f32", "type_v": "f16"},
    "recurrent": {},
    "tiny-dense": {"type_k": "q8_0", "type_v": "f32"},
    "tiny-window": {"type_k": "f32"},
    "tiny-moe": {"type_k": "f16", "type_v": "q4_0"},
    "tiny-hybrid": {"type_v": "q8_0"},
    "tiny-hybrid35": {"type_k": "q8_0", "type_v": "q8_0", "page_tokens": 32},
    "tiny-recurrent": {},
}
"""Those that are tiny were trained: more of what is drafted for them is right."""
NEXT_DOOR = {
    "dense": "window", "window": "hybrid", "moe": "dense", "hybrid": "moe", "recurrent": "dense",
    "tiny-dense": "tiny-hybrid", "tiny-hybrid35": "window",
}  # fmt: skip
ROOM = {
    "dense": 50e3, "window": 60e3, "moe": 70e3, "hybrid": 400e3, "recurrent": 2e6,
    "tiny-dense": 180e3, "tiny-window": 300e3, "tiny-moe": 500e3, "tiny-hybrid": 4e6,
    "tiny-hybrid35": 5e6, "tiny-recurrent": 6e6,
}  # fmt: skip
"""Bytes that make it tight, beside weights and arrays."""
ARRAYS = {
    "dense": 300e3, "window": 300e3, "moe": 400e3, "hybrid": 500e3, "recurrent": 1e6,
    "tiny-dense": 800e3, "tiny-window": 1.7e6, "tiny-moe": 2e6, "tiny-hybrid": 1.8e6,
    "tiny-hybrid35": 1.5e6, "tiny-recurrent": 2e6,
}  # fmt: skip


def write(kind: str, folder: Path) -> Path:
    """A small model of a kind."""
    if kind.startswith("tiny-"):
        return model_folder(kind, folder)
    return session_kinds.write(kind, folder)


def street(kind: str, folder: Path, seeds: range, deeds: int, user: type[Street] = Street) -> None:
    """So many deeds in each of some tight worlds."""
    other, usual = NEXT_DOOR.get(kind, "tiny-dense"), {"n_ctx": session_kinds.N_CTX, "threads": 1}
    path, beside = write(kind, folder), write(other, folder)
    with (
        quire.load(path, **usual, **SETTINGS[kind]) as plenty,
        quire.load(beside, **usual, **SETTINGS[other]) as more,
    ):
        truths = Truth(plenty), Truth(more)
        for seed in seeds:
            rng = random.Random(seed)
            room = rng.choice([1, 1.5, 3]) * ROOM[kind] + ARRAYS[kind] + ARRAYS[other]
            weights = plenty.model.weight_bytes + more.model.weight_bytes
            tight: dict[str, Any] = {
                "memory_budget": int(weights + room),
                "swap_space": rng.choice([0, int(ROOM[kind]), "1GiB", "1GiB"]),
            }  # fmt: skip
            speed = rng.choice([0.0, 1e-3, 1e6])
            with (
                quire.load(path, **tight, **usual, **SETTINGS[kind]) as llm,
                quire.load(beside, beside=llm, **usual, **SETTINGS[other]) as door,
            ):
                for one in (llm, door):
                    one.engine.room._seconds_per_token = lambda speed=speed: speed
                drafts = door if door.model.n_vocab == llm.model.n_vocab else None
                neighbours = (door, truths[1])
                user(llm, truths[0], seed, folder, next_door=neighbours, draft=drafts).run(deeds)
            assert llm.budget.used == 0, llm.budget.breakdown


@pytest.mark.parametrize(
    "kind", ["dense", "window", "recurrent", "tiny-moe", "tiny-hybrid", "tiny-hybrid35"]
)
def test_two_models_on_one_budget_hold_what_their_tokens_say(kind: str, tmp_path: Path) -> None:
    street(kind, tmp_path, range(1), 50)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_two_models_on_one_budget_for_long(kind: str, tmp_path: Path) -> None:
    street(kind, tmp_path, range(100, 130), 200)


@pytest.mark.parametrize("kind", ["dense", "hybrid", "tiny-window"])
def test_small_steps_and_files_that_travel(kind: str, tmp_path: Path) -> None:
    street(kind, tmp_path, range(200, 202), 50, Market)


@pytest.mark.parametrize("kind", ["moe", "tiny-dense"])
def test_small_steps_of_a_device_that_runs_ahead(
    kind: str, tmp_path: Path, flying: list[HostSteps]
) -> None:
    street(kind, tmp_path, range(300, 302), 50, Market)
    assert sum(steps.followed for steps in flying)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_small_steps_and_files_that_travel_for_long(
    kind: str, ahead: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if ahead:
        request.getfixturevalue("flying")
    street(kind, tmp_path, range(400, 420), 150, Market)
