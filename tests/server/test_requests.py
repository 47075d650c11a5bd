"""Requests that are right and seldom written so, and those that come one behind the other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.server import compilers, protocol
from tests.server.rig import Rig, serving, serving_slowly, turns
from tests.server.test_leaving import LONG, running, send, until

COMPLETE, CHAT, SESSIONS = "/v1/completions", "/v1/chat/completions", "/v1/sessions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 50\r\n"
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, {"prompt": "a", "max_tokens": 3.0, "n": 2.0, "top_k": 4.0, "seed": 1.0}),
        (COMPLETE, {"prompt": "a", "max_tokens": 3e0, "seed": 10**40, "x": {"y": [0.5, None]}}),
        (CHAT, {"messages": turns("a"), "max_tokens": 3.0, "temperature": 1.0}),
        ("/v1/messages", {"messages": turns("a"), "max_tokens": 3.0, "top_k": 1e1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3.0}),
        ("/completion", {"prompt": "a", "n_predict": 3.0}),
        ("/api/generate", {"prompt": "a", "stream": False, "options": {"num_predict": 3.0}}),
    ],
)
def test_whole_numbers_may_have_a_point(rig: Rig, path: str, body: dict[str, Any]) -> None:
    rig.post(path, **body)


def test_others_are_none(rig: Rig) -> None:
    for number in (1.5, 1e300, -1.0):
        assert rig.refused(400, COMPLETE, prompt="a", max_tokens=number)["param"] == "max_tokens"
    options = {"num_predict": 1.5}
    assert rig.http.post("/api/generate", json={"prompt": "a", "options": options}).is_client_error


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/completion", {"prompt": "a", "n_predict": 2}, "temperature top_k top_p min_p"),
        ("/api/generate", {"stream": False}, "prompt model"),
        ("/api/chat", {"stream": False}, "messages model"),
        ("/api/show", {}, "model name"),
    ],
)
def test_nulls_are_left_out(rig: Rig, path: str, body: dict[str, Any], fields: str) -> None:
    want = rig.post(path, **body)
    assert set(rig.post(path, **body, **dict.fromkeys(fields.split()))) == set(want)


def test_what_is_needed_is_not(rig: Rig) -> None:
    assert rig.refused(400, CHAT, messages=None)["param"] == "messages"
    assert rig.refused(400, "/completion", prompt=None)["param"] == "prompt"


@pytest.mark.parametrize("rest", [HEAD[:20], HEAD + b"\r\n", HEAD + b"\r\n{"])
def test_slow_senders_are_thrown_out_behind_another_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.3)
    monkeypatch.setattr(protocol, "BODY_S", 0.4)
    with serving(tmp_path) as rig, socket.create_connection(("127.0.0.1", rig.port)) as slow:
        slow.settimeout(10)
        slow.sendall(HEALTH + rest)
        got = b""
        while part := slow.recv(4096):
            got += part
        assert got.count(b"HTTP/1.1 200 ") == got.count(b"HTTP/1.1 408 ") == 1


def test_one_who_asks_ahead_and_leaves_is_noticed(tmp_path: Path) -> None:
    with serving_slowly(tmp_path) as rig:
        asked = send(rig, COMPLETE, prompt="a", **LONG)
        assert rig.complete("b", 8)["choices"]  # the first one is well on its way
        asked.sendall(HEALTH)
        assert rig.complete("b", 8)["choices"]  # what came behind is read by now
        asked.close()
        assert until(lambda: running(rig) == 0) < 1.0  # to the end it would take five seconds
        assert rig.pages() == 0


@pytest.mark.parametrize("size", [1, 5000])
def test_what_is_asked_ahead_is_answered_in_turn(rig: Rig, size: int) -> None:
    with socket.create_connection(("127.0.0.1", rig.port)) as ahead:
        ahead.settimeout(10)
        ahead.sendall(HEALTH * size + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        got = b""
        while part := ahead.recv(1 << 16):
            got += part
        assert got.count(b"HTTP/1.1 200 OK") == got.count(b'{"status":"ok"}') == size + 1


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed", SESSIONS, f"{SESSIONS}/s/append"])
def test_who_leaves_the_queue_for_something_else_is_forgotten(tmp_path: Path, path: str) -> None:
    with serving_slowly(tmp_path, max_running=1, api_keys=("k",)) as rig:
        rig.http.headers["Authorization"] = "Bearer k"
        rig.post(SESSIONS, id="s")
        running_one = _asked(rig, COMPLETE, prompt="a", **LONG)
        until(lambda: running(rig) == 1)
        queued = [_asked(rig, one, prompt="a", input="a") for one in (COMPLETE, path)]
        until(lambda: len(rig.state.admission.waiting) == 2)
        assert len({one.key for one in rig.state.admission.waiting}) == 1  # the same one asks
        queued[1].close()
        until(lambda: len(rig.state.admission.waiting) == 1, within=1.0)
        for one in (running_one, queued[0]):
            one.close()
        assert rig.pages() == 0


def _asked(rig: Rig, path: str, **body: Any) -> socket.socket:
    """A request with the client's own headers, on a connection of its own."""
    request = rig.http.build_request("POST", path, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection = socket.create_connection(("127.0.0.1", rig.port))
    connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return connection


@contextmanager
def compilers_busy(rig: Rig) -> Iterator[None]:
    """While all that compile constraints are at those of others."""
    free = rig.state.compilers.free

    async def take() -> None:
        for _ in range(compilers._THREADS):
            await free.acquire()

    async def give() -> None:
        for _ in range(compilers._THREADS):
            free.release()

    rig.there(take())
    try:
        yield
    finally:
        rig.there(give())


def test_a_constraint_takes_no_longer_because_of_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_SECONDS", 1.0)
    with ThreadPoolExecutor(1) as aside:
        with compilers_busy(rig):
            answer = aside.submit(rig.chat, "a", structured_outputs={"choice": ["yes", "no"]})
            with pytest.raises(TimeoutError):
                answer.result(1.5)
            assert not rig.state.admission.running  # nor does it take anybody's place
        assert answer.result()["choices"][0]["message"]["content"] in ("yes", "no")


def test_no_more_constraints_wait_than_the_queue_holds(tmp_path: Path) -> None:
    body = {"prompt": "a", "structured_outputs": {"choice": ["yes"]}, "max_tokens": 4}
    most = 3 + compilers._THREADS
    with serving(tmp_path, max_queue=3) as rig, ThreadPoolExecutor(most) as aside:
        with compilers_busy(rig):
            waiting = [aside.submit(rig.http.post, COMPLETE, json=body) for _ in range(most)]
            until(lambda: rig.state.compilers.here == most)
            assert rig.refused(429, COMPLETE, **body)["code"] == "queue_full"
        assert {one.result().status_code for one in waiting} == {200}
        rig.post(COMPLETE, **body)


def test_who_waits_too_long_for_constraints_of_others_may_come_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_PATIENCE_S", 0.1)
    with compilers_busy(rig):
        body = {"prompt": "a", "structured_outputs": {"choice": ["yes"]}}
        answer = rig.http.post(COMPLETE, json=body)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "overloaded"
    assert rig.pages() == 0


def test_a_constraint_that_takes_for_ever_keeps_nobody_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is busy until then, and free for others behind it; those who left hold nothing."""
    monkeypatch.setattr(compilers, "_SECONDS", 0.2)
    go_on = threading.Event()
    body = {"prompt": "a", "structured_outputs": {"choice": ["yes"]}, "max_tokens": 4}
    with serving(tmp_path) as rig:
        free, real = rig.state.compilers.free, rig.llm.matcher

        def matcher(request: Any) -> Any:
            go_on.wait()
            return real(request)

        with monkeypatch.context() as patched:
            patched.setattr(rig.llm, "matcher", matcher)
            for _ in range(compilers._THREADS):
                assert rig.refused(400, COMPLETE, **body)["code"] == "constraint_too_complex"
        assert free.locked() and rig.state.compilers.here == 0
        waiting = [_asked(rig, COMPLETE, **body) for _ in range(9)]
        until(lambda: rig.state.compilers.here == 9)
        for one in waiting:
            one.close()
        until(lambda: rig.state.compilers.here == 0)
        go_on.set()
        until(lambda: not free.locked())
        assert rig.post(COMPLETE, **body)["choices"][0]["text"] == "yes"
        go_on.clear()
        monkeypatch.setattr(rig.llm, "matcher", matcher)
        rig.refused(400, COMPLETE, **body)
    threads = [one for one in threading.enumerate() if one.name == "quire-aside"]
    assert threads and all(one.daemon for one in threads)  # the process may end
    go_on.set()
