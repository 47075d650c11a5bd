"""Standard output that may be closed, full or ASCII, and a terminal that may know no escapes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from typing import Any

import click

from quire import config
from quire.errors import QuireError

_STEERING = {c: None for c in (*range(32), *range(127, 160)) if chr(c) not in "\t\n"}
ENDED_BY_PIPE = 141  # what a shell says of a program that wrote to a closed pipe
_OUTPUT_FAILS = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 130  # and of one that Ctrl-C ended


def prepare() -> None:
    """Lets every text be written, whatever the encoding, and nothing where there is no output."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def status_of(error: OSError) -> int:
    """The exit status for output that could not be written; says why, unless nobody listens."""
    _to_nowhere()
    if error.errno == errno.EPIPE:
        return ENDED_BY_PIPE
    where = error.filename or ("standard output" if error.errno in _OUTPUT_FAILS else "")
    note(f"quire: {where}{': ' if where else ''}{error.strerror or error}")
    return 1


def _to_nowhere() -> None:
    """What is still in the buffer must not fail again at the end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # not a file at all
        return


def shown(text: str) -> str:
    """What a model wrote, for standard output: a terminal gets nothing that could steer it."""
    return text.translate(_STEERING) if sys.stdout.isatty() else text


def write(pieces: Iterable[str]) -> None:
    """An answer as it comes, and the end of its line; where it breaks off, an error begins one."""
    begun = False
    try:
        for piece in pieces:
            sys.stdout.write(shown(piece))
            sys.stdout.flush()
            begun = True
    except QuireError:
        if begun:
            _end_line()
        raise
    _end_line()


def _end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def cut(made: int, most: int, larger: str = "-c") -> str:
    """Why an answer of so many tokens has no end, and what to do; what makes contexts larger."""
    if made >= most:
        return f"the answer was cut after {most} tokens; -n allows more, -1 any number"
    return f"the answer was cut because the context is full; {larger} allows more"


def note(text: str, dim: bool = False) -> None:
    """A line on standard error; faint where the terminal can and may show that."""
    click.secho(text, err=True, dim=dim, color=False if config.plain_terminal() else None)
