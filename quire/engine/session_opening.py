"""Sessions out of files: what `session_saving` wrote, with nothing taken on trust."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.engine.engine import Engine
from quire.engine.room import Rank
from quire.engine.sequence import Mark, Record, Sequence
from quire.errors import OutOfMemory, SessionFileError
from quire.memory.saved.format import Container
from quire.memory.saved.read import Reading
from quire.memory.saved.types import Found, StateFlags, StateRead
from quire.memory.tokens import Tokens

_PLACE_FIELDS = {"computed", "salt", "whole", "arithmetic"}
_FIELDS = _PLACE_FIELDS | {"marks", "notes"}
_MARK_FIELDS = _PLACE_FIELDS | {"name", "checkpoint"}
Opened = tuple[Sequence, dict[str, Mark], dict[str, Any]]
"""A sequence as it was saved, its marks and notes."""


class Opening:
    """A session on its way out of a file, while everybody goes on.

        Opening(…)  ──▶  take_pages  ──▶  read  ──▶  finish, or `let_go`
        any thread       on the loop      any        on the loop

    `share` lets others begin with its pages, `strict` refuses what other arithmetic computed.
    """

    def __init__(
        self, file: BinaryIO, source: str, engine: Engine, model: str, share: bool, strict: bool
    ) -> None:
        """Checks everything but pages."""
        self._engine = engine
        self._share = share
        self._sequence: Sequence | None = None
        self._reading = Reading(
            engine.memory, Container(file, source), "sequence", StateFlags.WHOLE, model,
            Contents(source, engine, strict).check,
        )  # fmt: skip

    def take_pages(self) -> None:
        """Pages for it, whoever has to give way; OutOfMemory where that is not enough."""
        engine = self._engine
        sequence = engine.new_sequence()
        try:
            self._made_room(partial(self._reading.take_pages, sequence.id), sequence)
        except BaseException:
            engine.end(sequence)
            raise
        self._sequence = sequence
        engine.budget.whole.passing += 1

    def read(self) -> None:
        """Fills the pages."""
        self._reading.fill()

    def finish(self) -> Opened:
        """The session is there."""
        engine, sequence = self._engine, self._sequence
        engine.check_open()
        assert sequence is not None, "it has pages"
        found: list[StateRead] = []
        self._made_room(lambda: found.append(self._reading.finish()), sequence)
        self._pass()
        (read,) = found
        facts, arrays = read.extra.facts, read.extra.arrays
        sequence.become(self._record(facts, arrays, ""))
        engine.prefix.track(sequence)
        marks = {}
        for i, told in enumerate(facts["marks"]):
            record = self._record(told, arrays, f"mark {i} ")
            checkpoint = read.checkpoints[told["checkpoint"]]
            marks[told["name"]] = engine.history.marked(told["name"], record, checkpoint)
        return sequence, marks, json.loads(facts["notes"])

    def _record(
        self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], label: str
    ) -> Record:
        """What a file told of a record; it was checked."""
        tokens, logits = Tokens(arrays[f"{label}tokens"]), arrays.get(f"{label}logits")
        exact = facts["arithmetic"] == self._engine.runner.model.arithmetic
        shared, salt = self._share and exact, facts["salt"]
        return Record(tokens, facts["computed"], logits, facts["whole"], salt, shared, exact)

    def let_go(self) -> None:
        """It is there, or will not be, and nobody reads any more; once is enough."""
        if self._sequence is not None:
            sequence = self._sequence
            self._pass()
            if not self._engine.closed:
                self._reading.give_back()
                self._engine.end(sequence)

    def _pass(self) -> None:
        self._sequence = None
        self._engine.budget.whole.passing -= 1

    def _made_room(self, do: Callable[[], None], for_: Sequence) -> None:
        """Does something, whoever has to give way; OutOfMemory where that is not enough."""

        def done() -> bool:
            try:
                do()
            except OutOfMemory:
                return False
            return True

        if not self._engine.room.make(done, for_, Rank.RUNNING):
            do()  # it says best why not


def _are_notes(written: object) -> bool:
    try:
        return isinstance(written, str) and isinstance(json.loads(written), dict)
    except (ValueError, RecursionError):
        return False


class Contents:
    """Refuses a file whose tokens and marks do not go with this engine and with each other."""

    def __init__(self, source: str, engine: Engine, strict: bool) -> None:
        self.source = source
        self.strict = strict
        self.engine = engine

    def check(self, found: Found) -> None:
        """Raises SessionFileError, before anything was changed."""
        facts, arrays = found.extra.facts, dict(found.extra.arrays)
        if facts.keys() != _FIELDS or not _are_notes(facts["notes"]):
            self._refuse("it is no session: it does not have the fields of one")
        if not found.complete:
            self._refuse("memory does not have all of its tokens")
        (end,) = found.ends.values()
        self._check_place("the session", "", facts, arrays, end)
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
        self._check_origin(what, facts)
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
        whole = facts["whole"]
        if whole is not None and not (type(whole) is int and 0 <= whole < len(tokens)):
            self._refuse(f"{what} does not say whether tokens were taken out")
        if logits is not None and (
            logits.dtype != np.float32 or logits.shape != (n_vocab,) or np.isnan(logits).any()
            or computed != len(tokens)
        ):  # fmt: skip
            self._refuse(f"{what} has logits that are not those of its last token")

    def _check_origin(self, what: str, facts: Mapping[str, Any]) -> None:
        if not isinstance(facts["salt"], str):
            self._refuse(f"{what} has no salt")
        ours, theirs = self.engine.runner.model.arithmetic, facts["arithmetic"]
        if not isinstance(theirs, str) or (self.strict and theirs != ours):
            self._refuse(
                f"{what} was computed with other arithmetic: {str(theirs)[:80]!r} there, {ours!r} "
                "here; open it without strict=True to go on with other bits"
            )

    def _refuse(self, reason: str) -> NoReturn:
        raise SessionFileError(f"{self.source}: {reason}")
