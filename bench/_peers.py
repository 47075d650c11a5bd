"""The two engines as child processes: lasting workers for speed, fresh ones for cold starts."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """One of the two engines: which interpreter runs which worker, and settings of its own."""

    name: str
    python: str
    script: str
    own: dict[str, Any] = field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        """The command line of its worker."""
        return [self.python, str(Path(__file__).with_name(self.script)), *arguments]

    def cold(self, settings: dict[str, Any], prompt: str) -> dict[str, Any]:
        """Let a fresh process load and answer; its moments count from before its start."""
        command = self.command("--cold", json.dumps({**settings, **self.own}), prompt)
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        if done.returncode:
            raise RuntimeError(f"{self.name} failed in a fresh process:\n{done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(done.stdout)
        for moment in ("imported", "loaded", "first"):
            answer[moment] -= start
        return answer


class Worker:
    """A running worker: one question at a time, JSON lines both ways."""

    def __init__(self, side: Side, process: subprocess.Popen[str], noise: IO[str]) -> None:
        self.side, self._process, self._noise = side, process, noise

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Load a model in place of the one before; what the engine says about itself."""
        answer: dict[str, Any] = self.ask("load", settings={**settings, **self.side.own})
        return answer

    def ask(self, what: str, **given: Any) -> Any:
        """Send a question and wait for its answer."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"what": what, **given}) + "\n")
        line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"error": self._last_words()}
        if "error" in reply:
            raise RuntimeError(f"{self.side.name} failed at {what!r}:\n{reply['error']}")
        return reply["answer"]

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _last_words(self) -> str:
        self._noise.seek(0)
        return f"it ended with status {self._process.wait()}\n{self._noise.read()[-2000:]}"


@contextmanager
def running(side: Side) -> Iterator[Worker]:
    """A worker that ends with the block; what libraries print is kept for when it fails."""
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as noise,
        subprocess.Popen(
            side.command(),
            stdin=pipe,
            stdout=pipe,
            stderr=noise,
            text=True,
            bufsize=1,
            env=_environment(),
        ) as process,
    ):
        yield Worker(side, process, noise)


def turns(players: list[T], turn: int) -> list[T]:
    """Who goes first changes with every round, so that neither always finds the warmer machine."""
    return players if turn % 2 == 0 else players[::-1]


def _environment() -> dict[str, str]:
    """Ours, but compiled modules may be kept, as they are after any normal installation."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
