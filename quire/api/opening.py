"""Sessions out of files: read beside what everybody else does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from quire.api.session import Session
from quire.engine.endings import Holder
from quire.engine.session_opening import Opening
from quire.errors import OutOfMemory, SessionFileError
from quire.memory.saved.format import Container

if TYPE_CHECKING:
    from quire.api.llm import LLM


@contextmanager
def session_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be read; SessionFileError where it cannot be."""
    try:
        if not path.is_file():  # asked before opening: a pipe would wait for its other end
            odd = "this is a folder" if path.is_dir() else "this is not a regular file"
            raise SessionFileError(f"{path}: {odd if path.exists() else 'no such file'}")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise SessionFileError(f"{str(path)!r}: cannot be opened: {error}") from error


def notes_in(path: Path) -> dict[str, Any]:
    """The notes of a saved session, whatever model it is of; SessionFileError if it has none."""
    with session_file(path) as file:
        container = Container(file, str(path))
        facts = container.json(container.metadata.get("extra", ""))
        notes = facts.get("notes") if isinstance(facts, dict) else None
        try:
            found = json.loads(notes) if isinstance(notes, str) else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            container.refuse("it is no session: it has no notes")
        return found


def opened(llm: LLM, file: BinaryIO, share: bool, strict: bool) -> Session:
    """The session that a file holds; only what changes memory is done between steps."""
    loop = llm.loop
    loop.call(llm.engine.check_open)
    opening = Opening(file, file.name, llm.engine, llm.fingerprint, share, strict)
    holder = Holder()

    def take_pages() -> None:
        loop.when_left(holder, holder, opening.let_go)
        opening.take_pages()

    with holder.lock:
        try:
            loop.call_with_room(take_pages)
            opening.read()
            return loop.call(lambda: Session(llm, *opening.finish()))
        except OutOfMemory as error:
            raise SessionFileError(f"{file.name}: it does not fit: {error}") from error
        finally:
            loop.call(opening.let_go)
