"""A Hugging Face Hub on this machine: the few requests that fetching a model takes."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """Repositories by name, the requests that came, and what goes wrong on the way."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and range."""
        self.cut_after: int | None = None
        """Ends connections after so many bytes of a file."""
        self.change: bytes | None = None
        """Sent in the place of every file's last byte."""
        self.url = ""

    def downloads(self) -> list[tuple[str, str]]:
        """File and range of every transfer."""
        return [
            (p.rpartition("/")[2], r)
            for m, p, r in self.requests
            if m == "GET" and "/resolve/" in p
        ]

    def info(self, repository: str) -> dict[str, Any]:
        """What the Hub tells of a repository."""
        siblings = []
        for name, data in self.repositories[repository].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "b"}
            if name.endswith((".gguf", ".safetensors")):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 130}
            siblings.append(entry)
        return {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings,
                "tags": [], "private": False, "downloads": 0, "likes": 0}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        words = path.strip("/").split("/")
        if (
            words[:2] == ["api", "models"]
            and (name := "/".join(words[2:4])) in self.hub.repositories
        ):
            self._send(200, json.dumps(self.hub.info(name)).encode(), {}, body)
        elif "resolve" in words and (data := self._file(words)) is not None:
            self._send_file(data, body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _file(self, words: list[str]) -> bytes | None:
        return self.hub.repositories.get("/".join(words[:2]), {}).get("/".join(words[4:]))

    def _send_file(self, data: bytes, body: bool) -> None:
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.hub.change is not None:
            data = data[:-1] + self.hub.change
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            data, headers["Content-Encoding"] = gzip.compress(data), "gzip"
        cut = self.hub.cut_after if body else None
        self._send(206 if start else 200, data[start:], headers, body, cut)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], body: bool, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
        if cut is not None and cut < len(data):
            self.close_connection = True


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A hub under `hub.url` until the end of the block."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
