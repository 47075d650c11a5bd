"""The page at `/`: files of the package, named by what is in them so that browsers keep them.

They are the same for everybody and hold no figures, so they are served without a key; what the
page shows it asks for with one. Where there is a key, browsers cannot send it with `/`: they get
401 like everybody, and with it the page, which asks for the key.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.errors import not_found

FILES = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
    "": "text/plain",
}  # fmt: skip
_GUARDS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
PREFIX = "/page"


class Page:
    """All files of the page, under one name made from their contents."""

    def __init__(self, folder: Path = FILES) -> None:
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        self._files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
        digest = hashlib.sha256()
        for name, body in self._files.items():
            digest.update(name.encode() + b"\0" + body)
        self.version = digest.hexdigest()[:16]
        index = self._files.pop("index.html")
        self._index = index.replace(b"{{files}}", f"{PREFIX}/{self.version}".encode())
        self._asking = self._index.replace(b"<html ", b'<html data-key="needed" ', 1)

    async def index(self, request: Request) -> Response:
        """The page itself, asked for anew each time."""
        headers = {**_GUARDS, "Cache-Control": "no-cache", "ETag": f'"{self.version}"'}
        if request.scope["quire.key"] is None:
            headers = {**_GUARDS, "Cache-Control": "no-store", "WWW-Authenticate": "Bearer"}
            return Response(self._asking, 401, headers, media_type="text/html")
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(self._index, headers=headers, media_type="text/html")

    async def file(self, request: Request) -> Response:
        """One of its files; under another version's name there is nothing."""
        name = request.path_params["name"]
        body = self._files.get(name)
        if body is None or request.path_params["version"] != self.version:
            raise not_found("file", name)
        headers = {**_GUARDS, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(body, headers=headers, media_type=_TYPES[Path(name).suffix])


def is_file(path: str) -> bool:
    """Whether it is one of the page's files, which everybody may have."""
    return path.startswith(PREFIX + "/")


def is_page(path: str, accept: str) -> bool:
    """Whether a browser wants the page: without a key it is refused by a page that asks for one."""
    return path == "/" and "text/html" in accept


def page_routes() -> list[Route]:
    """Its routes."""
    page = Page()
    return [
        Route("/", page.index),
        Route(PREFIX + "/{version}/{name:path}", page.file),
    ]
