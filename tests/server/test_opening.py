"""Saved sessions that are opened while others are served, and while clients come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.api.llm import LLM
from quire.errors import SessionFileError
from quire.memory.saved.read import Reading
from quire.server.sessions import Sessions
from tests.server.rig import DENSE, HYBRID, Rig, serving
from tests.server.test_leaving import send, until

STORY = "It was a dark night, and the old man went down to the river to look for his boat."


class Gate:
    """Stops those who read a file, before the first page, while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.waiting = self.opened = 0
        fill, open_one = Reading.fill, LLM.open

        def held(reading: Reading) -> None:
            self.waiting += 1
            assert self._open.wait(20), "nobody opens it"
            self.waiting -= 1
            fill(reading)

        def counted(*given: Any) -> Any:
            self.opened += 1
            return open_one(*given)

        monkeypatch.setattr(Reading, "fill", held)
        monkeypatch.setattr(LLM, "open", counted)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a session of each of two models, under their names."""
    made = tmp_path_factory.mktemp("saved")
    for name, model in (("dense", DENSE), ("hybrid", HYBRID)):
        with serving(made, model, save_sessions="drain") as rig:
            rig.post("/v1/sessions", id=name, prompt=STORY)
    (made / "broken.quire").write_bytes((made / "dense.quire").read_bytes()[:-1] + b"\x55")
    return made


@pytest.fixture
def opener(folder: Path) -> Iterator[Rig]:
    with serving(folder) as rig:
        yield rig
        for id in list(rig.state.sessions.by_id):
            rig.http.delete(f"/v1/sessions/{id}")
        assert rig.pages() == 0 and rig.state.models.default.users == 0


def ids(rig: Rig) -> list[str]:
    return list(rig.state.sessions.by_id)


def test_one_file_is_read_once_for_all_who_name_it(
    opener: Rig, gate: Gate, aside: ThreadPoolExecutor
) -> None:
    shown = [aside.submit(opener.http.get, "/v1/sessions/dense") for _ in range(2)]
    more = aside.submit(opener.complete, " And", 4, session_id="dense")
    until(lambda: gate.waiting)
    assert opener.complete("Something else", 6)["usage"]["completion_tokens"] == 6
    assert opener.http.get("/v1/memory").status_code == 200
    assert not any(each.done() for each in (*shown, more))
    gate.open()
    assert [each.result(20).json()["id"] for each in shown] == ["dense", "dense"]
    plain = opener.llm.encode(STORY) + opener.llm.encode(" And", add_special=False)
    assert more.result(20)["choices"][0]["text"] == opener.complete(plain, 4)["choices"][0]["text"]
    assert gate.opened == 1
    opener.state.sessions.by_id["dense"].kept = True  # its file stays for other tests


def test_a_client_that_leaves(opener: Rig, gate: Gate) -> None:
    """Whoever opens under a name of their own has opened nothing; what was named stays."""
    mine = send(opener, "/v1/sessions", open="dense", id="mine")
    named = send(opener, "/v1/completions", prompt="a", session_id="dense")
    until(lambda: gate.waiting == 2)
    mine.close()
    named.close()
    time.sleep(0.1)
    gate.open()
    until(lambda: ids(opener) == ["dense"] and not opener.state.sessions._tasks)
    assert opener.http.get("/v1/sessions/mine").status_code == 404
    assert opener.http.get("/v1/sessions/dense").json()["status"] == "idle"
    opener.state.sessions.by_id["dense"].kept = True


def test_two_who_want_the_same_id(opener: Rig, gate: Gate, aside: ThreadPoolExecutor) -> None:
    body = {"open": "dense", "id": "one"}
    both = [aside.submit(opener.http.post, "/v1/sessions", json=body) for _ in range(2)]
    until(lambda: gate.waiting == 2)
    gate.open()
    answers = [each.result(20) for each in both]
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    assert ids(opener) == ["one"]


def test_a_damaged_file(opener: Rig, gate: Gate, aside: ThreadPoolExecutor) -> None:
    both = [aside.submit(opener.http.get, "/v1/sessions/broken") for _ in range(2)]
    until(lambda: gate.waiting)
    gate.open()
    for each in both:
        error = each.result(20).json()["error"]
        assert each.result().status_code == 409 and error["code"] == "session_file"
        assert "checksum" in error["message"] and str(opener.state.sessions.folder) not in str(
            error
        )
    opener.refused(409, "/v1/sessions", open="broken")


def test_told_to_end_meanwhile(folder: Path, gate: Gate) -> None:
    with serving(folder) as rig:
        send(rig, "/v1/sessions", open="dense", id="late").close()
        until(lambda: gate.waiting)
        rig.server.should_exit = True
        rig._thread.join(0.3)
        assert rig._thread.is_alive() and rig.llm.budget.passing == 1  # it is waited for
        gate.open()


def test_too_little_memory(folder: Path, gate: Gate, aside: ThreadPoolExecutor) -> None:
    load = {"kv_cache_tokens": 96, "n_ctx": 96, "swap_space": "1MiB"}
    with serving(folder, load=load) as rig:
        ids = [300 + i for i in range(60)]
        opening = aside.submit(rig.http.get, "/v1/sessions/dense")
        until(lambda: gate.waiting)
        asked = aside.submit(rig.complete, ids, 20)  # there is room for one of the two
        time.sleep(0.2)
        assert not asked.done()
        gate.open()
        assert opening.result(20).status_code == 200
        assert asked.result(20)["usage"]["completion_tokens"] == 20
        rig.state.sessions.by_id["dense"].kept = True
    with serving(folder, load={"kv_cache_tokens": 16, "n_ctx": 16}) as rig:
        error = rig.refused(409, "/v1/sessions", open="dense")
        assert "context is 16" in error["message"]


def test_several_models(folder: Path, gate: Gate, aside: ThreadPoolExecutor) -> None:
    with serving(folder, DENSE, HYBRID) as rig:
        both = [aside.submit(rig.http.get, f"/v1/sessions/{id}") for id in ("dense", "hybrid")]
        until(lambda: gate.waiting)
        gate.open()
        assert [each.result(30).json()["model"] for each in both] == ["tiny-dense", "tiny-hybrid"]
        assert gate.opened == 2  # files say whose they are
        wrong = rig.refused(409, "/v1/completions", prompt="a", session_id="dense",
                            model="tiny-hybrid")  # fmt: skip
        assert wrong["code"] == "session_model"
        for session in rig.state.sessions.by_id.values():
            session.kept = True


def test_whoever_names_another_model_keeps_nobody_from_a_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch, aside: ThreadPoolExecutor
) -> None:
    tried, end, real = threading.Event(), threading.Event(), LLM.open

    def open_one(*given: Any) -> Any:
        tried.set()
        assert end.wait(20)
        return real(*given)

    monkeypatch.setattr(LLM, "open", open_one)
    with serving(folder, DENSE, HYBRID) as rig:
        body = {"prompt": "a", "max_tokens": 2, "session_id": "hybrid"}
        wrong = aside.submit(rig.refused, 409, "/v1/completions", model="tiny-dense", **body)
        assert tried.wait(20)
        right = aside.submit(rig.post, "/v1/completions", model="tiny-hybrid", **body)
        until(lambda: rig.state.models.by_name["tiny-hybrid"].users)
        time.sleep(0.1)
        end.set()
        assert right.result(20)["model"] == "tiny-hybrid"
        assert "another model" in wrong.result(20)["message"]
        rig.state.sessions.by_id["hybrid"].kept = True


def test_who_names_another_model_just_as_an_opening_fails_opens_it_anew(tmp_path: Path) -> None:
    """Before anybody was told that it failed: who waited for that again, would do so for ever."""
    (tmp_path / "y.quire").touch()
    models: list[Any] = [object(), object()]
    opened: list[Any] = []
    looked = 0

    class Failing(Sessions):
        async def _open(self, id: str, name: str, model: Any) -> Any:
            opened.append(model)
            await end.wait()
            raise SessionFileError("it is of another model")

        def path(self, name: str) -> Path:
            nonlocal looked
            looked += 1
            assert looked < 100, "it goes round and round"
            return super().path(name)

    async def both() -> list[Any]:
        sessions = Failing(no_models, tmp_path, False)
        first = asyncio.create_task(sessions.get("y", models[0]))
        await asyncio.sleep(0.01)
        end.set()
        return await asyncio.gather(first, sessions.get("y", models[1]), return_exceptions=True)

    no_models: Any = None
    end = asyncio.Event()
    assert list(map(type, asyncio.run(both()))) == [SessionFileError] * 2
    assert opened == models


def test_whoever_opens_a_file_keeps_nobody_from_its_session(
    opener: Rig, monkeypatch: pytest.MonkeyPatch, aside: ThreadPoolExecutor
) -> None:
    """Who only names it meanwhile reads the file too, and is told of the one that is there."""
    tried, end, real = threading.Event(), threading.Event(), LLM.open

    def open_one(*given: Any) -> Any:
        if not tried.is_set():
            tried.set()
            assert end.wait(20)
        return real(*given)

    monkeypatch.setattr(LLM, "open", open_one)
    shown = aside.submit(opener.http.get, "/v1/sessions/dense")
    assert tried.wait(20)
    opener.post("/v1/sessions", open="dense", id="dense")
    end.set()
    assert shown.result(20).json()["id"] == "dense" and ids(opener) == ["dense"]
    opener.state.sessions.by_id["dense"].kept = True
