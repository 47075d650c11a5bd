"""Errors as OpenAI's clients know them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from starlette.responses import Response

from quire.errors import (
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

    def response(self) -> Response:
        """The response that says so."""
        return Response(
            msgspec.json.encode(self.as_dict()),
            self.status,
            self.headers,
            media_type="application/json",
        )


def not_found(what: str, name: str, *, code: str | None = None) -> ApiError:
    """There is no such thing."""
    return ApiError(404, f"there is no {what} {name!r:.140}", code=code)


def told(error: BaseException, param: str | None = None) -> ApiError:
    """What to tell a client of an error that is not its own kind yet."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = error.param or param
    if isinstance(error, ContextError):
        return ApiError(400, str(error), code="context_length_exceeded", param=param)
    if isinstance(error, OutOfMemory):
        return ApiError(503, str(error), code="out_of_memory")
    if isinstance(error, SessionFileError):
        return ApiError(409, str(error), code="session_file")
    if isinstance(error, (TemplateError, TokenizerError)):
        return ApiError(400, str(error), param=param)
    if isinstance(error, QuireError):
        return ApiError(400, str(error), param=param)
    return ApiError(500, "the server failed at this; its log says why", code="internal_error")


@contextmanager
def about(param: str) -> Iterator[None]:
    """What is wrong with a text here is wrong with this field of the request."""
    try:
        yield
    except (ContextError, TemplateError, TokenizerError) as error:
        raise told(error, param) from error
