"""The command itself, as a process: how it starts, how it ends, and what survives its end."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import RequestError
from quire.server import serving, settings
from quire.server.settings import ServeSettings
from tests.server.rig import DENSE, turns

RUN = [sys.executable, "-c", "from quire.cli import main; main()", "serve", "-t", "1"]
LONG = {"prompt": "It was a dark night", "temperature": 0, "ignore_eos": True, "stream": True}


class Process:
    """`quire serve`, until it is told to end."""

    def __init__(
        self, folder: Path, *options: str, key: str = "", stderr: Any = subprocess.PIPE
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [*RUN, "-m", DENSE, "--port", str(self.port), "--session-dir", str(folder)]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
        )  # fmt: skip
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=url, headers=headers, timeout=30)
        deadline = time.monotonic() + 30
        while True:
            try:
                if self.http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert self.process.poll() is None, self.process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def chat(self, *texts: str, **more: Any) -> Any:
        body = {"messages": turns(*texts), "max_tokens": 8, "temperature": 0, **more}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def texts(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_told_to_end_it_finishes_what_runs(tmp_path: Path) -> None:
    with Process(tmp_path, "--save-sessions", "drain") as server:
        server.http.post("/v1/sessions", json={"id": "kept", "prompt": "Once upon a time"})
        whole = server.http.post("/v1/completions", json={**LONG, "max_tokens": 900})
        wanted = texts(whole.text.splitlines())
        lines = []
        with server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 900}) as s:
            for line in s.iter_lines():
                lines.append(line)
                if len(lines) == 5:
                    server.process.send_signal(signal.SIGTERM)
                    time.sleep(0.05)
        assert lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines[-3:]
        assert texts(lines) == wanted
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.process.stderr.read()  # type: ignore[union-attr]
    assert (tmp_path / "kept.quire").is_file()


def test_a_terminal_that_is_closed_ends_it_in_order(tmp_path: Path) -> None:
    with Process(tmp_path, "--save-sessions", "drain") as server:
        server.http.post("/v1/sessions", json={"id": "kept", "prompt": "Once upon a time"})
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(20) == 0
    assert (tmp_path / "kept.quire").is_file()


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full, Process(tmp_path, stderr=full) as server:
        time.sleep(0.5)
        server.chat("Hello")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_told_to_end_it_answers_those_who_wait_too(tmp_path: Path) -> None:
    """Their streams have begun: they are told how they end."""
    with Process(tmp_path, "--max-running", "1") as server, ExitStack() as stack:
        asked = [{**LONG, "max_tokens": most} for most in (1500, 5, 5)]
        streams = [
            stack.enter_context(server.http.stream("POST", "/v1/completions", json=body))
            for body in asked
        ]
        assert [stream.status_code for stream in streams] == [200] * 3
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            lines = [line for line in stream.iter_lines() if line]
            assert lines[-1] == "data: [DONE]" and not any("error" in line for line in lines)
        assert server.process.wait(20) == 0


def test_told_to_end_with_nothing_to_do_it_ends_at_once(tmp_path: Path) -> None:
    with Process(tmp_path) as server:
        server.chat("Hello")
        idle = socket.create_connection(("127.0.0.1", server.port))
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < 10
        idle.close()


def test_what_takes_too_long_is_cut_off_and_told_so(tmp_path: Path) -> None:
    """In a stream, before anything was sent, and in the queue; half a request is not waited for."""
    flags = ("--drain", "1", "--max-running", "33")
    with Process(tmp_path, *flags) as server, ThreadPoolExecutor(2) as threads, ExitStack() as half:
        body = {**LONG, "max_tokens": 2000, "prompt": ["a", "b", "c", "d"], "n": 8}
        whole = {**LONG, "max_tokens": 2000, "stream": False}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            asked = [threads.submit(httpx.post, url, json=whole, timeout=60) for _ in range(2)]
            sent = half.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sent.sendall(b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            sent.settimeout(0.8)
            told = sent.recv(1000)
            assert told.startswith(b"HTTP/1.1 503 ") and b'"code":"draining"' in told
            *_, error, _, end, _ = lines
        assert json.loads(error[6:])["error"]["code"] == "draining" and end == "data: [DONE]"
        for answer in (one.result() for one in asked):
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "draining"
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.process.stderr.read()  # type: ignore[union-attr]


@pytest.mark.parametrize("twice", [False, True])
def test_who_does_not_read_is_cut_off_in_plain_words(tmp_path: Path, twice: bool) -> None:
    """What it has not read by then is more than the connection takes."""
    drain = "60" if twice else "1"
    with Process(tmp_path, "--drain", drain) as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        body = json.dumps({**LONG, "max_tokens": 1500, "n": 8, "logprobs": 100}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        reader.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(2)
        for _ in range(1 + twice):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert server.process.wait(20) == 0
        told = server.process.stderr.read()  # type: ignore[union-attr]
    assert "1 who did not read" in told and "Traceback" not in told


def test_told_twice_it_does_not_wait_and_says_so(tmp_path: Path) -> None:
    with Process(tmp_path, "--drain", "60") as server:
        body = {**LONG, "max_tokens": 2000, "n": 8}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            for _ in range(2):
                server.process.send_signal(signal.SIGINT)
                time.sleep(0.2)
            *_, error, _, end, _ = lines
        assert json.loads(error[6:])["error"]["code"] == "draining" and end == "data: [DONE]"
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.process.stderr.read()  # type: ignore[union-attr]


def test_killed_between_turns_the_next_goes_on_with_equal_bits(tmp_path: Path) -> None:
    """Within a second of being there again; a machine that is busy gets more than one try."""
    talk = ["Hello there"]
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    options = ("--save-sessions", "turn")
    with Process(tmp_path, *options) as server:
        server.http.post("/v1/sessions", json={"id": "talk"})
        last = server.chat(*talk, session_id="talk")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(10)
    for _ in range(3):
        talk += [last["choices"][0]["message"]["content"], "And then?"]
        with Process(tmp_path, *options) as server:
            started = time.monotonic()
            before, last = last, server.chat(*talk, session_id="talk", **more)
            took = time.monotonic() - started
            cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= before["usage"]["prompt_tokens"]
            plain = server.chat(*talk, cache_salt="fresh", **more)
            assert last["choices"] == plain["choices"]
            if took < 1:
                return
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(10)
    raise AssertionError(f"the next turn took {took:.1f} s")


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    def said(*options: str, env: dict[str, str] | None = None) -> str:
        command = [*RUN, *options]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
        return ended.stderr

    assert "--api-key" in said("-m", DENSE, "--host", "0.0.0.0")
    assert "no such file" in said("-m", str(tmp_path / "none.gguf"), "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "port" in said("-m", DENSE, "--port", str(taken.getsockname()[1]))
    (tmp_path / "file").touch()
    under = tmp_path / "file" / "sessions"
    assert f"cannot be saved in {under}: Not a dir" in said("--session-dir", str(under))
    home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    assert "--session-dir" in said("--save-sessions", "turn", env=home)


def test_a_folder_that_takes_no_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(settings, "TemporaryFile", full)
    with pytest.raises(RequestError, match=f"in {tmp_path}: Read-only"):
        ServeSettings(session_dir=tmp_path).check_folder()
    ServeSettings().check_folder()  # whose sessions are saved only if a client asks


def slow_index(folder: Path) -> dict[str, str]:
    """Surroundings without a model, whose pip says that it runs and does not get done."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    runs = folder / "runs"
    code = f"import os, time; open({str(runs)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    (folder / "pip" / "__main__.py").write_text(code)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def test_told_to_end_while_it_fetches_it_leaves_nothing_behind(tmp_path: Path) -> None:
    surroundings = slow_index(tmp_path)
    command = [*RUN, "-m", "smollm2", "--port", "0"]
    with subprocess.Popen(command, env=surroundings, stderr=subprocess.PIPE, text=True) as server:
        deadline = time.monotonic() + 30
        while not (runs := tmp_path / "runs").exists() or not runs.read_text():
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert "Traceback" not in server.stderr.read()  # type: ignore[union-attr]
    with pytest.raises(ProcessLookupError):
        os.kill(int(runs.read_text()), 0)
    assert not list((tmp_path / "cache" / "quire").iterdir())


def test_nothing_is_fetched_for_a_server_that_may_not_be(tmp_path: Path) -> None:
    command = [*RUN, "-m", "smollm2", "--host", "0.0.0.0"]
    surroundings = slow_index(tmp_path)
    surroundings.pop("QUIRE_API_KEY", None)
    ended = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and "--api-key" in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_tokens_do_not_wait_until_earlier_ones_are_acknowledged(host: str) -> None:
    try:
        listening = serving._listening(ServeSettings(host=host, port=0))
    except RequestError:
        pytest.skip(f"there is no {host} here")
    with (
        listening,
        socket.create_connection(listening.getsockname()[:2]),
        listening.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
