"""Clients that end their part of a connection once they have asked, and go on to read."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest

from quire.server.protocol import _LOOK_S, Protocol
from tests.server.rig import Rig, serving_slowly
from tests.server.test_leaving import LONG, running, send, until


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server that takes some milliseconds for a step, and more for a prompt."""
    with serving_slowly(tmp_path_factory.mktemp("slow"), max_running=1) as rig:
        yield rig


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """What the standard library makes of what comes; then the server ends its part too."""
    connection.settimeout(20)
    response = http.client.HTTPResponse(connection)
    response.begin()
    body = response.read()
    assert connection.recv(100) == b""
    connection.close()
    return response.status, body


@pytest.mark.parametrize("wait", [0.0, 0.05])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_part_is_answered(slow: Rig, stream: bool, wait: float) -> None:
    asked = {"prompt": [300] * 60, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    want = slow.post("/v1/completions", **asked)["choices"][0]["text"]
    connection = send(slow, "/v1/completions", stream=stream, **asked)
    time.sleep(wait)  # before the first token, and between two
    connection.shutdown(socket.SHUT_WR)
    status, body = answer(connection)
    assert status == 200
    if stream:
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(one)["choices"][0]["text"] for one in events) == want
    else:
        assert json.loads(body)["choices"][0]["text"] == want
    assert slow.pages() == 0


def test_one_looks_after_many_requests(slow: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each of them the end is met once more."""
    looks, real = 0, Protocol._look

    def look(self: Protocol) -> None:
        nonlocal looks
        looks += 1
        real(self)

    monkeypatch.setattr(Protocol, "_look", look)
    long = slow.http.build_request(
        "POST", "/v1/completions", json=LONG | {"prompt": "a", "max_tokens": 100}
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", slow.port))
    started = time.monotonic()
    for body in [b"{}"] * 100 + [long.content]:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    connection.shutdown(socket.SHUT_WR)
    got = b""
    while data := connection.recv(65536):
        got += data
    assert got.count(b"HTTP/1.1 400") == 100 and got.count(b"HTTP/1.1 200") == 1
    assert looks < 2 * (time.monotonic() - started) / _LOOK_S + 10


def test_every_request_before_the_end_is_answered(slow: Rig) -> None:
    connection = socket.create_connection(("127.0.0.1", slow.port))
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
    connection.shutdown(socket.SHUT_WR)
    got = b""
    while data := connection.recv(65536):
        got += data
    assert got.count(b"HTTP/1.1 200 OK") == got.count(b'{"status":"ok"}') == 3


def test_half_a_request_is_none(slow: Rig) -> None:
    connection = socket.create_connection(("127.0.0.1", slow.port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    connection.sendall(head + b"{")
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(65536) == b""


@pytest.mark.parametrize("state", ["queued", "prefill", "silent stream"])
def test_one_that_leaves_altogether_is_noticed_before_anything_is_sent(
    slow: Rig, state: str
) -> None:
    first = send(slow, "/v1/completions", prompt="a", **LONG) if state == "queued" else None
    until(lambda: state != "queued" or running(slow) == 1)
    stream = state == "silent stream"
    connection = send(slow, "/v1/completions", prompt=[300] * 1900, stream=stream, **LONG)
    until(lambda: slow.state.admission.waiting if first else running(slow) == 1)
    connection.close()
    assert until(lambda: not slow.state.admission.waiting if first else not running(slow)) < 0.3
    if first:
        first.close()
    assert slow.pages() == 0


@pytest.mark.parametrize("ends", [True, False])
def test_a_stream_that_only_its_head_is_wanted_of(slow: Rig, ends: bool) -> None:
    """There is nothing behind the head, nor does anybody wait for it."""
    connection = socket.create_connection(("127.0.0.1", slow.port))
    connection.sendall(b"HEAD /v1/memory/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    if ends:
        connection.shutdown(socket.SHUT_WR)
    connection.settimeout(20)
    got = b""
    while not (b"\r\n\r\n" in got and not ends) and (data := connection.recv(65536)):
        got += data
    assert got.startswith(b"HTTP/1.1 200 OK\r\n") and got.endswith(b"\r\n\r\n")
    if not ends:  # the connection is good for more
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
    connection.close()
    until(lambda: slow.state.live.listeners == 0)
