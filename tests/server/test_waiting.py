"""Streams that have to wait: their head comes at once, then comments, then whatever there is."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import RequestError
from quire.server import wire
from quire.server.asking import in_thread
from tests.server.rig import Rig, serving
from tests.server.test_leaving import LONG, running, send, until

USER = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/messages": {"messages": USER},
    "/v1/responses": {"input": "Hello"},
    "/api/chat": {"model": "tiny-dense", "messages": USER},
    "/completion": {"prompt": "Hello"},
}


@pytest.fixture
def full(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A server that answers one at a time, and is at it for a while."""
    monkeypatch.setattr(wire, "PING_S", 0.1)
    with serving(tmp_path, max_running=1, max_queue=3, load={"device": "cpu"}) as rig:
        real = rig.llm.engine.runner.forward

        def forward(plan: Any, lease: Any) -> Any:
            time.sleep(0.003)
            return real(plan, lease)

        monkeypatch.setattr(rig.llm.engine.runner, "forward", forward)
        first = send(rig, "/v1/completions", prompt="a", **LONG)
        until(lambda: running(rig) == 1)
        rig.first = first  # type: ignore[attr-defined]
        yield rig
        first.close()


def receive(connection: socket.socket, wanted: bytes, within: float = 5.0) -> bytes:
    """What comes, until something wanted has."""
    got = b""
    connection.settimeout(within)
    while wanted not in got:
        part = connection.recv(65536)
        assert part, got
        got += part
    return got


def leave(rig: Rig) -> None:
    """Whoever is first goes."""
    rig.first.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", BODIES)
def test_whoever_waits_hears_of_it(full: Rig, path: str) -> None:
    began = time.monotonic()
    connection = send(full, path, **BODIES[path], max_tokens=4, stream=True)
    got = receive(connection, b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200") and time.monotonic() - began < 3
    until(lambda: len(full.state.admission.waiting) == 1)
    ping = b"\r\n \r\n" if path.startswith("/api") else b": ping\n\n"
    for _ in range(2):
        receive(connection, ping)
    leave(full)
    rest = receive(connection, b"0\r\n\r\n")  # the last chunk
    ends = b'"done":true' if path.startswith("/api") else b"data: "
    assert ends in rest and b'"message":' not in rest.replace(b'"message":{', b"")
    connection.close()
    assert full.pages() == 0


def test_ollamas_client_waits(full: Rig) -> None:
    ollama = pytest.importorskip("ollama")
    leaving = threading.Timer(1.5, leave, [full])
    leaving.start()
    asked = {**BODIES["/api/chat"], "options": {"num_predict": 4}, "stream": True}
    parts = list(ollama.Client(host=full.url).chat(**asked))
    assert parts[-1].done and not leaving.is_alive()


@pytest.mark.parametrize("path", BODIES)
def test_what_goes_wrong_later_is_an_event(
    full: Rig, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = send(full, path, **BODIES[path], max_tokens=4, stream=True)
    receive(connection, b"HTTP/1.1 200")

    def refuse(*_: object, **__: object) -> None:
        raise RequestError("it cannot be done after all")

    monkeypatch.setattr(full.llm.loop, "start", refuse)
    leave(full)
    rest = receive(connection, b"0\r\n\r\n")
    assert b"it cannot be done after all" in rest and b"error" in rest
    if path in ("/v1/messages", "/v1/responses"):
        assert b"event: error" in rest
    if path in ("/v1/completions", "/v1/chat/completions"):
        assert b"data: [DONE]" in rest
        told = json.loads(rest.split(b"data: ")[1].split(b"\n")[0])
        assert told["error"]["type"] == "invalid_request_error"
    connection.close()
    assert full.pages() == 0


def test_what_is_known_at_once_is_a_status(full: Rig) -> None:
    """Even where it would have to wait."""
    for status, body in (
        (400, {"prompt": [300] * 2100}), (400, {"prompt": "a", "n": 0}),
        (400, {"prompt": [10**7]}), (404, {"prompt": "a", "model": "other"}),
        (404, {"prompt": "a", "session_id": "nobody"}),
    ):  # fmt: skip
        full.refused(status, "/v1/completions", **body, stream=True)
    waiting = [send(full, "/v1/completions", prompt="a", stream=True) for _ in range(3)]
    until(lambda: len(full.state.admission.waiting) == 3)
    full.refused(429, "/v1/completions", prompt="a", stream=True)
    for connection in waiting:
        receive(connection, b"200")
        connection.close()
    until(lambda: not full.state.admission.waiting)
    metrics = full.http.get("/metrics").text
    assert 'request_success_total{finished_reason="abort",model_name="tiny-dense"} 3.0' in metrics
    leave(full)
    assert full.pages() == 0


def test_a_long_prompt_is_not_silent(full: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(full)
    full.idle()
    real = full.llm.engine.runner.forward

    def forward(plan: Any, lease: Any) -> Any:
        time.sleep(0.15)
        return real(plan, lease)

    monkeypatch.setattr(full.llm.engine.runner, "forward", forward)
    tokens = [300 + i % 50 for i in range(1500)]
    connection = send(full, "/v1/completions", prompt=tokens, max_tokens=1, stream=True)
    got = receive(connection, b": ping\n\n")
    assert b"data: " not in got
    connection.close()
    assert full.pages() == 0


def test_many_who_take_their_time_hold_nobody_else_up(rig: Rig) -> None:
    """Long texts are cut up, and files written, in threads that all requests share."""
    done = threading.Event()
    home = rig.state.news._home
    slow = [asyncio.run_coroutine_threadsafe(in_thread(done.wait, 20), home) for _ in range(40)]
    try:
        begun = time.monotonic()
        assert rig.chat("hi")["choices"] and time.monotonic() - begun < 10
    finally:
        done.set()
    assert all(one.result(10) for one in slow)
