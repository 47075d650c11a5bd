"""What `quire run` is asked: a prompt, a file, standard input, or several of them together."""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from quire.cli.streams import note
from quire.errors import RequestError

_PATIENCE_S = 2.0  # for input that may come beside a prompt, or never
_MOST_BYTES = 64 << 20
RAW_SYSTEM = "--system needs a chat template, and is not used with --raw"


def whole_prompt(prompt: str | None, asked: str | None, file: str | None) -> str:
    """Prompt (in either way), file and standard input, with a blank line between them."""
    if prompt is not None and asked is not None:
        raise RequestError("there are two prompts, PROMPT and -p; give one")
    prompt = asked if prompt is None else prompt
    prompt = prompt and _as_typed(prompt)
    from_input = "-" in (prompt, file)
    parts = [prompt] if prompt is not None and prompt != "-" else []
    if file is not None and file != "-":
        parts.append(_text(_file(file), file))
    typed = _standard_input(wait=from_input or not parts)
    if typed.strip():
        parts.append(typed)
    elif not parts:
        raise RequestError("standard input is empty, so there is nothing to answer")
    text = "\n\n".join([*(part.rstrip("\n") for part in parts[:-1]), parts[-1]])
    if not text:
        raise RequestError("the prompt is empty, so there is nothing to answer")
    return text


def _standard_input(wait: bool) -> str:
    """All of standard input; nothing where it is closed, or quiet beside a prompt."""
    closed = sys.stdin is None
    if closed or sys.stdin.isatty():
        if wait:
            raise RequestError(
                f"there is no prompt{', and standard input is closed' if closed else ''}; give "
                'one, as in: quire run "Why is the sky blue?"'
            )
        return ""
    stream = sys.stdin.buffer
    if not wait and not _comes(stream):
        return ""
    try:
        return _text(_bounded(stream, "standard input"), "standard input")
    except OSError:  # a terminal that left us, say
        return ""


def _comes(stream: BinaryIO) -> bool:
    """Whether there is something to read, or an end; a pipe may stay open and bring nothing."""
    try:
        kind = stat.S_IFMT(os.fstat(stream.fileno()).st_mode)
        if kind not in (stat.S_IFIFO, stat.S_IFSOCK):
            return True
        began = monotonic()
        ready, _, _ = select.select([stream], [], [], _PATIENCE_S)
    except (OSError, ValueError):  # no file behind it
        return True
    if not ready:
        note(
            f"quire: nothing came on standard input in {monotonic() - began:.0f} s, so the prompt "
            "goes alone; -f - waits for it"
        )
    return bool(ready)


def _file(name: str) -> bytes:
    try:
        with Path(name).expanduser().open("rb") as file:
            return _bounded(file, name)
    except OSError as error:
        raise RequestError(f"{name}: cannot be read: {error.strerror}") from error


def _bounded(stream: BinaryIO, name: str) -> bytes:
    data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise RequestError(f"{name} has more than {_MOST_BYTES >> 20} MiB, too much for a prompt")
    return data


def _as_typed(prompt: str) -> str:
    """A prompt of a command line, which is UTF-8 also where the locale knows nothing but ASCII."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return _text(os.fsencode(prompt), "the prompt")
    return prompt


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8: {error}") from error
