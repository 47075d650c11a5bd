"""Sessions into files: tokens, marks and logits beside what memory holds of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from quire.engine.engine import Engine
from quire.engine.sequence import Mark, Record, Sequence
from quire.errors import OutOfMemory, RequestError, SessionFileError
from quire.files import replace_file
from quire.memory.saved.types import Extra, StateFlags
from quire.memory.saved.write import state_image


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
        here = _brought_back(engine, sequence, marks.values())
        arrays: dict[str, NDArray[Any]] = {}
        arithmetic = engine.runner.model.arithmetic
        facts = _told(sequence.record(), arrays, "", arithmetic)
        told = []
        for i, mark in enumerate(marks.values()):
            record = mark.record if mark in here else replace(mark.record, computed=0)
            place = _told(record, arrays, f"mark {i} ", arithmetic)
            told.append({"name": mark.name, "checkpoint": mark.checkpoint, **place})
        extra = Extra({**facts, "marks": told, "notes": written}, arrays)
        names = [mark.checkpoint for mark in here]
        empty = [mark.checkpoint for mark in marks.values() if mark not in here]
        self._engine = engine
        self._image = state_image(
            engine.memory, sequence.id, StateFlags.WHOLE, names, model, extra, empty
        )
        held = engine.history.hold(sequence, here)
        engine.budget.whole.passing += 1
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


def _brought_back(engine: Engine, sequence: Sequence, marks: Collection[Mark]) -> list[Mark]:
    """Those marks of a sequence whose pages are here now, beside its own.

    Where memory has no room for all of them, some are kept as tokens, which are computed again when
    the mark is gone back to.
    """
    here, together = [], {mark.checkpoint for mark in marks}
    for mark in marks:
        try:
            engine.history.bring_back(mark, sequence, together)
        except OutOfMemory:
            if mark.record.whole is not None:  # it cannot be computed again
                raise
            continue
        here.append(mark)
    return here


def _let_go(engine: Engine, held: list[Mark]) -> None:
    if not held:
        return
    marks = held[:]
    held.clear()
    engine.budget.whole.passing -= 1
    if not engine.closed:
        engine.history.let_go(marks)


def check_notes(notes: object) -> dict[str, Any]:
    """A session's notes, if they are some."""
    if not isinstance(notes, Mapping):
        raise RequestError(
            f"a session's notes are values by their names, not a {type(notes).__name__}"
        )
    return dict(notes)


def _written(notes: Mapping[str, Any]) -> str:
    """Notes as text; refused if reading it would not give the same."""
    plain = check_notes(notes)
    try:
        text = json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a session's notes must be plain JSON: {error}") from error
    if json.loads(text) != notes:
        raise RequestError("a session's notes must be plain JSON: names are texts, no tuples")
    return text


def _told(
    record: Record, arrays: dict[str, NDArray[Any]], label: str, arithmetic: str
) -> dict[str, Any]:
    """What a file says of a record; its arrays go under a label.

    A mark has a salt of its own: its session may have gone to one of another's since.
    """
    arrays[f"{label}tokens"] = record.tokens.array()
    if record.logits is not None and record.computed == len(record.tokens):
        arrays[f"{label}logits"] = record.logits
    return {
        "computed": record.computed, "whole": record.whole, "salt": record.salt,
        "arithmetic": arithmetic if record.exact else "several",
    }  # fmt: skip
