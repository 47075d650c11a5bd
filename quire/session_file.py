"""Sessions as files: tokens, marks and logits beside what memory holds of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.engine.engine import Engine
from quire.engine.sequence import Mark, Sequence
from quire.errors import OutOfMemory, RequestError, SessionFileError
from quire.files import replace_file
from quire.memory.saved import Extra, Found, StateRead

_FIELDS = {"computed", "salt", "moved", "marks", "notes"}
_MARK_FIELDS = {"name", "checkpoint", "computed", "moved"}


def save_session(
    path: str | os.PathLike[str], engine: Engine, model: str, sequence: Sequence,
    marks: Mapping[str, Mark], notes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Writes a session; the old file stays until the new one is complete."""
    engine.hold(sequence)
    arrays: dict[str, NDArray[Any]] = {}
    _add(arrays, "", sequence.tokens, None if sequence.pending else sequence.logits)
    told = []
    for i, mark in enumerate(marks.values()):
        _add(arrays, f"mark {i} ", mark.tokens, mark.logits)
        told.append({key: getattr(mark, key) for key in sorted(_MARK_FIELDS)})
    facts = {"computed": sequence.computed, "salt": sequence.salt, "moved": sequence.moved}
    extra = Extra({**facts, "marks": told, "notes": _written(notes)}, arrays)
    names = [mark.checkpoint for mark in marks.values()]

    def write(file: BinaryIO) -> None:
        engine.memory.state_write(file, sequence.id, checkpoints=names, model=model, extra=extra)

    try:
        replace_file(Path(path), write)
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be saved: {error.strerror}") from error


def _written(notes: Mapping[str, Any]) -> str:
    """Notes as text; refused if reading it would not give the same."""
    try:
        text = json.dumps(dict(notes), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"a session's notes must be plain JSON: {error}") from error
    if json.loads(text) != notes:
        raise RequestError("a session's notes must be plain JSON: names are texts, no tuples")
    return text


def open_session(
    path: str | os.PathLike[str], engine: Engine, model: str
) -> tuple[Sequence, dict[str, Mark], dict[str, Any]]:
    """A sequence as it was saved, its marks and notes; what is idle gives way if need be."""
    try:
        if not Path(path).is_file():  # asked before opening: a pipe would wait for its other end
            folder = Path(path).is_dir()
            raise SessionFileError(f"{path}: {'this is a folder' if folder else 'no such file'}")
        with open(path, "rb") as file:
            return _read(file, str(path), engine, model)
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be opened: {error.strerror}") from error


def _read(
    file: BinaryIO, source: str, engine: Engine, model: str
) -> tuple[Sequence, dict[str, Mark], dict[str, Any]]:
    sequence = engine.open()
    contents = Contents(source, engine, sequence)
    try:
        read = _read_state(file, contents, model)
    except BaseException:
        engine.close(sequence)
        raise
    facts, arrays = read.extra.facts, read.extra.arrays
    sequence.tokens[:] = arrays["tokens"].tolist()
    sequence.logits = arrays.get("logits")
    sequence.computed, sequence.salt = facts["computed"], facts["salt"]
    sequence.moved = facts["moved"]
    engine.prefix.track(sequence)
    marks = {}
    for i, told in enumerate(facts["marks"]):
        tokens = tuple(arrays[f"mark {i} tokens"].tolist())
        checkpoint = read.checkpoints[told["checkpoint"]]
        logits = arrays.get(f"mark {i} logits")
        name = told["name"]
        marks[name] = Mark(
            name, tokens, told["computed"], logits, told["moved"], checkpoint, engine.memory
        )
    return sequence, marks, json.loads(facts["notes"])


def _read_state(file: BinaryIO, contents: Contents, model: str) -> StateRead:
    engine, source = contents.engine, contents.source
    while True:
        file.seek(0)
        try:
            return engine.memory.state_read(
                file, contents.sequence.id, model=model, source=source, check=contents.check
            )
        except OutOfMemory as error:
            if not engine.free_some(contents.sequence):
                raise SessionFileError(f"{source}: it does not fit: {error}") from error


def _add(
    arrays: dict[str, NDArray[Any]], label: str, tokens: list[int] | tuple[int, ...],
    logits: NDArray[np.float32] | None,
) -> None:  # fmt: skip
    arrays[f"{label}tokens"] = np.array(tokens, np.int32)
    if logits is not None:
        arrays[f"{label}logits"] = logits


def _are_notes(written: object) -> bool:
    try:
        return isinstance(written, str) and isinstance(json.loads(written), dict)
    except (ValueError, RecursionError):
        return False


class Contents:
    """Refuses a file whose tokens and marks do not go with this engine and with each other."""

    def __init__(self, source: str, engine: Engine, sequence: Sequence) -> None:
        self.source = source
        self.engine = engine
        self.sequence = sequence

    def check(self, found: Found) -> None:
        """Raises SessionFileError, before anything was changed."""
        facts, arrays = found.extra.facts, dict(found.extra.arrays)
        known = facts.keys() == _FIELDS and isinstance(facts["salt"], str)
        if not known or not _are_notes(facts["notes"]):
            self._refuse("it is no session: it does not have the fields of one")
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
        if type(facts["moved"]) is not bool:
            self._refuse(f"{what} does not say whether tokens were taken out")
        if logits is not None and (
            logits.dtype != np.float32 or logits.shape != (n_vocab,) or np.isnan(logits).any()
            or computed != len(tokens)
        ):  # fmt: skip
            self._refuse(f"{what} has logits that are not those of its last token")

    def _refuse(self, reason: str) -> NoReturn:
        raise SessionFileError(f"{self.source}: {reason}")
