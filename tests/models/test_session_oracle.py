"""Whatever is done with sessions, they hold what their tokens say: see tests/session_world.py."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from tests import session_kinds
from tests.model_folders import model_folder
from tests.session_company import Company
from tests.session_crowd import Crowd
from tests.session_oracle import Oracle
from tests.session_truth import Truth


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def one_world(
    path: Path, kind: str, truth: Truth, seed: int, folder: Path, deeds: int,
    user: type[Oracle] = Oracle,
) -> int:  # fmt: skip
    """So many deeds in one tight model; how many there were in all, looks included."""
    rng = random.Random(seed)
    weights = truth.llm.model.weight_bytes
    settings: dict[str, Any] = session_kinds.tight(kind, rng, weights)
    speed = rng.choice([0.0, 1e-3, 1e6])  # whether parking or computing again seems sooner done
    drafts = seed % 4 == 0
    if drafts and "memory_budget" in settings:
        settings["memory_budget"] += weights
    llm = quire.load(path, **settings)
    llm.engine.room._seconds_per_token = lambda: speed
    draft = None
    if drafts:
        draft = quire.load(path, n_ctx=session_kinds.N_CTX, threads=1, beside=llm)
    oracle = user(llm, truth, seed, folder, draft=draft)
    oracle.run(deeds)
    if draft:
        draft.close()
    llm.close()
    assert llm.budget.used == 0, llm.budget.breakdown
    return len(oracle.log)


def many_worlds(
    kind: str, folder: Path, seeds: range, deeds: int, at_least: int = 0,
    user: type[Oracle] = Oracle,
) -> None:  # fmt: skip
    """One after the other, until there were enough deeds."""
    path = session_kinds.write(kind, folder)
    with quire.load(path, n_ctx=session_kinds.N_CTX, threads=1) as roomy:
        truth, done = Truth(roomy), 0
        for seed in seeds:
            done += one_world(path, kind, truth, seed, folder, deeds, user)
        assert done >= at_least


@pytest.mark.parametrize("kind", session_kinds.TIGHT)
def test_sessions_hold_what_their_tokens_say(kind: str, tmp_path: Path) -> None:
    many_worlds(kind, tmp_path, range(4), 120)


@pytest.mark.parametrize("kind", session_kinds.TIGHT)
def test_sessions_in_company_hold_what_their_tokens_say(kind: str, tmp_path: Path) -> None:
    many_worlds(kind, tmp_path, range(30, 32), 100, user=Company)


@pytest.mark.parametrize("kind", session_kinds.TIGHT)
def test_sessions_in_a_crowd_hold_what_their_tokens_say(kind: str, tmp_path: Path) -> None:
    many_worlds(kind, tmp_path, range(40, 43), 90, user=Crowd)


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "tiny-dense": {"type_k": "q8_0", "type_v": "q4_0", "kv_cache_demand_paged": False},
    "tiny-window": {"type_k": "q8_0", "swa_full": True, "activations": "f32"},
    "tiny-hybrid35": {"type_k": "bf16", "type_v": "q8_0", "activations": "f32"},
}


@pytest.mark.parametrize(
    "name",
    [*list(OTHER_SETTINGS)[:2], pytest.param("tiny-hybrid35", marks=pytest.mark.host)],
)
def test_other_settings_change_nothing_of_that(name: str, tmp_path: Path) -> None:
    """K and V of fewer bits, other pages, exact arithmetic; bits do not depend on pages."""
    path, chosen = model_folder(name, tmp_path), OTHER_SETTINGS[name]
    usual: dict[str, Any] = {"n_ctx": session_kinds.N_CTX, "threads": 1, **chosen}
    roomy = {setting: usual[setting] for setting in usual.keys() - {"kv_cache_demand_paged"}}
    with quire.load(path, **roomy) as plenty:
        room: dict[str, Any] = {"kv_cache_tokens": 192}
        if name == "tiny-hybrid35":
            room = {"memory_budget": plenty.model.weight_bytes + 6 * 2**20}
        with quire.load(path, page_tokens=32, swap_space="300KB", **room, **usual) as tight:
            Company(tight, Truth(plenty), 7, tmp_path).run(40)


@pytest.mark.slow
@pytest.mark.parametrize("user", [Company, Crowd])
@pytest.mark.parametrize("kind", session_kinds.TIGHT)
def test_sessions_in_company_for_long(kind: str, user: type[Oracle], tmp_path: Path) -> None:
    many_worlds(kind, tmp_path, range(200, 230), 250, user=user)


@pytest.mark.slow
@pytest.mark.parametrize("kind", session_kinds.TIGHT)
def test_sessions_hold_what_their_tokens_say_for_long(kind: str, tmp_path: Path) -> None:
    many_worlds(kind, tmp_path, range(100, 165), 320, at_least=20_000)
