"""The commands that ask a running server."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from click.testing import CliRunner

from quire.cli import main
from tests.server.rig import Rig, turns


def run(*arguments: str, stdin: str | None = None) -> str:
    done = CliRunner().invoke(main, arguments, input=stdin)
    assert done.exit_code == 0, done.output
    return done.output


def test_run(rig: Rig) -> None:
    wanted = rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text
    assert run("run", "--url", rig.url, "--temp", "0", "-n", "8", "Hello there") == wanted + "\n"
    assert (
        run("run", "--url", f"{rig.url}/v1", "--temp", "0", "-n", "8", stdin="Hello there")
        == wanted + "\n"
    )
    raw = run("run", "--url", rig.url, "--temp", "0", "-n", "4", "--raw", "It was")
    assert raw == rig.llm.generate("It was", max_tokens=4, temperature=0).text + "\n"
    told = json.loads(run("run", "--url", rig.url, "-n", "4", "--json", "Hello"))
    assert told["usage"]["completion_tokens"] <= 4
    assert told["text"] == told["choices"][0]["message"]["content"]
    assert run("run", "--url", rig.url, "--regex", "[ab]{2}", "Hello").strip("ab") == "\n"


def test_chat(rig: Rig) -> None:
    first = rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text
    second = rig.llm.chat(turns("Hello there", first, "More"), max_tokens=8, temperature=0).text
    talk = "Hello there\nMore\n/rewind\nMore\n/quit\n"
    assert (
        run("chat", "--url", rig.url, "--temp", "0", "-n", "8", stdin=talk)
        == f"{first}\n{second}\n{second}\n"
    )
    assert rig.http.get("/v1/sessions").json()["data"] == []


def test_a_chat_goes_on_where_something_was_refused(rig: Rig) -> None:
    first = rig.llm.chat(turns("Hello there"), max_tokens=8, temperature=0).text
    talk = f"/save a/b\n{'word ' * 3000}\nHello there\n"
    told = run("chat", "--url", rig.url, "--temp", "0", "-n", "8", stdin=talk)
    assert "1 to 128 letters" in told and "maximum context length" in told
    assert told.endswith(first + "\n")
    assert rig.http.get("/v1/sessions").json()["data"] == []


HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
PIECE = b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
BROKEN = {
    "no end": HEAD + b"\r\n" + PIECE,
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n99\r\n" + PIECE,
    "no events": HEAD + b"\r\n<html></html>",
    "half an object": HEAD + b'\r\n{"choices"',
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("command", [("run", "hi"), ("run", "--json", "hi"), ("chat",), ("ps",)])
def test_half_an_answer_is_an_error(answer: bytes, command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done = CliRunner().invoke(main, [command[0], "--url", url, *command[1:]], input="hi\n")
    assert done.exit_code == 1 and "quire: " in done.output and url in done.output


def test_ps(rig: Rig) -> None:
    rig.post("/v1/sessions", id="seen", prompt="It was")
    assert "seen" in run("ps", "--url", rig.url) and "tiny-dense" in run("ps", "--url", rig.url)
    told = json.loads(run("ps", "--url", rig.url, "--json"))
    assert told["sessions"][0]["id"] == "seen"
    assert told["memory"]["tiny-dense"]["used_bytes"] > 0
    rig.http.delete("/v1/sessions/seen")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "nonsense:99999"])
def test_no_server(url: str) -> None:
    done = CliRunner().invoke(main, ["run", "--url", url, "hi"])
    assert done.exit_code == 1 and "quire:" in done.output


def test_the_servers_own_words(rig: Rig) -> None:
    done = CliRunner().invoke(main, ["run", "--url", rig.url, "-m", "other", "hi"])
    assert done.exit_code == 1 and "there is no model 'other'" in done.output
