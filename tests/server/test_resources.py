"""What requests share: models, the budget, the queue."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.api import report
from quire.server import wire
from quire.server.admission import Admission
from quire.server.errors import ApiError
from tests.server.rig import DENSE, HYBRID, Rig, serving

LONG: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def names(rig: Rig) -> dict[str, bool]:
    return {m["id"]: m["loaded"] for m in rig.http.get("/v1/models").json()["data"]}


def until(true: Any, within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


def test_several_models_on_one_budget(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID, keep_alive_s=1.0) as rig:
        assert names(rig) == {"tiny-dense": False, "tiny-hybrid": False}
        first = rig.complete("It was", 4, model="tiny-hybrid")
        assert first["model"] == "tiny-hybrid" and names(rig)["tiny-hybrid"]
        assert rig.complete("It was", 4)["model"] == "tiny-dense"
        told = rig.http.get("/v1/memory", params={"model": "tiny-hybrid"}).json()
        assert {use.partition(":")[0] for use in told["breakdown"]} >= {"weights"}
        whole = [m.llm.budget.whole for m in rig.state.models.loaded]
        assert whole[0] is whole[1] and whole[0].used > told["used_bytes"]
        # Both at the same time.
        texts: list[str] = []
        ask = lambda model: texts.append(rig.complete("A", 30, model=model)["choices"][0]["text"])  # noqa: E731
        threads = [threading.Thread(target=ask, args=(m,)) for m in ("tiny-dense", "tiny-hybrid")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == 2
        # Given back when nobody uses them; a session keeps its own.
        rig.post("/v1/sessions", id="s", model="tiny-hybrid", prompt="It was")
        until(lambda: not names(rig)["tiny-dense"])
        assert names(rig)["tiny-hybrid"]
        rig.http.delete("/v1/sessions/s")
        until(lambda: not names(rig)["tiny-hybrid"])
        until(lambda: whole[0].used == 0)  # it is not loaded from when it begins to go
        assert rig.complete("It was", 4, model="tiny-hybrid")["choices"] == first["choices"]


def test_a_model_that_does_not_fit_takes_the_place_of_an_idle_one(tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID, load={"memory_budget": "9MiB"}) as rig:
        assert rig.complete("It was", 2)["choices"]
        assert rig.complete("It was", 2, model="tiny-hybrid")["choices"]
        assert names(rig) == {"tiny-dense": False, "tiny-hybrid": True}


def test_the_budget_changes_while_it_serves(tmp_path: Path) -> None:
    with serving(tmp_path, load={"memory_budget": "256MiB"}) as rig:
        text = rig.complete("It was a dark night", 12)["choices"]
        changed = rig.http.patch("/v1/memory", json={"budget_bytes": 64 << 20})
        assert changed.status_code == 200 and changed.json()["budget_bytes"] == 64 << 20
        assert rig.complete("It was a dark night", 12)["choices"] == text
        refused = rig.http.patch("/v1/memory", json={"budget_bytes": 1000})
        assert refused.status_code == 409
        message = refused.json()["error"]["message"]
        least = int(re.findall(r"at least ([\d,]+)$", message)[0].replace(",", ""))
        weights = rig.http.get("/v1/memory").json()["breakdown"]["weights"]
        assert "become 1,000 bytes" in message and f"weights {weights:,}" in message
        for budget, status in ((least - 1, 409), (least, 200), (64 << 20, 200)):
            assert rig.http.patch("/v1/memory", json={"budget_bytes": budget}).status_code == status
        assert rig.http.get("/v1/memory").json()["budget_bytes"] == 64 << 20
        for wrong in (0, -5, "much", None):
            assert rig.http.patch("/v1/memory", json={"budget_bytes": wrong}).status_code == 400


def test_parts_are_the_whole_of_what_is_told_of_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = itertools.count(500 << 20, 4096)  # a process grows between two looks
    monkeypatch.setattr(report, "process_memory", lambda: next(sizes))
    rig.post("/v1/sessions", id="seen", prompt=[300] * 100)
    told = rig.http.get("/v1/memory").json()
    assert sum(told["uses"].values()) == told["process_bytes"]
    assert sum(told["breakdown"].values()) == told["used_bytes"]
    assert sum(one["used_bytes"] for one in told["devices"].values()) == told["used_bytes"]
    for figures in told["stats"].values():
        assert figures["bytes_used"] + figures["bytes_wasted"] == figures["bytes_held"]
    rig.http.delete("/v1/sessions/seen")


@pytest.mark.host
def test_silence_is_broken_by_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PING_S", 0.1)
    with serving(tmp_path) as rig:
        real = rig.llm.engine.runner.forward

        def forward(plan: Any, lease: Any) -> Any:
            time.sleep(0.5)
            return real(plan, lease)

        rig.llm.engine.runner.forward = forward
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        text = rig.http.post("/v1/completions", json=body).text
        assert text.count(": ping\n\n") >= 4 and text.endswith("data: [DONE]\n\n")


@pytest.mark.host
def test_one_failure_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that breaks in an unforeseen way is told to whoever was in it, and others go on."""

    def broken(plan: Any, lease: Any) -> Any:
        raise ValueError("something nobody thought of")

    with serving(tmp_path) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(rig.llm.engine.runner, "forward", broken)
            answer = rig.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500 and "nobody" not in answer.text
        assert rig.complete("a", 4)["choices"]
        assert rig.pages() == 0


# -- the queue ----------------------------------------------------------------------------------


async def entered(queue: Admission, order: list[str], name: str, key: str, priority: int) -> None:
    async with queue.enter(key, priority, 1):
        order.append(name)
        await asyncio.sleep(0)


def served(waiting: list[tuple[str, str, int]]) -> list[str]:
    """In which order those in a queue are let in, one at a time."""

    async def main() -> list[str]:
        queue, order = Admission(1, 100), []  # type: ignore[var-annotated]
        async with queue.enter("z", 0, 1):
            tasks = [asyncio.create_task(entered(queue, order, *one)) for one in waiting]
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        assert queue.running == 0 and not queue.waiting
        return order

    return asyncio.run(main())


def test_first_come_first_served_within_a_key() -> None:
    assert served([("1", "a", 0), ("2", "a", 0), ("3", "a", 0)]) == ["1", "2", "3"]


def test_keys_take_turns() -> None:
    order = served([("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0)])
    assert order.index("b1") <= 1


def test_priority_orders_the_queue() -> None:
    assert served([("late", "a", 5), ("soon", "b", -5), ("then", "c", 0)]) == [
        "soon",
        "then",
        "late",
    ]


def test_who_leaves_the_queue_is_not_let_in() -> None:
    async def main() -> None:
        queue = Admission(1, 2)
        order: list[str] = []
        async with queue.enter("a", 0, 1):
            tasks = [asyncio.create_task(entered(queue, order, str(i), "a", 0)) for i in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as full:
                queue.check()
            assert full.value.status == 429
            tasks[0].cancel()
            await asyncio.gather(tasks[0], return_exceptions=True)
        await tasks[1]
        assert order == ["1"] and queue.running == 0
        queue.draining = True
        with pytest.raises(ApiError) as ending:
            queue.check()
        assert ending.value.status == 503 and ending.value.headers["Retry-After"]

    asyncio.run(main())


def test_many_answers_take_what_is_free_and_give_way() -> None:
    async def main() -> None:
        queue = Admission(4, 10)
        async with queue.enter("a", 0, 1), queue.enter("b", 0, 64) as wide:
            assert wide.answers == 3 and queue.running == 4
            order: list[str] = []
            late = asyncio.create_task(entered(queue, order, "late", "c", 0))
            await asyncio.sleep(0)
            wide.fit(going=2, more=61)
            assert wide.answers == 2 and queue.running == 4  # one is for whoever waited
            await late
            assert queue.running == 3
            wide.fit(going=0, more=61)
            assert wide.answers == 3 and queue.running == 4
            wide.fit(going=0, more=2)
            assert wide.answers == 2 and queue.running == 3
        assert order == ["late"] and queue.running == 0

    asyncio.run(main())


@pytest.mark.host
def test_a_late_key_is_served_between_anothers_requests(tmp_path: Path) -> None:
    """Over HTTP: one key fills the server, another asks once and does not wait for all of it."""
    with serving(tmp_path, max_running=1, api_keys=("greedy", "modest")) as rig:
        begun: list[Any] = []  # sequences, one after the other
        real = rig.llm.engine.runner.forward

        def forward(plan: Any, lease: Any) -> Any:
            time.sleep(0.005)
            if plan.entries[0].sequence not in begun[-1:]:
                begun.append(plan.entries[0].sequence)
            return real(plan, lease)

        rig.llm.engine.runner.forward = forward

        def ask(key: str, number: int) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": [300 + number] * 40, "max_tokens": 60, "ignore_eos": True}
            with httpx.Client(base_url=rig.url, timeout=60, headers=headers) as http:
                assert http.post("/v1/completions", json=body).status_code == 200

        threads = [threading.Thread(target=ask, args=("greedy", i)) for i in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: len(rig.state.admission.waiting) >= 6)
        last = threading.Thread(target=ask, args=("modest", 9))
        last.start()
        until(lambda: len({one.key for one in rig.state.admission.waiting}) == 2)
        before = len(begun)
        for thread in [*threads, last]:
            thread.join()
        owners = [sequence.owner for sequence in begun]
        modest = next(i for i, owner in enumerate(owners) if owner != owners[0])
        assert len(owners) == 9 and modest <= before + 1  # one may have been let in already


def test_a_model_that_cannot_be_loaded_is_not_the_clients_fault(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"nonsense")
    with serving(tmp_path, DENSE, str(broken)) as rig:
        error = rig.refused(503, "/v1/completions", model="broken", prompt="a")
        assert error["code"] == "model_unavailable" and str(tmp_path) not in error["message"]
        assert rig.complete("a", 1)["choices"]


def test_who_leaves_while_a_model_loads_leaves_a_loaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, DENSE, HYBRID) as rig:
        real = rig.state.models._loaded

        def slowly(model: Any) -> Any:
            time.sleep(0.5)
            return real(model)

        monkeypatch.setattr(rig.state.models, "_loaded", slowly)
        with pytest.raises(httpx.TimeoutException):
            rig.http.post("/v1/completions", json={"prompt": "a"}, timeout=0.2)
        until(lambda: names(rig)["tiny-dense"])
        assert rig.state.models.default.users == 0
        assert rig.complete("a", 1)["choices"]
