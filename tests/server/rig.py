"""A server on a free port, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire.server.serving import make
from quire.server.settings import ServeSettings
from quire.server.state import State

MODELS = Path(__file__).parents[1] / "data" / "models"
DENSE = str(MODELS / "tiny-dense")
HYBRID = str(MODELS / "tiny-hybrid")


class Rig:
    """A running server, and a client for it."""

    def __init__(self, settings: ServeSettings, port: int = 0) -> None:
        self._listening = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make(settings)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "it does not start"
            time.sleep(0.01)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self._listening])

    def there(self, doing: Coroutine[Any, Any, Any]) -> Any:
        """What comes of something in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(60)

    @property
    def state(self) -> State:
        """What the server's requests share; to look at."""
        assert self.server.state is not None
        return self.server.state

    @property
    def llm(self) -> Any:
        """The first model."""
        return self.state.models.default.llm

    def post(self, path: str, **body: Any) -> Any:
        """What a request gives, which must be right."""
        answer = self.http.post(path, json=body)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def refused(self, status: int, path: str, **body: Any) -> dict[str, Any]:
        """The error that a request gives."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, (answer.status_code, answer.text)
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "code", "param"}
        return error

    def complete(self, prompt: Any, most: int = 12, **more: Any) -> Any:
        """A greedy completion."""
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True, **more}
        return self.post("/v1/completions", **body)

    def chat(self, *texts: str, **more: Any) -> Any:
        """A greedy answer; texts are the user's and the assistant's in turn."""
        body = {"max_tokens": 12, "temperature": 0, **more}
        return self.post("/v1/chat/completions", messages=turns(*texts), **body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """What a stream sends, as objects; the last is the text [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def idle(self, within: float = 5.0) -> None:
        """Waits until nothing runs, and checks that nothing but the cache holds pages."""
        deadline = time.monotonic() + within
        while self.state.admission.running or self.llm.engine.scheduler.active:
            assert time.monotonic() < deadline, "it is not idle"
            time.sleep(0.005)

    def pages(self) -> int:
        """Pages in use once the cache is dropped; memory is audited."""
        self.idle()
        self.llm.forget()
        self.llm.memory.audit()
        return sum(group["pages_used"] for group in self.llm.memory.as_dict()["stats"].values())

    def stop(self) -> None:
        """Ends the server."""
        self.http.close()
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


def turns(*texts: str) -> list[dict[str, str]]:
    """A conversation of which the user says the first text."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@contextmanager
def serving(
    folder: Path, *models: str, load: dict[str, Any] | None = None, port: int = 0, **more: Any
) -> Iterator[Rig]:
    """A server for the tests of one block; on a port that is free, unless told."""
    settings = ServeSettings(
        models=models or (DENSE,), session_dir=folder, load={"threads": 1, **(load or {})}, **more
    )
    rig = Rig(settings, port)
    try:
        yield rig
    finally:
        rig.stop()


@contextmanager
def serving_slowly(folder: Path, **settings: Any) -> Iterator[Rig]:
    """One that takes some milliseconds for a step of the host, and more for a prompt."""
    with serving(folder, load={"device": "cpu"}, **settings) as rig:
        real = rig.llm.engine.runner.forward

        def forward(plan: Any, lease: Any) -> Any:
            time.sleep(0.003 + 0.0003 * plan.n_tokens)
            return real(plan, lease)

        rig.llm.engine.runner.forward = forward
        yield rig
