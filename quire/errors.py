"""Every error a user can meet, as one tree.

    QuireError
    ├── FileError            a file is damaged, hostile or of an unknown format
    │   ├── GGUFError
    │   ├── SafetensorsError
    │   └── SessionFileError
    ├── ModelError           the file is sound, but not a model that can run here
    ├── TokenizerError       a vocabulary that cannot be used, or text that cannot be encoded
    ├── TemplateError        a chat template that is missing, wrong or exceeds its limit
    ├── RequestError         what was asked for is not possible: the caller can change it
    │   ├── ClosedError      a session that was closed already
    │   └── ContextError     the prompt and its answer do not fit the context
    ├── OutOfMemory         bytes or pages ran out
    │   ├── BudgetError      the byte budget cannot hold it
    │   │   └── DoesNotFit   no plan for the model fits the devices
    │   ├── PagesError       no page is free
    │   └── TierError        pages cannot be moved to host memory or disk, or back
    └── FetchError           a model could not be fetched

A message names the thing, what it needs, what there is, and what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BudgetError",
    "ClosedError",
    "ContextError",
    "DoesNotFit",
    "FetchError",
    "FileError",
    "GGUFError",
    "ModelError",
    "OutOfMemory",
    "PagesError",
    "QuireError",
    "RequestError",
    "SafetensorsError",
    "SessionFileError",
    "TemplateError",
    "TierError",
    "TokenizerError",
]


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class FileError(QuireError):
    """A file is damaged, hostile or of an unknown format."""


class GGUFError(FileError):
    """A GGUF file breaks the format; the message names the file, the field and the value."""


class SafetensorsError(FileError):
    """A safetensors file, or what lies beside it, breaks the format or is not to be read."""


class SessionFileError(FileError):
    """A session file is damaged or belongs to another model or layout."""


class ModelError(QuireError):
    """A sound file that is not a model Quire can run."""


class TokenizerError(QuireError):
    """A vocabulary that cannot be used, or token ids outside it."""


class TemplateError(QuireError):
    """A chat template that is missing, wrong or exceeds its limit."""


class RequestError(QuireError):
    """The caller asked for something impossible and can change it: `param`, where it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ClosedError(RequestError):
    """The session was closed already."""


class ContextError(RequestError):
    """The prompt and its answer do not fit the context."""


class OutOfMemory(QuireError):
    """Bytes or pages ran out."""


class BudgetError(OutOfMemory):
    """The byte budget cannot hold what was asked for: so many more bytes, where that is known."""

    def __init__(self, message: str, needs: int = 0) -> None:
        super().__init__(message)
        self.needs = needs


class DoesNotFit(BudgetError):
    """No plan with what was asked for fits; `nearest` is one (`quire.plan`) that would, if any.

    Each of `advice` is a change of settings with which it fits; None leaves one out.
    """

    def __init__(self, message: str, nearest: Any, advice: tuple[dict[str, Any], ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        """As it goes to another process: without the plan, which is of devices of this one."""
        return type(self), (*self.args, None, self.advice)


class PagesError(OutOfMemory):
    """No page is free."""


class TierError(OutOfMemory):
    """Pages cannot be moved out of memory or back: the tier is full, or the disk fails."""


class FetchError(QuireError):
    """A model could not be fetched."""
