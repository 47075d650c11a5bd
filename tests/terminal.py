"""A program in a terminal of its own: what a person types, and what comes on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78cDEHMNOZ])")
PASTE = ("\x1b[200~", "\x1b[201~")


def _like_a_shell() -> None:
    """The terminal is the child's, and Ctrl-C reaches it, though tests run in the background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """Runs `quire`, or another program of Python's, with these words; a context manager."""

    def __init__(
        self, words: Sequence[str], env: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "quire"),
    ) -> None:  # fmt: skip
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, *program, *words], stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, env={**os.environ, "TERM": "xterm", **(env or {})},
            preexec_fn=_like_a_shell,
        )  # fmt: skip
        os.close(slave)
        self.raw = ""
        self._seen = 0  # of the screen's text

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """Everything that came, without what moves the cursor."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def type(self, text: str) -> None:
        """Types; pastes of any length go in as the terminal takes them."""
        data = text.encode()
        while data:
            self._read(0.0)
            _, ready, _ = select.select([], [self._master], [], 5.0)
            assert ready, "the program does not read"
            data = data[os.write(self._master, data[:512]) :]

    def paste(self, text: str) -> None:
        """Pastes, in a terminal that marks where a paste begins and ends."""
        self.type(f"{PASTE[0]}{text}{PASTE[1]}")

    def wait(self, what: str, seconds: float = 20.0) -> str:
        """Reads until some text has come since the last such wait; returns what came until then."""
        end = time.monotonic() + seconds
        while (at := self.text.find(what, self._seen)) < 0:
            assert time.monotonic() < end, f"no {what!r} in: {self.text[self._seen :][-400:]!r}"
            assert self._read(0.1) or what in self.text[self._seen :], (
                f"it ended without {what!r}: {self.text[self._seen :][-400:]!r}"
            )
        before = self.text[self._seen : at]
        self._seen = at + len(what)
        return before

    def more(self, n: int, seconds: float = 20.0) -> None:
        """Reads until so many more characters have come."""
        end, n = time.monotonic() + seconds, len(self.text) + n
        while len(self.text) < n:
            assert self._read(0.1) and time.monotonic() < end, f"only: {self.text[-400:]!r}"

    def leave(self, seconds: float = 20.0) -> int:
        """Ctrl-D until it is heard: one typed while nobody reads lines is lost; the exit status."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.type("\x04")
            self._read(0.3)
        return self.ended()

    def ended(self, seconds: float = 20.0) -> int:
        """Waits for its end; the exit status."""
        end = time.monotonic() + seconds
        while self._read(0.1) and time.monotonic() < end:
            continue
        return self.process.wait(timeout=max(end - time.monotonic(), 0.1))

    def _read(self, seconds: float) -> bool:
        """Takes in what came; False at the end."""
        if not select.select([self._master], [], [], seconds)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.raw += data.decode(errors="replace")
        if b"\x1b[6n" in data:  # where is the cursor? In the middle, let us say
            os.write(self._master, b"\x1b[20;1R")
        return bool(data)
