"""Errors as OpenAI's clients know them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from starlette.responses import Response

from quire.errors import (
    ClosedError,
    ContextError,
    OutOfMemory,
    QuireError,
    RequestError,
    SessionFileError,
    TemplateError,
    TokenizerError,
)

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "conflict_error", 429: "rate_limit_error", 500: "server_error", 503: "overloaded_error",
}  # fmt: skip
_ANTHROPIC = {413: "request_too_large", 500: "api_error"}
RETRY_S = 1
"""When whoever was refused for want of room should try again."""


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_S))

    @property
    def type(self) -> str:
        """OpenAI's word for this kind of error."""
        return _TYPES.get(self.status, "invalid_request_error")

    def as_dict(self) -> dict[str, object]:
        """The body of the response."""
        error = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return {"error": error}

    def as_anthropic(self) -> dict[str, object]:
        """The same as Anthropic's clients know it."""
        error = {"type": _ANTHROPIC.get(self.status, self.type), "message": self.message}
        return {"type": "error", "error": {**error, "code": self.code, "param": self.param}}

    def as_ollama(self) -> dict[str, object]:
        """The same as Ollama's clients know it."""
        return {"error": self.message}

    def response(self, path: str = "") -> Response:
        """The response that says so, in the form of the dialect that is spoken at a path."""
        form = self.as_dict
        if path.startswith("/v1/messages"):
            form = self.as_anthropic
        elif path.startswith("/api/"):
            form = self.as_ollama
        body = msgspec.json.encode(form())
        return Response(body, self.status, self.headers, media_type="application/json")


def not_found(what: str, name: str, *, code: str | None = None) -> ApiError:
    """There is no such thing."""
    return ApiError(404, f"there is no {what} {name!r:.140}", code=code)


def told(error: BaseException, param: str | None = None) -> ApiError:
    """What to tell a client of an error that is not its own kind yet."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = error.param or param
    if isinstance(error, ClosedError):
        return ApiError(404, "the session was closed meanwhile", code="session_not_found")
    if isinstance(error, ContextError):
        message = f"this model's maximum context length is exceeded: {error}"  # clients know it
        return ApiError(400, message, code="context_length_exceeded", param=param)
    if isinstance(error, OutOfMemory) or isinstance(error.__cause__, OutOfMemory):
        return ApiError(503, str(error), code="out_of_memory")
    if isinstance(error, SessionFileError):
        failed = isinstance(error.__cause__, OSError)  # the disk, and not what is on it
        return ApiError(503 if failed else 409, str(error), code="session_file")
    if isinstance(error, (TemplateError, TokenizerError)):
        return ApiError(400, str(error), param=param)
    if isinstance(error, QuireError):
        return ApiError(400, str(error), param=param)
    return ApiError(500, "the server failed at this; its log says why", code="internal_error")


@contextmanager
def naming(param: str | None) -> Iterator[None]:
    """What is wrong here is wrong with this field, unless it says with which."""
    try:
        yield
    except (ApiError, RequestError) as error:
        error.param = error.param or param
        raise


@contextmanager
def constrained_in(field: str | None) -> Iterator[None]:
    """What is wrong with a constraint is wrong with the field that it came from."""
    try:
        yield
    except RequestError as error:
        if error.param == "constraint":
            error.param = field
        raise


@contextmanager
def about(param: str) -> Iterator[None]:
    """What is wrong with a text here is wrong with this field of the request."""
    try:
        yield
    except (ContextError, TemplateError, TokenizerError) as error:
        raise told(error, param) from error


@contextmanager
def worded(names: Mapping[str, str]) -> Iterator[None]:
    """What is wrong with a field is told by the name that a client knows it by."""
    try:
        yield
    except (ApiError, RequestError) as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        found = told(error)
        message = re.sub(rf"\b{error.param}\b", name, found.message)
        raise ApiError(found.status, message, code=found.code, param=name) from error
