"""Sessions as resources: what each call does, and that it moves no bytes it need not."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestError
from quire.server.live import look_at
from quire.server.session import ServedSession
from tests.server.rig import DENSE, HYBRID, Rig, serving, turns

STORY = "It was a dark night, and the old man went down to the river to look for his boat."
FIELDS = {
    "id", "object", "created", "model", "position", "status", "parent", "root", "checkpoints",
    "memory",
}  # fmt: skip


def get(rig: Rig, path: str) -> Any:
    answer = rig.http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def go_on(rig: Rig, id: str, prompt: Any = "", most: int = 6) -> str:
    return str(rig.complete(prompt, most, session_id=id)["choices"][0]["text"])


def test_what_a_session_is(rig: Rig) -> None:
    made = rig.http.post("/v1/sessions", json={"id": "one", "prompt": STORY, "notes": {"a": 1}})
    assert made.status_code == 201
    session = made.json()
    assert set(session) == FIELDS | {"notes"} and session["object"] == "session"
    assert session["position"] == len(rig.llm.encode(STORY))
    assert (session["status"], session["parent"], session["root"]) == ("idle", None, "one")
    assert set(session["memory"]) == {"bytes", "bytes_shared", "pages", "pages_shared"}
    assert get(rig, "/v1/sessions/one") == session
    assert session in get(rig, "/v1/sessions")["data"]
    assert get(rig, "/v1/sessions/one?tokens=1")["tokens"] == rig.llm.encode(STORY)
    gone = rig.http.delete("/v1/sessions/one")
    assert gone.json() == {"id": "one", "object": "session", "deleted": True}
    assert rig.http.get("/v1/sessions/one").status_code == 404


def test_completion_goes_on_and_stays(rig: Rig) -> None:
    rig.post("/v1/sessions", id="two", prompt=STORY)
    first = go_on(rig, "two")
    second = go_on(rig, "two", " Then")
    # What the model keeps are its own tokens, so it is the same as asking with them.
    ids = rig.llm.encode(STORY)
    alone = rig.llm.generate(ids, max_tokens=6, temperature=0, ignore_eos=True)
    assert first == alone.text
    ids += alone.token_ids + rig.llm.encode(" Then", add_special=False)
    assert second == rig.llm.generate(ids, max_tokens=6, temperature=0, ignore_eos=True).text
    usage = rig.complete("", 3, session_id="two")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
    rig.http.delete("/v1/sessions/two")


def test_fork_checkpoint_rewind(rig: Rig) -> None:
    rig.post("/v1/sessions", id="three", prompt=STORY)
    fork = rig.http.post("/v1/sessions/three/fork", json={"id": "branch"})
    assert fork.status_code == 201
    told = fork.json()
    assert (told["parent"], told["root"]) == ("three", "three")
    assert told["memory"]["pages_shared"] == told["memory"]["pages"]
    again = rig.post("/v1/sessions/branch/fork")
    assert (again["parent"], again["root"]) == ("branch", "three")
    mark = rig.http.post("/v1/sessions/three/checkpoint", json={"name": "here"})
    at = told["position"]
    assert mark.status_code == 201 and mark.json() == {
        "object": "session.checkpoint", "session_id": "three", "name": "here", "position": at
    }  # fmt: skip
    text = go_on(rig, "three")
    back = rig.post("/v1/sessions/three/rewind", to="here")
    assert back["position"] == at and back["checkpoints"] == [{"name": "here", "position": at}]
    assert go_on(rig, "three") == text == go_on(rig, "branch")
    assert rig.post("/v1/sessions/three/rewind", tokens=6)["position"] == at
    assert rig.post("/v1/sessions/three/append", prompt=" And so")["position"] > at
    assert rig.post("/v1/sessions/three/append", prompt=[300, 301])["position"] > at
    for id in ("three", "branch", again["id"]):
        assert rig.http.delete(f"/v1/sessions/{id}").status_code == 200


def test_chat_in_a_session_goes_back_to_the_common_beginning(rig: Rig) -> None:
    rig.post("/v1/sessions", id="talk")
    plain = rig.chat("Hello there", max_tokens=8)
    rig.llm.forget()
    first = rig.chat("Hello there", max_tokens=8, session_id="talk")
    assert first["choices"] == plain["choices"]
    said = first["choices"][0]["message"]["content"]
    position = get(rig, "/v1/sessions/talk")["position"]
    second = rig.chat("Hello there", said, "And then?", session_id="talk", max_tokens=8)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]
    assert get(rig, "/v1/sessions/talk")["position"] > position
    other = rig.chat("Hello you", session_id="talk", max_tokens=8)
    rig.llm.forget()
    assert other["choices"] == rig.chat("Hello you", max_tokens=8)["choices"]
    rig.http.delete("/v1/sessions/talk")


def test_refusals_change_nothing(rig: Rig) -> None:
    rig.post("/v1/sessions", id="four", prompt=STORY)
    before = get(rig, "/v1/sessions/four")
    rig.refused(409, "/v1/sessions", id="four")
    rig.refused(409, "/v1/sessions/four/fork", id="four")
    rig.refused(404, "/v1/sessions/nobody/fork")
    rig.refused(404, "/v1/sessions/four/rewind", to="nowhere")
    rig.refused(400, "/v1/sessions/four/rewind", tokens=10**6)
    rig.refused(400, "/v1/sessions/four/rewind", tokens=-1)
    rig.refused(400, "/v1/sessions/four/rewind")
    rig.refused(400, "/v1/sessions/four/append", prompt=[10**6])
    rig.refused(400, "/v1/sessions/four/append", prompt=[300] * 3000)
    rig.refused(400, "/v1/sessions", id="five", ttl_s=-1)
    rig.refused(400, "/v1/sessions", id="five", prompt=[300] * 3000)
    rig.refused(400, "/v1/completions", prompt=[300] * 3000, session_id="four")
    rig.refused(400, "/v1/completions", prompt="a", session_id="four", n=2)
    rig.refused(404, "/v1/completions", prompt="a", session_id="nobody")
    assert get(rig, "/v1/sessions/four") == before
    assert [s["id"] for s in get(rig, "/v1/sessions")["data"]] == ["four"]
    rig.http.delete("/v1/sessions/four")


BAD = ["../up", "/etc/passwd", "a/b", "a\x00b", "x" * 300, ".hidden", "", "a b", "ü", "-a"]


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_none(rig: Rig, name: str) -> None:
    rig.refused(400, "/v1/sessions", id=name)
    rig.refused(400, "/v1/sessions", open=name)
    rig.post("/v1/sessions", id="six", prompt="a")
    for verb in ("save", "checkpoint"):
        rig.refused(400, f"/v1/sessions/six/{verb}", name=name)
    rig.refused(400, "/v1/sessions/six/rewind", to=name)
    rig.refused(400, "/v1/completions", prompt="a", session_id=name)
    rig.http.delete("/v1/sessions/six")


def test_an_error_says_which_name_it_is_about(rig: Rig) -> None:
    rig.post("/v1/sessions", id="named")
    for status, verb, field, value in (
        (400, "fork", "id", ""), (409, "fork", "id", "named"), (400, "checkpoint", "name", "/"),
        (400, "rewind", "to", ".."), (404, "rewind", "to", "nowhere"), (400, "save", "name", ""),
    ):  # fmt: skip
        error = rig.refused(status, f"/v1/sessions/named/{verb}", **{field: value})
        assert error["param"] == field
    error = rig.refused(
        400, "/v1/chat/completions", messages=turns("a"), logprobs=True, top_logprobs=-1
    )
    assert error["param"] == "top_logprobs"
    rig.http.delete("/v1/sessions/named")


def test_links_are_not_followed(rig: Rig, tmp_path: Path) -> None:
    rig.post("/v1/sessions", id="seven", prompt=STORY)
    rig.post("/v1/sessions/seven/save", name="real")
    folder = rig.state.sessions.folder
    target = tmp_path / "target"
    os.rename(folder / "real.quire", target)
    os.symlink(target, folder / "real.quire")
    rig.refused(400, "/v1/sessions", open="real")
    rig.refused(400, "/v1/sessions/seven/save", name="real")
    assert rig.http.get("/v1/sessions/real").status_code == 400
    rig.http.delete("/v1/sessions/seven")


def test_save_and_open(rig: Rig) -> None:
    rig.post("/v1/sessions", id="eight", prompt=STORY)
    saved = rig.post("/v1/sessions/eight/save", name="kept")
    assert saved["object"] == "session.file" and saved["name"] == "kept"
    assert saved["bytes"] == (rig.state.sessions.folder / "kept.quire").stat().st_size
    assert saved["position"] == len(rig.llm.encode(STORY))
    text = go_on(rig, "eight")
    rig.http.delete("/v1/sessions/eight")
    opened = rig.http.post("/v1/sessions", json={"open": "kept", "id": "nine"})
    assert opened.status_code == 201 and opened.json()["saved"] == "kept"
    assert go_on(rig, "nine") == text
    rig.refused(404, "/v1/sessions", open="never-saved")
    (rig.state.sessions.folder / "broken.quire").write_bytes(b"nonsense")
    error = rig.refused(409, "/v1/sessions", open="broken")
    assert str(rig.state.sessions.folder) not in error["message"]
    rig.http.delete("/v1/sessions/nine")


def test_a_deleted_session_does_not_come_back(rig: Rig) -> None:
    rig.post("/v1/sessions", id="ten", prompt=STORY)
    rig.post("/v1/sessions/ten/save")
    rig.http.delete("/v1/sessions/ten")
    assert rig.http.get("/v1/sessions/ten").status_code == 404
    rig.post("/v1/sessions", open="ten", id="ten")  # but it can be opened: its file was kept
    rig.http.delete("/v1/sessions/ten")


def test_time_to_live(rig: Rig) -> None:
    made = rig.post("/v1/sessions", id="brief", prompt=STORY, ttl_s=0.5)
    assert made["expires"] <= time.time() + 1
    deadline = time.monotonic() + 5
    while rig.http.get("/v1/sessions").json()["data"] or rig.pages():  # first the one, then these
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_nothing_is_left(rig: Rig) -> None:
    assert rig.http.get("/v1/sessions").json()["data"] == []
    assert rig.pages() == 0


def test_one_that_is_closed_meanwhile_is_gone(rig: Rig) -> None:
    """Between a request that finds it and the engine that looks, somebody else may close it."""
    for id in ("stays", "goes"):
        rig.post("/v1/sessions", id=id, prompt=STORY)
    rig.state.sessions.by_id["goes"].session.close()
    assert [one["id"] for one in get(rig, "/v1/sessions")["data"]] == ["stays"]
    assert rig.http.get("/v1/sessions/goes").status_code == 404
    for verb, body in (("append", {"prompt": "a"}), ("fork", {}), ("checkpoint", {}), ("save", {})):
        error = rig.refused(404, f"/v1/sessions/goes/{verb}", **body)
        assert error["code"] == "session_not_found"
    model = rig.state.models.default
    seen = look_at(model, list(rig.state.sessions.by_id.values()))
    assert [one["id"] for one in seen.sessions] == ["stays"]
    for id in ("stays", "goes"):
        assert rig.http.delete(f"/v1/sessions/{id}").status_code == 200


def test_notes_that_cannot_be_copied_are_refused(rig: Rig) -> None:
    deep: Any = 1
    for _ in range(800):
        deep = [deep]
    rig.post("/v1/sessions", id="deep", notes={"a": deep})
    assert "notes" in rig.refused(400, "/v1/sessions/deep/fork")["message"]
    rig.http.delete("/v1/sessions/deep")


def test_a_session_of_a_file_does_not_live_for_ever(rig: Rig) -> None:
    """What a file says of its session is not trusted."""
    rig.post("/v1/sessions", id="ages")
    rig.state.sessions.by_id["ages"].ttl_s = 1e300
    rig.post("/v1/sessions/ages/save")
    rig.http.delete("/v1/sessions/ages")
    assert "expires" not in rig.post("/v1/sessions", open="ages", id="ages")
    rig.http.delete("/v1/sessions/ages")


@pytest.mark.parametrize("model", [DENSE, HYBRID])
@pytest.mark.host
def test_what_is_refused_or_fails_leaves_a_session_as_it_was(tmp_path: Path, model: str) -> None:
    """Whoever was told of an error asks again: nothing may be gone, nor be there twice."""
    load = {"memory_budget": "40MiB", "swap_space": 0, "n_ctx": 1500}
    with serving(tmp_path, model, load=load) as rig:
        rig.post("/v1/sessions", id="own")
        said = rig.chat("Hello there", session_id="own")["choices"][0]["message"]["content"]
        before = get(rig, "/v1/sessions/own?tokens=1")["tokens"]
        other = {"messages": turns("Something else"), "max_tokens": 120, "ignore_eos": True}
        wrong = {**other, "session_id": "own", "logit_bias": {"999999": 1}}
        rig.refused(400, "/v1/chat/completions", **wrong)
        assert get(rig, "/v1/sessions/own?tokens=1")["tokens"] == before
        rig.post("/v1/sessions", id="full", prompt=[300] * 1000)  # its mark cannot give way
        rig.post("/v1/sessions/full/checkpoint")
        rig.post("/v1/memory/forget")
        held = get(rig, "/v1/memory")
        room = held["used_bytes"] - held["breakdown"]["compute"] + 80_000
        assert rig.http.patch("/v1/memory", json={"budget_bytes": room}).status_code == 200
        rig.refused(503, "/v1/chat/completions", session_id="own", **other)
        assert get(rig, "/v1/sessions/own?tokens=1")["tokens"] == before
        body = {"prompt": "a", "session_id": "own", "max_tokens": 120, "ignore_eos": True}
        events = rig.events("/v1/completions", **body)
        assert len(events) > 2 and events[-2]["error"]["code"] == "out_of_memory"
        assert get(rig, "/v1/sessions/own?tokens=1")["tokens"] == before
        rig.http.delete("/v1/sessions/full")
        talk = ("Hello there", said, "And then?")
        again = rig.chat(*talk, session_id="own")["choices"]
        rig.llm.forget()
        assert again == rig.chat(*talk)["choices"]
        rig.http.delete("/v1/sessions/own")
        assert rig.pages() == 0


def break_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, *at: int) -> None:
    """Some of the steps from now on fail."""
    real, steps = rig.llm.engine.runner.forward, itertools.count()

    def forward(plan: Any, lease: Any) -> Any:
        if next(steps) in at:
            raise error
        return real(plan, lease)

    monkeypatch.setattr(rig.llm.engine.runner, "forward", forward)


@pytest.mark.parametrize("model", [DENSE, HYBRID])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.host
def test_a_step_that_breaks_leaves_a_session_as_it_was(
    tmp_path: Path, model: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an unforeseen way, in the middle of an answer: that is an error as any other."""
    with serving(tmp_path, model) as rig:
        rig.post("/v1/sessions", id="own", prompt=STORY)
        before = get(rig, "/v1/sessions/own?tokens=1")["tokens"]
        break_steps(rig, monkeypatch, ValueError("nobody thought of it"), 4)
        body = {"prompt": " Then", "max_tokens": 9, "session_id": "own", "stream": stream}
        assert "internal_error" in rig.http.post("/v1/completions", json=body).text
        monkeypatch.undo()
        assert get(rig, "/v1/sessions/own?tokens=1")["tokens"] == before
        assert go_on(rig, "own", " Then") == rig.complete(STORY + " Then", 6)["choices"][0]["text"]
        rig.http.delete("/v1/sessions/own")
        assert rig.pages() == 0


@pytest.mark.host
def test_a_turn_that_failed_holds_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot go back to any position marks where the next turn is likely to begin."""
    with serving(tmp_path, HYBRID) as rig:
        rig.post("/v1/sessions", id="own")
        said = rig.chat("Hello there", session_id="own")["choices"][0]["message"]["content"]
        before = get(rig, "/v1/sessions/own?tokens=1")["tokens"]
        break_steps(rig, monkeypatch, ValueError("nobody thought of it"), 4)
        talk = turns("Hello there", said, "And then? " * 40)
        body = {"messages": talk, "session_id": "own", "ignore_eos": True}
        assert rig.http.post("/v1/chat/completions", json=body).status_code == 500
        monkeypatch.undo()
        assert get(rig, "/v1/sessions/own?tokens=1")["tokens"] == before
        marks = rig.state.sessions.by_id["own"].session.marks.values()
        assert all(before[: len(mark.tokens)] == list(mark.tokens) for mark in marks)
        rig.http.delete("/v1/sessions/own")


@pytest.mark.host
def test_whoever_hears_of_an_error_may_ask_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = ServedSession.settle

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        settle(*args)

    with serving(tmp_path) as rig:
        rig.post("/v1/sessions", id="own", prompt=STORY)
        break_steps(rig, monkeypatch, RequestError("it cannot go on"), 4, 5)  # once more, alone
        monkeypatch.setattr(ServedSession, "settle", slow)
        body = {"prompt": " Then", "max_tokens": 9, "session_id": "own"}
        with rig.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert any("it cannot go on" in line for line in answer.iter_lines())
            assert rig.post("/v1/completions", **body)["choices"]
        rig.http.delete("/v1/sessions/own")


@pytest.mark.host
def test_a_file_for_which_there_is_no_room_may_be_opened_later(tmp_path: Path) -> None:
    with serving(tmp_path, load={"memory_budget": "16MiB", "swap_space": 0}) as rig:
        rig.post("/v1/sessions", id="long", prompt=[300] * 1000)
        rig.post("/v1/sessions/long/save")
        rig.post("/v1/sessions/long/checkpoint")
        held = get(rig, "/v1/memory")
        room = held["used_bytes"] - held["breakdown"]["compute"] + 80_000
        assert rig.http.patch("/v1/memory", json={"budget_bytes": room}).status_code == 200
        answer = rig.http.post("/v1/sessions", json={"open": "long", "id": "again"})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "out_of_memory"
        rig.http.delete("/v1/sessions/long")
        assert rig.post("/v1/sessions", open="long", id="again")["position"] == 1000


def test_notes_are_short(rig: Rig) -> None:
    """They are told with every look at a session, and to everybody who follows the page."""
    rig.post("/v1/sessions", id="short", notes="x" * 60_000)
    error = rig.refused(400, "/v1/sessions", id="long", notes={"a": "x" * 70_000})
    assert error["param"] == "notes"
    assert rig.http.get("/v1/sessions/long").status_code == 404
    rig.http.delete("/v1/sessions/short")


@pytest.mark.parametrize("field", ["prompt", "notes", "cache_salt"])
def test_what_is_opened_is_as_it_was_saved(rig: Rig, field: str) -> None:
    error = rig.refused(400, "/v1/sessions", open="story", **{field: "a"})
    assert error["param"] == field
