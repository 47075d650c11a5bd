"""How a server is set up; the flags of `quire serve`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from quire.config import cache_folder
from quire.engine.drafter import Speculator
from quire.errors import RequestError

SaveSessions = Literal["turn", "drain", "never"]
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/A-Z\s]+")


@dataclass(frozen=True)
class ServeSettings:
    """What does not change while a server runs."""

    models: tuple[str, ...] = ("smollm2",)
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    no_api_key: bool = False
    origins: tuple[str, ...] = ()
    """Pages of other servers that may ask from a browser; `*` for all."""
    max_running: int = 64
    max_queue: int = 256
    session_dir: Path | None = None
    save_sessions: SaveSessions = "never"
    keep_alive_s: float = 300.0
    """Seconds after which one of several models that nobody uses is given back."""
    max_body: int = 32 << 20
    drain_s: float = 30.0
    """Seconds that running requests get to end once the server is told to."""
    log_text: bool = False
    speculate: Speculator | None = None
    """Who drafts tokens ahead."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `quire.load`, for every model."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_queue", "max_body"):
            if getattr(self, name) < (0 if name == "max_queue" else 1):
                raise RequestError(f"--{name.replace('_', '-')} is too small")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise RequestError(
                    "--allow-origin is as a browser sends it, such as https://chat.example, or *, "
                    f"not {origin!r:.80}"
                )
        if not all(key.strip() for key in self.api_keys):
            raise RequestError("--api-key is empty, and would let everybody in; give a key")
        if not (self.on_loopback or self.api_keys or self.no_api_key):
            raise RequestError(
                f"--host {self.host} can be reached from other machines: give --api-key, or "
                "--no-api-key to let everybody in"
            )

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def sessions_in(self) -> Path:
        """Where sessions are saved."""
        return self.session_dir or cache_folder() / "sessions"

    def check_folder(self) -> None:
        """Refuses a folder that sessions cannot be saved in before the first one is to be."""
        if self.session_dir is None and self.save_sessions == "never":
            return  # nobody may ever save one
        try:
            self.sessions_in.mkdir(mode=0o700, parents=True, exist_ok=True)
            with TemporaryFile(dir=self.sessions_in):
                pass
        except OSError as error:
            raise RequestError(
                f"sessions cannot be saved in {self.sessions_in}: {error.strerror}; "
                "--session-dir names another folder"
            ) from error
