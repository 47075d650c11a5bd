"""Sessions as files: tokens, marks and logits beside what memory holds of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.engine.engine import Engine
from quire.engine.room import Rank
from quire.engine.sequence import Mark, Record, Sequence
from quire.errors import OutOfMemory, RequestError, SessionFileError
from quire.files import replace_file
from quire.memory.saved.types import Extra, Found, StateFlags, StateRead
from quire.memory.saved.write import state_image
from quire.memory.tokens import Tokens

_FIELDS = {"computed", "salt", "edited", "marks", "notes", "arithmetic"}
_MARK_FIELDS = {"name", "checkpoint", "computed", "edited"}


class Saving:
    """A session that is about to be written: what it holds now stays until it is let go of.

    Made and let go of on the loop; written from any thread, while everybody goes on.
    """

    def __init__(
        self, engine: Engine, model: str, sequence: Sequence, marks: Mapping[str, Mark],
        notes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        engine.check_open()
        written = _written(notes)
        engine.ensure_resident(sequence)
        together = {mark.checkpoint for mark in marks.values()}
        for mark in marks.values():
            engine.history.bring_back(mark, sequence, together)
        arrays: dict[str, NDArray[Any]] = {}
        facts = _told(sequence.record(), arrays, "")
        told = []
        for i, mark in enumerate(marks.values()):
            place = _told(mark.record, arrays, f"mark {i} ")
            del place["salt"]  # a session's marks are of its salt
            told.append({"name": mark.name, "checkpoint": mark.checkpoint, **place})
        facts["arithmetic"] = engine.runner.model.arithmetic if sequence.exact else "several"
        extra = Extra({**facts, "marks": told, "notes": written}, arrays)
        names = [mark.checkpoint for mark in marks.values()]
        self._engine = engine
        self._image = state_image(engine.memory, sequence.id, StateFlags.WHOLE, names, model, extra)
        held = engine.history.hold(sequence, marks.values())
        self.let_go = partial(_let_go, engine, held)
        """It is written, or will not be; once is enough."""

    def write(self, path: str | os.PathLike[str], confirm: Callable[[], None]) -> None:
        """Writes it; the old file stays until the new one is complete.

        `confirm` has `check` called on the loop, once all has been read.
        """

        def write(file: BinaryIO) -> None:
            self._image.write(file)
            confirm()

        try:
            replace_file(Path(path), write)
        except OSError as error:
            raise SessionFileError(f"{path}: cannot be saved: {error.strerror}") from error

    def check(self) -> None:
        """Refuses to keep what was written after the model was closed: its pages were gone."""
        self._engine.check_open()


def _let_go(engine: Engine, held: list[Mark]) -> None:
    marks = held[:]
    held.clear()
    if not engine.closed:
        engine.history.let_go(marks)


def _written(notes: Mapping[str, Any]) -> str:
    """Notes as text; refused if reading it would not give the same."""
    try:
        text = json.dumps(dict(notes), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a session's notes must be plain JSON: {error}") from error
    if json.loads(text) != notes:
        raise RequestError("a session's notes must be plain JSON: names are texts, no tuples")
    return text


def open_session(
    path: str | os.PathLike[str], engine: Engine, model: str, share: bool = False,
    strict: bool = False,
) -> tuple[Sequence, dict[str, Mark], dict[str, Any]]:  # fmt: skip
    """A sequence as it was saved, its marks and notes; what is idle gives way if need be.

    `share` lets others begin with its pages, `strict` refuses what other arithmetic computed.
    """
    try:
        if not Path(path).is_file():  # asked before opening: a pipe would wait for its other end
            folder = Path(path).is_dir()
            raise SessionFileError(f"{path}: {'this is a folder' if folder else 'no such file'}")
        with open(path, "rb") as file:
            return _read(file, str(path), engine, model, share, strict)
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise SessionFileError(f"{path!r}: cannot be opened: {error}") from error


def _read(
    file: BinaryIO, source: str, engine: Engine, model: str, share: bool, strict: bool
) -> tuple[Sequence, dict[str, Mark], dict[str, Any]]:
    sequence = engine.new_sequence()
    contents = Contents(source, engine, sequence, strict)
    try:
        read = _read_state(file, contents, model)
    except BaseException:
        engine.end(sequence)
        raise
    facts, arrays = read.extra.facts, read.extra.arrays
    exact = facts["arithmetic"] == engine.runner.model.arithmetic
    origin = facts["salt"], share and exact, exact
    sequence.become(_record(facts, arrays, "", *origin))
    engine.prefix.track(sequence)
    marks = {}
    for i, told in enumerate(facts["marks"]):
        record = _record(told, arrays, f"mark {i} ", *origin)
        checkpoint = read.checkpoints[told["checkpoint"]]
        marks[told["name"]] = engine.history.marked(told["name"], record, checkpoint)
    return sequence, marks, json.loads(facts["notes"])


def _told(record: Record, arrays: dict[str, NDArray[Any]], label: str) -> dict[str, Any]:
    """What a file says of a record; its arrays go under a label."""
    arrays[f"{label}tokens"] = record.tokens.array()
    if record.logits is not None and record.computed == len(record.tokens):
        arrays[f"{label}logits"] = record.logits
    return {"computed": record.computed, "edited": record.edited, "salt": record.salt}


def _record(
    facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], label: str, salt: str,
    shared: bool, exact: bool,
) -> Record:  # fmt: skip
    """What a file told of a record; it was checked."""
    tokens, logits = Tokens(arrays[f"{label}tokens"]), arrays.get(f"{label}logits")
    return Record(tokens, facts["computed"], logits, facts["edited"], salt, shared, exact)


def _read_state(file: BinaryIO, contents: Contents, model: str) -> StateRead:
    """Memory as the file has it; whoever has to gives way."""
    engine, source = contents.engine, contents.source
    found: list[StateRead] = []
    error: OutOfMemory | None = None

    def read() -> bool:
        nonlocal error
        file.seek(0)
        try:
            found.append(
                engine.memory.state_read(
                    file, contents.sequence.id, model=model, source=source, check=contents.check
                )
            )
        except OutOfMemory as refused:
            error = refused
        return bool(found)

    if not engine.room.make(read, contents.sequence, Rank.RUNNING):
        raise SessionFileError(f"{source}: it does not fit: {error}") from error
    return found[0]


def _are_notes(written: object) -> bool:
    try:
        return isinstance(written, str) and isinstance(json.loads(written), dict)
    except (ValueError, RecursionError):
        return False


class Contents:
    """Refuses a file whose tokens and marks do not go with this engine and with each other."""

    def __init__(self, source: str, engine: Engine, sequence: Sequence, strict: bool) -> None:
        self.source = source
        self.strict = strict
        self.engine = engine
        self.sequence = sequence

    def check(self, found: Found) -> None:
        """Raises SessionFileError, before anything was changed."""
        facts, arrays = found.extra.facts, dict(found.extra.arrays)
        known = facts.keys() == _FIELDS and isinstance(facts["salt"], str)
        if not known or not _are_notes(facts["notes"]):
            self._refuse("it is no session: it does not have the fields of one")
        ours, theirs = self.engine.runner.model.arithmetic, facts["arithmetic"]
        if not isinstance(theirs, str) or (self.strict and theirs != ours):
            self._refuse(
                f"it was computed with other arithmetic: {str(theirs)[:80]!r} there, {ours!r} "
                "here; open it without strict=True to go on with other bits"
            )
        if not found.complete:
            self._refuse("memory does not have all of its tokens")
        self._check_place("the session", "", facts, arrays, found.ends[self.sequence.id])
        marks, names = facts["marks"], set()
        if not isinstance(marks, list):
            self._refuse("its marks are not a list")
        for i, mark in enumerate(marks):
            if not isinstance(mark, dict) or mark.keys() != _MARK_FIELDS:
                self._refuse(f"mark {i} does not have the fields {sorted(_MARK_FIELDS)}")
            name, checkpoint = mark["name"], mark["checkpoint"]
            if not isinstance(name, str) or not isinstance(checkpoint, str) or name in names:
                self._refuse(f"mark {i} has no name of its own")
            names.add(name)
            if checkpoint not in found.checkpoint_ends:
                self._refuse(f"mark {name!r} has no checkpoint")
            end = found.checkpoint_ends[checkpoint]
            self._check_place(f"mark {name!r}", f"mark {i} ", mark, arrays, end)
        checkpoints = {mark["checkpoint"] for mark in marks}
        if len(checkpoints) != len(marks) or checkpoints != found.checkpoint_ends.keys() or arrays:
            self._refuse("it has checkpoints or arrays that belong to no mark, or to two")

    def _check_place(
        self, what: str, label: str, facts: Mapping[str, Any], arrays: dict[str, NDArray[Any]],
        end: int,
    ) -> None:  # fmt: skip
        n_vocab, n_ctx = self.engine.runner.model.n_vocab, self.engine.n_ctx
        tokens = arrays.pop(f"{label}tokens", None)
        logits = arrays.pop(f"{label}logits", None)
        if tokens is None or tokens.ndim != 1 or tokens.dtype != np.int32:
            self._refuse(f"{what} has no tokens")
        if len(tokens) > n_ctx:
            self._refuse(
                f"{what} has {len(tokens)} tokens, and the context is {n_ctx}; load with a larger "
                "n_ctx"
            )
        if ((tokens < 0) | (tokens >= n_vocab)).any():
            self._refuse(f"{what} has token ids outside the vocabulary of {n_vocab}")
        computed = facts["computed"]
        if type(computed) is not int or computed != end or computed > len(tokens):
            self._refuse(f"{what} says {str(computed)[:40]} of {len(tokens)} tokens are computed, "
                         f"and memory has {end}")  # fmt: skip
        if type(facts["edited"]) is not bool:
            self._refuse(f"{what} does not say whether tokens were taken out")
        if logits is not None and (
            logits.dtype != np.float32 or logits.shape != (n_vocab,) or np.isnan(logits).any()
            or computed != len(tokens)
        ):  # fmt: skip
            self._refuse(f"{what} has logits that are not those of its last token")

    def _refuse(self, reason: str) -> NoReturn:
        raise SessionFileError(f"{self.source}: {reason}")
