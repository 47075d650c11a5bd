"""Several models on one budget, under load: loaded and given back again and again."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.models import Models
from tests.server.rig import DENSE, HYBRID, Rig, serving

MOE = DENSE.replace("tiny-dense", "tiny-moe")
NAMES = ["tiny-dense", "tiny-hybrid", "tiny-moe"]


def until(true: Any, within: float = 15.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


async def abort(http: httpx.AsyncClient, dice: random.Random) -> None:
    """A request to any of them, which is left after a while."""
    body: dict[str, Any] = {
        "model": dice.choice(NAMES), "prompt": [300 + dice.randrange(3)] * dice.choice([4, 300]),
        "max_tokens": dice.choice([2, 200]), "ignore_eos": True, "temperature": 0,
        "stream": dice.random() < 0.5,
    }  # fmt: skip
    path = "/v1/completions"
    if dice.random() < 0.2:
        path, body = (
            "/v1/sessions",
            {"model": body["model"], "prompt": body["prompt"], "ttl_s": 0.1},
        )
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(dice.expovariate(4)):
            async with http.stream("POST", path, json=body) as answer:
                told = await answer.aread()
                assert answer.status_code in (200, 201, 429, 503), told
                if answer.status_code == 503:
                    assert b"out_of_memory" in told or b"model_unavailable" in told


async def abort_all(url: str, count: int) -> None:
    dice, left = random.Random(5), iter(range(count))
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def worker() -> None:
            for _ in left:
                await abort(http, dice)
                await asyncio.sleep(dice.choice([0, 0, 0, 0.3]))

        await asyncio.gather(*(worker() for _ in range(8)))


def check(folder: Path, count: int, size: str) -> None:
    load = {"memory_budget": size, "n_ctx": 600}
    with serving(folder, DENSE, HYBRID, MOE, keep_alive_s=0.2, load=load) as rig:
        wanted = {name: rig.complete("It was", 12, model=name)["choices"] for name in NAMES}
        asyncio.run(abort_all(rig.url, count))
        until(lambda: not rig.state.runs and not rig.state.sessions.by_id)
        models, budget = rig.state.models, rig.state.models.budget
        assert budget is not None
        until(lambda: not models.loaded and not any(m.loading for m in models.by_name.values()))
        until(lambda: budget.used == 0)
        assert [model.users for model in models.by_name.values()] == [0, 0, 0]
        for name in NAMES:
            assert rig.complete("It was", 12, model=name)["choices"] == wanted[name]


def test_aborts_on_several_models(tmp_path: Path) -> None:
    check(tmp_path, 50, "64MiB")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["9MiB", "14MiB", "64MiB"])
def test_many_aborts_on_several_models(tmp_path: Path, size: str) -> None:
    check(tmp_path, 500, size)


def test_models_that_are_first_used_at_once_share_a_budget_and_a_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Models._loaded

    def loaded(self: Models, model: Any) -> Any:
        time.sleep(0.2)
        return real(self, model)

    monkeypatch.setattr(Models, "_loaded", loaded)
    with serving(tmp_path, DENSE, HYBRID) as rig:
        ask_both(rig)
        first, second = (model.llm for model in rig.state.models.loaded)
        assert first.budget.whole is second.budget.whole
        assert first.loop.seat is second.loop.seat


def ask_both(rig: Rig) -> None:
    """Two requests at the same time, one to each model."""
    threads = [
        threading.Thread(target=rig.complete, args=("A", 4), kwargs={"model": name})
        for name in NAMES[:2]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_model_that_is_asked_for_as_it_goes_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is given back before it is taken again."""
    with serving(tmp_path, DENSE, HYBRID, keep_alive_s=0.1, load={"memory_budget": "9MiB"}) as rig:
        wanted = rig.complete("A", 4)["choices"]
        closing = threading.Event()
        real = rig.llm.close

        def close() -> None:
            closing.set()
            time.sleep(0.3)
            real()

        monkeypatch.setattr(rig.llm, "close", close)
        assert closing.wait(10)
        assert rig.complete("A", 4)["choices"] == wanted


def test_what_one_model_keeps_for_later_gives_way_to_another(tmp_path: Path) -> None:
    """Cached prefixes and arrays of a model that has nothing to do."""
    load = {"memory_budget": "16MiB", "n_ctx": 2000}
    with serving(tmp_path, DENSE, HYBRID, load=load) as rig:
        long = [300 + (i * i) % 90 for i in range(1900)]
        wanted = rig.complete(long, 8, model="tiny-hybrid")["choices"]
        rig.state.models.by_name["tiny-hybrid"].llm.forget()
        for i in range(3):
            rig.complete([300 + i] + [301 + (i * j) % 90 for j in range(1500)], 2)
        kept = rig.llm.budget.used
        assert rig.complete(long, 8, model="tiny-hybrid")["choices"] == wanted
        assert rig.llm.budget.used < kept
        rig.llm.memory.audit()


def test_what_another_model_keeps_for_later_makes_no_context_small(tmp_path: Path) -> None:
    """However much of it there is when a model is loaded, and nobody said how long contexts are."""
    with serving(tmp_path, DENSE, HYBRID, load={"memory_budget": 14_500_000}) as rig:
        dense, hybrid = rig.state.models.by_name.values()
        rig.post("/v1/sessions", prompt=[7] * 20)
        for i in range(4):
            rig.complete([5 + i] * 200, 1)
            rig.complete("It was", 2, model="tiny-hybrid")
            assert (dense.llm.n_ctx, hybrid.llm.n_ctx) == (2048, 2048)
            rig.there(rig.state.models._unload(hybrid))


def test_what_gave_way_is_counted_when_a_model_comes_again(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID) as rig:
        model = rig.state.models.default
        rig.complete("It was", 2)
        model.llm.engine.room.counts["parked"] += 3
        told = 'num_preemptions_total{model_name="tiny-dense"} 3.0'
        assert told in rig.http.get("/metrics").text
        rig.there(rig.state.models._unload(model))
        assert told in rig.http.get("/metrics").text
        rig.complete("It was", 2)
        assert told in rig.http.get("/metrics").text


def test_who_is_to_stay_for_ever_gives_way_last(tmp_path: Path) -> None:
    """As with Ollama: whose time is over first goes first, whoever was used last."""
    with serving(tmp_path, DENSE, HYBRID, MOE, load={"n_ctx": 600}) as rig:
        sizes = {}
        for name in NAMES:
            rig.complete("It was", 2, model=name)
            sizes[name] = rig.http.get("/v1/memory").json()["shared"]["models"][name]
    room = sum(sizes.values()) - min(sizes.values()) // 2
    load = {"memory_budget": room, "n_ctx": 600}
    with serving(tmp_path, DENSE, HYBRID, MOE, load=load) as rig:
        first, second, third = NAMES
        rig.post("/api/generate", model=first, keep_alive=-1)
        rig.post("/api/generate", model=second)
        rig.post("/api/generate", model=first, prompt="A", options={"num_predict": 1}, stream=False)
        assert rig.state.models.by_name[first].keep_s == math.inf  # nothing was said of it
        rig.complete("It was", 2, model=second)
        rig.complete("It was", 2, model=third)
        assert {model.name for model in rig.state.models.loaded} == {first, third}
        rig.post("/api/generate", model=second, keep_alive=0)  # it is not there, and said is said
        rig.post("/api/generate", model=second)
        assert rig.state.models.by_name[second].keep_s is None


def test_what_another_model_keeps_for_later_does_not_keep_a_budget_large(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID, load={"memory_budget": "64MiB"}) as rig:
        for name in NAMES[:2]:
            rig.complete([300 + (i * i) % 90 for i in range(900)], 2, model=name)
        held = rig.http.get("/v1/memory").json()["shared"]["models"]
        weights = [model.llm.model.weight_bytes for model in rig.state.models.loaded]
        enough = sum(weights) + (1 << 20)
        assert sum(held.values()) > enough
        before = [model.llm.engine.memory.cached_bytes for model in rig.state.models.loaded]
        refused = rig.http.patch("/v1/memory", json={"budget_bytes": sum(weights)})
        assert refused.status_code == 409
        after = [model.llm.engine.memory.cached_bytes for model in rig.state.models.loaded]
        assert after == before and all(before)  # who cannot have it costs nobody anything
        body = {"budget_bytes": enough, "model": "tiny-dense"}
        assert rig.http.patch("/v1/memory", json=body).status_code == 200
        used = rig.http.get("/v1/memory").json()["shared"]["used_bytes"]
        assert used <= enough


def test_what_another_model_keeps_for_later_gives_way_to_a_file(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID, load={"memory_budget": "64MiB", "n_ctx": 1200}) as rig:
        rig.post("/v1/sessions", id="own", prompt=[300] * 1000)
        rig.post("/v1/sessions/own/save")
        rig.http.delete("/v1/sessions/own")
        rig.post("/v1/sessions", id="other", model="tiny-hybrid", prompt=[301] * 900)
        rig.post("/v1/memory/forget")
        loaded = [model.llm.budget.breakdown for model in rig.state.models.loaded]
        held = sum(size for uses in loaded for use, size in uses.items() if use != "compute")
        body = {"budget_bytes": held + 200_000}
        assert rig.http.patch("/v1/memory", json=body).status_code == 200
        assert rig.post("/v1/sessions", open="own", id="own")["position"] == 1000


@pytest.mark.parametrize("used", [False, True])
def test_a_model_that_cannot_be_loaded_costs_nobody_anything(tmp_path: Path, used: bool) -> None:
    """Neither one that nobody uses, nor what one in use keeps for later."""
    with serving(tmp_path, DENSE, HYBRID, load={"memory_budget": "6MiB"}) as rig:
        rig.complete("It was the best of times, it was the worst of times", 8)
        if used:
            rig.post("/v1/sessions", id="own", prompt="Once")
        before = rig.llm.engine.memory.cached_bytes
        assert before
        error = rig.refused(503, "/v1/completions", model="tiny-hybrid", prompt="A")
        assert error["code"] == "out_of_memory"
        assert [model.name for model in rig.state.models.loaded] == ["tiny-dense"]
        assert rig.llm.engine.memory.cached_bytes == before


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_who_waits_for_a_model_when_the_time_is_over_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level("INFO", "quire.requests")
    go_on, load = threading.Event(), Models._loaded

    def slowly(self: Models, model: Any) -> Any:
        go_on.wait(30)
        return load(self, model)

    monkeypatch.setattr(Models, "_loaded", slowly)
    body = {"prompt": "a", "model": "tiny-dense", "stream": True}
    with serving(tmp_path, DENSE, HYBRID, drain_s=0.2) as rig:
        with rig.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            rig.server.should_exit = True
            told = answer.read().decode()
        go_on.set()
    assert "the server ends" in told and '"status": 503' in caplog.text
    assert path == "/api/generate" or told.endswith("data: [DONE]\n\n")
