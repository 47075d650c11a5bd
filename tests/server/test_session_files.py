"""Files of sessions: what a server saves by itself, what clients save, and that neither is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from quire.api.session import Session
from quire.memory.saved.write import Image
from quire.server import sessions
from quire.server.session import ServedSession
from tests.server.rig import DENSE, HYBRID, Rig, serving, turns
from tests.server.test_sessions import STORY, get, go_on


def test_a_save_that_failed_keeps_no_file(tmp_path: Path) -> None:
    with serving(tmp_path, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="own", prompt=STORY)
        rig.refused(400, "/v1/sessions/own/save", name="../own")
        go_on(rig, "own")
        assert (tmp_path / "own.quire").is_file()
        rig.http.delete("/v1/sessions/own")
        assert not (tmp_path / "own.quire").exists()


def test_what_cannot_be_saved_after_a_turn_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One on each turn, for as long as the disk is full."""
    folder = tmp_path / "sessions"
    with serving(folder, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="one")
        rig.complete("Once upon", 2, session_id="one")
        (folder / "one.quire").unlink()
        folder.rmdir()
        folder.touch()
        caplog.clear()
        rig.complete(" a time", 2, session_id="one")
        (told,) = [one for one in caplog.records if one.name == "quire.server"]
        assert "one could not be saved: one: cannot be saved: File exists" in told.getMessage()
        assert told.exc_info is None
        folder.unlink()
        rig.complete(" there", 2, session_id="one")
        assert (folder / "one.quire").is_file()


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_sessions_survive_a_restart(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="long", messages=turns("Hello there"))
        first = rig.chat("Hello there", session_id="long", max_tokens=8)
        said = first["choices"][0]["message"]["content"]
        assert (tmp_path / "long.quire").is_file()
    talk = ("Hello there", said, "And then?")
    with serving(tmp_path, model, save_sessions="turn") as rig:
        told = get(rig, "/v1/sessions/long")  # opened because it was asked for
        assert told["root"] == "long" and told["saved"] == "long"
        again = rig.chat(*talk, session_id="long", max_tokens=8)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"]
        assert told["checkpoints"] == []
        rig.llm.forget()
        assert again["choices"] == rig.chat(*talk, max_tokens=8)["choices"]
        rig.http.delete("/v1/sessions/long")
    assert not (tmp_path / "long.quire").exists()  # the server had saved it, nobody else


def test_a_file_that_a_client_named_stays_as_it_was_saved(tmp_path: Path) -> None:
    with serving(tmp_path, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="own", prompt=STORY)
        then = rig.post("/v1/sessions/own/save", name="then")["position"]
        go_on(rig, "own")
        now = get(rig, "/v1/sessions/own")["position"]
        rig.post("/v1/sessions", open="then", id="other")
        go_on(rig, "other")
    with serving(tmp_path, save_sessions="turn") as rig:  # those that go on are found by their ids
        assert get(rig, "/v1/sessions/own")["position"] == now > then
        assert get(rig, "/v1/sessions/other")["position"] > then
        assert rig.post("/v1/sessions", open="then", id="again")["position"] == then
        for id in ("own", "other", "again"):
            rig.http.delete(f"/v1/sessions/{id}")
    assert [file.name for file in tmp_path.iterdir()] == ["then.quire"]


def test_no_session_is_saved_over_another_ones_file(tmp_path: Path) -> None:
    with serving(tmp_path, save_sessions="turn") as rig:
        for id in ("own", "other"):
            rig.post("/v1/sessions", id=id, prompt=STORY)
        go_on(rig, "own")
        assert rig.refused(409, "/v1/sessions/other/save", name="own")["param"] == "name"
        rig.http.delete("/v1/sessions/own")
        rig.post("/v1/sessions/other/save", name="own")  # nobody has that id any more
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.quire", "own.quire"]


def test_no_new_session_takes_the_file_of_another(tmp_path: Path) -> None:
    """A server that saves sessions by itself would write over what somebody saved on purpose."""
    with serving(tmp_path, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="own", prompt=STORY)
        rig.post("/v1/sessions/own/save", name="kept")
        go_on(rig, "own")
        files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with serving(tmp_path, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="new", prompt="a")
        for id in ("kept", "own"):
            for path, body in (
                ("/v1/sessions", {}), ("/v1/sessions/new/fork", {}),
                ("/v1/sessions", {"open": "own" if id == "kept" else "kept"}),
            ):  # fmt: skip
                error = rig.refused(409, path, id=id, **body)
                assert (error["code"], error["param"]) == ("session_exists", "id")
                assert f"{{'open': '{id}'}}" in error["message"]
        error = rig.refused(409, "/v1/sessions/new/save", name="own")  # it is not in memory, but is
        assert error["param"] == "name"
        assert {name: (tmp_path / name).read_bytes() for name in files} == files
        rig.post("/v1/sessions", open="kept", id="kept")
        assert get(rig, "/v1/sessions/own")["position"] > len(rig.llm.encode(STORY))
    with serving(tmp_path) as rig:  # one that saves nothing by itself loses nothing
        rig.post("/v1/sessions", id="kept", prompt="a")


def test_no_new_session_takes_a_name_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, save_sessions="turn") as rig, ThreadPoolExecutor() as pool:
        rig.post("/v1/sessions", id="own", prompt=STORY)
        writing, end, real = threading.Event(), threading.Event(), ServedSession.save

        def save(self: ServedSession, path: Path, kept: bool) -> int:
            writing.set()
            assert end.wait(20)
            return real(self, path, kept)

        monkeypatch.setattr(ServedSession, "save", save)
        saved = pool.submit(rig.post, "/v1/sessions/own/save", name="kept")
        assert writing.wait(20)
        rig.refused(409, "/v1/sessions", id="kept")
        end.set()
        assert saved.result()["name"] == "kept"


@contextmanager
def deleting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile a session `own` is being deleted, afterwards it is.

    Its pages are given back between two steps, and its file is there until then.
    """
    rig.post("/v1/sessions", id="own", prompt=STORY)
    go_on(rig, "own")
    closing, end, real = threading.Event(), threading.Event(), Session.close

    def close(self: Session) -> None:
        closing.set()
        assert end.wait(20)
        real(self)

    with monkeypatch.context() as patched, ThreadPoolExecutor() as pool:
        patched.setattr(Session, "close", close)
        deleted = pool.submit(rig.http.delete, "/v1/sessions/own")
        try:
            assert closing.wait(20)
            yield
        finally:
            end.set()
        assert deleted.result().json()["deleted"]


def test_a_session_that_is_being_deleted_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, save_sessions="turn") as rig:
        with deleting(rig, monkeypatch):
            assert rig.http.get("/v1/sessions/own").status_code == 404
        assert rig.http.get("/v1/sessions/own").status_code == 404 and rig.pages() == 0


def test_who_opens_a_file_keeps_it_though_its_session_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, save_sessions="turn") as rig:
        with deleting(rig, monkeypatch):
            opened = rig.post("/v1/sessions", open="own", id="own")
        assert rig.http.get("/v1/sessions/own").json()["position"] == opened["position"]
        assert (tmp_path / "own.quire").is_file()


@pytest.mark.parametrize("deed", ["rewind", "save"])
def test_who_lacks_what_is_being_written_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    writing, go_on, write = threading.Event(), threading.Event(), Image.write

    def slowly(self: Image, io: BinaryIO) -> None:
        writing.set()
        assert go_on.wait(20)
        write(self, io)

    load = {"kv_cache_tokens": 192, "n_ctx": 192}
    with serving(tmp_path, load=load) as rig, ThreadPoolExecutor() as pool:
        rig.post("/v1/sessions", id="first", prompt=[300] * 110)
        rig.post("/v1/sessions/first/checkpoint", name="here")
        rig.post("/v1/sessions", id="second", prompt=[301] * 160)
        monkeypatch.setattr(Image, "write", slowly)
        saved = pool.submit(rig.post, "/v1/sessions/second/save")
        assert writing.wait(20)
        body = {"to": "here"} if deed == "rewind" else {"name": "other"}
        done = pool.submit(rig.http.post, f"/v1/sessions/first/{deed}", json=body)
        with pytest.raises(TimeoutError):
            done.result(0.2)
        go_on.set()
        assert done.result().status_code == 200 and saved.result()["position"] == 160


def test_what_a_files_own_model_says_of_it_is_told(tmp_path: Path) -> None:
    """Not what another one says, which it is not of."""
    load = {"memory_budget": "40MiB", "swap_space": 0}
    with serving(tmp_path, DENSE, HYBRID, load=load) as rig:
        rig.post("/v1/sessions", id="own", model="tiny-hybrid", prompt=[300] * 1000)
        rig.post("/v1/sessions/own/save", name="whole")
        data = bytearray((tmp_path / "whole.quire").read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "broken.quire").write_bytes(data)
        error = rig.refused(409, "/v1/sessions", open="broken")
        assert error["code"] == "session_file" and "another model" not in error["message"]
        rig.post("/v1/sessions/own/checkpoint")  # which cannot give way
        rig.post("/v1/memory/forget")
        rig.refused(404, "/v1/sessions", open="none")
        held = rig.http.get("/v1/memory").json()["shared"]["used_bytes"]
        compute = rig.state.models.by_name["tiny-hybrid"].llm.budget.breakdown["compute"]
        body = {"budget_bytes": held - compute + 80_000, "model": "tiny-hybrid"}
        assert rig.http.patch("/v1/memory", json=body).status_code == 200
        assert rig.refused(503, "/v1/sessions", open="whole")["code"] == "out_of_memory"


def test_a_name_that_becomes_an_id_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a file and the writing of it, which others' saves would write over."""
    with serving(tmp_path, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="own", prompt=STORY)
        real = sessions._of_a_session

        def slow(path: Path) -> bool:
            rig.post("/v1/sessions", id="new", prompt=STORY)
            return real(path)

        monkeypatch.setattr(sessions, "_of_a_session", slow)
        assert rig.refused(409, "/v1/sessions/own/save", name="new")["code"] == "session_exists"


def test_a_disk_that_fails_is_told_apart_from_a_file_that_is_wrong(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        rig.post("/v1/sessions", id="own", prompt="Once upon a time")
        (tmp_path / "wrong.quire").write_bytes(b"x" * 100)
        assert rig.refused(409, "/v1/sessions", open="wrong")["code"] == "session_file"
        (tmp_path / "file").touch()
        rig.state.sessions.folder = tmp_path / "file" / "folder"
        error = rig.refused(503, "/v1/sessions/own/save", name="kept")
        assert error["code"] == "session_file" and str(tmp_path) not in error["message"]
        rig.state.sessions.folder = tmp_path / "elsewhere"
        (tmp_path / "elsewhere" / "kept.quire").mkdir(parents=True)
        assert rig.refused(503, "/v1/sessions/own/save", name="kept")["code"] == "session_file"
        assert rig.post("/v1/sessions/own/save", name="other")["position"] == 5


@pytest.mark.parametrize("named", [None, "any"])
def test_a_session_of_the_second_model_is_found_without_its_name(
    tmp_path: Path, named: str | None
) -> None:
    """In memory, and in a file after a restart; on paths where any name is taken, with one too."""
    body = {"prompt": "a", "n_predict": 2, "session_id": "own", "model": named}
    body["logit_bias"] = [["It", -1.0]]
    with serving(tmp_path, DENSE, HYBRID, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="own", model="tiny-hybrid", prompt=STORY)
        assert rig.post("/completion", **body)["model"] == "tiny-hybrid"
    with serving(tmp_path, DENSE, HYBRID, save_sessions="turn") as rig:
        assert rig.post("/completion", **body)["model"] == "tiny-hybrid"
        rig.http.delete("/v1/sessions/own")
        assert rig.refused(404, "/completion", **body)["param"] == "session_id"
    with serving(tmp_path, DENSE, HYBRID, save_sessions="turn") as rig:
        rig.post("/v1/sessions", id="own", model="tiny-hybrid", prompt=STORY)
        go_on(rig, "own")
    with serving(tmp_path, DENSE, HYBRID, save_sessions="turn") as rig:
        chat = {"messages": turns("Hello"), "session_id": "own", "max_tokens": 2}
        for path, more in (("chat/completions", chat), ("completions", body)):
            wrong = {**more, "logit_bias": None, "model": None, "temperature": -1}
            assert rig.refused(400, f"/v1/{path}", **wrong)["param"] == "temperature"
        assert not rig.state.models.loaded  # nothing is read for what is refused
        assert rig.post("/v1/chat/completions", **chat)["model"] == "tiny-hybrid"
        error = rig.refused(409, "/v1/chat/completions", model="tiny-dense", **chat)
        assert error["code"] == "session_model" and error["param"] == "session_id"
        rig.refused(404, "/v1/chat/completions", model="any", **chat)


def test_one_that_was_saved_under_another_name_is_a_root_of_its_own(rig: Rig) -> None:
    rig.post("/v1/sessions", id="first", prompt="Once upon", ttl_s=1000)
    rig.post("/v1/sessions/first/fork", id="second")
    rig.post("/v1/sessions/second/save", name="third")
    opened = rig.post("/v1/sessions", open="third", id="third")
    assert (opened["parent"], opened["root"]) == (None, "third") and "expires" not in opened
    rig.post("/v1/sessions/second/save")
    rig.http.delete("/v1/sessions/second")
    again = rig.post("/v1/sessions", open="second", id="second")
    assert (again["parent"], again["root"]) == ("first", "first") and "expires" in again
    for id in ("first", "second", "third"):
        rig.http.delete(f"/v1/sessions/{id}")
